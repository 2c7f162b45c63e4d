"""From options to a model: what is rounded, what stays exact, and what is refused."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams, assembly, precision
from bankfull.building import plan_build
from bankfull.config import RunConfig
from bankfull.errors import BankfullError, ConfigError, RankLost
from bankfull.familiar import configure
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for, native
from bankfull.ops.products.activations import RULES
from bankfull.precision import choose_activations
from bankfull.quantize.at_load import rounded
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.runtime.taped import Taped
from bankfull.weights.formats import SCHEMES
from bankfull.weights.locate import locate
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import inner_weights
from bankfull.weights.source import open_model
from tests.tiny import folder_of, speaking_folder

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = "The engine fills its channel"


def fresh(**options: object) -> LLM:
    return LLM(str(speaking_folder()), **{"dtype": "float32", "memory": "8MiB", **options})  # type: ignore[arg-type]


class Rounded:
    """The tiny model's own tensors; what `--quantize` rounds has been rounded, and is dense again."""

    def __init__(self, name: str) -> None:
        self.inner, self.type = open_model(speaking_folder()).source, name

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def get(self, name: str) -> QTensor:
        found = self.inner.get(name)
        if len(found.shape) != 2 or found.shape[1] % 32 or "embed" in name:
            return found
        return QTensor.dense(quantize(found.dequantize(), self.type).dequantize())


def model_over(source: object) -> Decoder:
    config = open_model(speaking_folder()).config
    return build_model(config, Build(source, kit_for("cpu", "torch"), torch.float32, CPU))  # type: ignore[arg-type]


@pytest.mark.parametrize("providers", ["auto", "torch"])
@pytest.mark.parametrize(("wanted", "stored"), [("int4", "int4_g32"), ("int8:128", "int8_g32"), ("q5_0,keep", "q5_0")])
def test_a_model_rounded_at_load_computes_with_the_rounded_numbers(wanted: str, stored: str, providers: str) -> None:
    llm = fresh(quantize=wanted, providers=providers)
    output = llm.generate(PROMPT, GREEDY)[0]
    expected, margins = naive.generate(model_over(Rounded(stored)), output.prompt_token_ids, 12, CPU)
    assert min(margins) > 1e-3 and output.outputs[0].token_ids == expected
    plain = fresh(providers=providers).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert wanted != "int4" or plain != expected, "rounding to 4 bits changed nothing: the test proves nothing"
    layer = llm.loaded.model.blocks[0].mixer
    as_kernels_read_it = {"int4_g32": "q4_0", "int8_g32": "q8_0"}.get(stored, stored)
    assert layer.q.weight.scheme.name == (as_kernels_read_it if providers == "auto" else stored)  # type: ignore[attr-defined]
    assert llm.loaded.model.blocks[0].feed.down.weight.is_dense  # type: ignore[union-attr]


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize("wanted", ["int8", "int4:64"])
def test_the_kernels_run_group_formats_at_once(wanted: str) -> None:
    assert set(fresh(quantize=wanted).loaded.kit.chosen["linear"]) == {"native"}


def test_what_is_kept_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        fresh(quantize="int8")
        assert [r.message for r in caplog.records] == [
            "2 matrices are left unquantized: no group of int8 divides their columns."
        ]
        caplog.clear()
        fresh()
        assert not caplog.records


def test_tables_are_rounded_only_where_asked_for() -> None:
    kept, tables = (fresh(quantize=wanted).loaded.model for wanted in ("int8", "int8,tables"))
    assert kept.head.project.weight.scheme == SCHEMES["f32"]
    assert tables.head.project.weight.scheme == SCHEMES["q8_0"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantize": "int5"}, "'int5'"),
        ({"quantize": "int4:48"}, "int4:64"),
        ({"quantize": "tables"}, "names no type"),
        ({"quantize": 4}, "quantize=4"),
        ({"quantize": "q4_0"}, "48 columns"),
        ({"kv_dtype": "int2"}, "kv_dtype='int2'"),
        ({"kv_cache_dtype": "fp4"}, "kv_dtype='fp4'"),
        ({"activations": "int4"}, "activations='int4'"),
    ],
)
def test_a_bad_option_is_refused_in_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(BankfullError) as caught:
        fresh(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8", "expand": True}])
def test_int8_activations_are_refused_where_no_weight_is_in_blocks(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="has no use here"):
        fresh(activations="int8", **options)


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize("saved", ["bfloat16", "float16", "float32"])
def test_a_checkpoint_in_bfloat16_runs_in_it_on_one_tape_without_breaks(saved: str, tmp_path: Path) -> None:
    """Any other one does where it is asked for."""
    folder = tmp_path / "saved"
    shutil.copytree(speaking_folder(), folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, saved)).save_pretrained(folder)
    asked = {} if saved == "bfloat16" else {"dtype": "bfloat16"}
    llm = LLM(str(folder), memory="8MiB", **asked)  # type: ignore[arg-type]
    build = llm.loaded.build
    assert (build.activations.name, build.dtype, build.pages) == ("bf16", torch.float32, torch.bfloat16)
    assert {provider for found in build.kit.chosen.values() for provider in found} == {"native"}
    captured = llm.loaded.frontend.engine.runner.run_model
    assert isinstance(captured, Taped) and not captured.tape.breaks
    output = llm.generate(PROMPT, GREEDY)[0]
    expected, margins = naive.generate(llm.loaded.model, output.prompt_token_ids, 12, CPU)
    assert min(margins) > 1e-3 and output.outputs[0].token_ids == expected


def test_a_model_computed_in_bfloat16_throughout_gives_as_many_columns_as_it_has() -> None:
    """Its step is captured, too, wherever a kernel takes part."""
    output = fresh(dtype="bfloat16", activations="float").generate(PROMPT, GREEDY)[0]
    assert len(output.outputs[0].token_ids) == 12


def test_a_quantized_file_is_not_quantized_again() -> None:
    with pytest.raises(ConfigError, match=r"is quantized already \(q4_1, q8_0\)"):
        LLM("smollm2", quantize="int8")


def build_of(llm: LLM) -> tuple[str, torch.dtype]:
    return llm.loaded.build.activations.name, llm.loaded.build.pages


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize(
    ("options", "activations", "pages"),
    [
        ({}, "int8", torch.bfloat16),
        ({"dtype": "float32"}, "float", torch.float32),
        ({"dtype": "bfloat16"}, "bf16", torch.bfloat16),
        ({"dtype": "bfloat16", "quantize": None}, "bf16", torch.bfloat16),
        ({"dtype": "bfloat16", "providers": "torch"}, "float", torch.bfloat16),
        ({"dtype": "bfloat16", "activations": "float"}, "float", torch.bfloat16),
        ({"activations": "bf16"}, "bf16", torch.bfloat16),
        ({"activations": "bf16", "quantize": None, "kv_dtype": "float32"}, "bf16", torch.float32),
        ({"providers": "torch"}, "float", torch.float32),
        ({"expand": True}, "float", torch.float32),
        ({"quantize": None}, "float", torch.float32),
        ({"activations": "float"}, "float", torch.float32),
        ({"activations": "int8", "dtype": "float32"}, "int8", torch.bfloat16),
        ({"activations": "int8", "kv_dtype": "float32"}, "int8", torch.float32),
        ({"kv_dtype": "int8"}, "int8", torch.int8),
        ({"kv_dtype": "bfloat16", "dtype": "float32"}, "float", torch.bfloat16),
    ],
)
def test_activations_are_int8_unless_something_else_is_asked_for(
    options: dict[str, object], activations: str, pages: torch.dtype
) -> None:
    """Of a model with weights in blocks, on a CPU with its kernels."""
    assert build_of(fresh(**{"quantize": "int8", "dtype": "auto", **options})) == (activations, pages)


def test_activations_per_token_need_weights_with_one_scale_per_row() -> None:
    with pytest.raises(ConfigError, match=r"activations='token' has no use here.*'int8:row', or to 'fp8' on a GPU"):
        fresh(quantize="int8:32", activations="token")
    llm = fresh(quantize="int8:row", activations="token")
    assert "linear_w8a8" in llm.loaded.kit.chosen
    assert len(llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids) == 12


MIXED_GROUPS: dict[str, Any] = {
    "config_groups": {
        "0": {
            "weights": {"num_bits": 8, "strategy": "channel"},
            "input_activations": {"num_bits": 8, "dynamic": True},
        },
        "1": {"weights": {"num_bits": 4, "strategy": "group"}, "input_activations": None},
    }
}
"""w8a8 next to w4a16: each product rounds what its own weights allow."""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "token"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "float"),
        ({"config_groups": {"0": {"input_activations": {"num_bits": 8, "dynamic": True}}}}, "token"),
        ({"config_groups": {"0": {"input_activations": None}}}, "float"),
        (MIXED_GROUPS, "token"),
        ({"config_groups": {**MIXED_GROUPS["config_groups"], "2": {"weights": {"num_bits": 8}}}}, "float"),
        ({"config_groups": []}, "float"),
        ("nonsense", "float"),
    ],
)
def test_a_checkpoint_made_for_rounded_activations_gets_them_on_a_gpu(said: object, expected: str) -> None:
    files = rounded(open_model(speaking_folder()), "int8:row", Cpu())
    files = replace(files, config={**files.config, "quantization_config": said})
    assert choose_activations(RunConfig(), files, "cuda").name == expected
    assert choose_activations(RunConfig(activations="float"), files, "cuda").name == "float"


def test_fp8_means_8_bit_activations_on_a_gpu_as_in_other_engines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However it is asked for, unless the user keeps activations or the GPU cannot multiply them."""
    run, *_ = configure({"quantization": "fp8"})
    assert run.quantize == "fp8"
    files = rounded(open_model(speaking_folder()), str(run.quantize), Cpu())
    gpu = SimpleNamespace(kind="cuda", torch=CPU)

    def told(run: RunConfig) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "bankfull"):
            plan_build(files, run, gpu)  # type: ignore[arg-type]
        return caplog.text

    assert choose_activations(run, files, "cuda") is RULES["token"]
    assert "lossy in two ways" in told(run) and "activations='float'" in told(run)
    floats = replace(run, activations="float")
    assert choose_activations(floats, files, "cuda") is RULES["float"] and not told(floats)
    assert choose_activations(run, rounded(open_model(speaking_folder()), "int8", Cpu()), "cuda") is RULES["float"]
    monkeypatch.setattr(precision, "multiplies_fp8", lambda: False)
    assert choose_activations(run, files, "cuda") is RULES["float"] and "weights only" in told(run)


@pytest.mark.parametrize("wanted", ["bf16", "int8", "int8-few"])
def test_a_gpu_refuses_activations_that_only_a_cpus_kernels_round(wanted: str) -> None:
    """Experts would wait for the device in every layer, and a step with them cannot be recorded."""
    files = rounded(open_model(speaking_folder()), "int8", Cpu())
    with pytest.raises(ConfigError, match=f"activations='{wanted}' is for a CPU"):
        choose_activations(RunConfig(activations=wanted), files, "cuda")
    assert choose_activations(RunConfig(activations=wanted, providers="torch"), files, "cuda") is RULES[wanted]
    assert choose_activations(RunConfig(activations=wanted), files, "cpu") is RULES[wanted]


def test_without_kernels_or_on_another_device_activations_are_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rounded(open_model(speaking_folder()), "int8", Cpu())
    assert choose_activations(RunConfig(), files, "cuda").name == "float"
    monkeypatch.setattr(native, "status", lambda: "they are missing")
    assert choose_activations(RunConfig(), files, "cpu").name == "float"
    monkeypatch.setattr(native, "status", lambda: None)
    assert choose_activations(RunConfig(), files, "cpu").name == "int8"


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_weights_are_copied_for_many_rows_only_where_memory_is_plenty(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = rounded(open_model(speaking_folder()), "int8", Cpu())
    copied = inner_weights(files.source)
    inner = [name for name in files.source.names() if name.endswith("_proj.weight")]
    assert (
        0
        < copied
        == sum(math.prod(files.source.shape(name)) for name in inner if not files.source.scheme(name).is_dense)
    )
    for makes, free, wanted in (
        (False, 4 * copied - 1, "int8"),
        (True, 4 * copied, "int8"),
        (True, 4 * copied - 1, "int8-few"),
    ):
        monkeypatch.setattr(native, "copies_weights", lambda makes=makes: makes)
        monkeypatch.setattr(precision, "available_memory", lambda free=free: free)
        assert choose_activations(RunConfig(), files, "cpu").name == wanted
    assert choose_activations(RunConfig(activations="int8"), files, "cpu").name == "int8"
    with caplog.at_level("WARNING"):
        assert fresh(quantize="int8", dtype="auto").loaded.build.activations.name == "int8-few"
    assert "activations='int8'" in caplog.text


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_values_and_down_projections_are_never_copied_for_many_rows() -> None:
    def mixed(activations: str) -> list[str]:
        model = LLM("smollm2", activations=activations, memory="64MiB").loaded.model
        block = model.blocks[0]
        layers = {
            "q": block.mixer.q,
            "k": block.mixer.k,
            "v": block.mixer.v,
            "o": block.mixer.out,
            "gate": block.feed.gate,
            "up": block.feed.up,
            "down": block.feed.down,
            "head": model.head.project,
        }
        return [name for name, layer in layers.items() if layer.weight.hadamard is not None]

    assert mixed("int8") == (["q", "k", "o", "gate", "up", "head"] if native.copies_weights() else [])
    assert mixed("int8-few") == []


@pytest.mark.parametrize("providers", ["auto", "torch"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_the_engine_stores_keys_and_values_as_asked(kv_dtype: str, providers: str) -> None:
    """In its own pages, and with the tokens of a plain loop that stores them alike."""
    llm = fresh(kv_dtype=kv_dtype, providers=providers)
    (state,) = llm.loaded.frontend.engine.runner.storage.layers[0]
    assert state["k"].dtype == state["v"].dtype == getattr(torch, kv_dtype)
    output = llm.generate(PROMPT, GREEDY)[0]
    expected, margins = naive.generate(llm.loaded.model, output.prompt_token_ids, 12, CPU)
    assert min(margins) > 1e-3 and output.outputs[0].token_ids == expected


def test_int8_keys_and_values_leave_room_for_more_tokens() -> None:
    plain, rounded_ = (fresh(kv_dtype=kv, memory="256KiB").loaded for kv in ("float32", "int8"))
    assert rounded_.layout.token_bytes == 2 * 2 * 2 * (8 + 4) and plain.layout.token_bytes == 2 * 2 * 2 * 8 * 4
    assert rounded_.sizes.frames > 2 * plain.sizes.frames


def test_a_model_without_keys_and_values_refuses_a_dtype_for_them(tmp_path: Path) -> None:
    folder = tmp_path / "mamba"
    shutil.copytree(folder_of("mamba"), folder)
    for file in speaking_folder().glob("tokenizer*"):
        shutil.copy(file, folder)
    LLM(str(folder), memory="8MiB")
    with pytest.raises(ConfigError, match="keeps no keys and values"):
        LLM(str(folder), memory="8MiB", kv_dtype="int8")


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_the_default_model_is_exact_where_a_dtype_is_named() -> None:
    files = open_model(locate("smollm2"))
    plain, exact = (plan_build(files, RunConfig(dtype=dtype), Cpu()) for dtype in ("auto", "float32"))
    assert (plain.activations.name, plain.dtype, plain.pages) == ("int8", torch.float32, torch.bfloat16)
    assert (exact.activations.name, exact.dtype, exact.pages) == ("float", torch.float32, torch.float32)


def test_the_start_is_told_by_its_parts_where_it_takes_long() -> None:
    loaded = fresh().loaded
    assert loaded.start is None, "on a CPU nobody waits"
    loaded.device = SimpleNamespace(kind="cuda")  # type: ignore[assignment]
    loaded.phases = {"weights": 1.25, "kernels compiled": 4.5}
    assert loaded.start == "5.8 s (weights 1.2 s, kernels compiled 4.5 s)"


@pytest.mark.parametrize(("threads", "tokens"), [(1, 512), (4, 512), (8, 1024), (16, 2048), (64, 2048)])
def test_a_step_of_a_cpu_has_tokens_for_each_of_its_threads(
    monkeypatch: pytest.MonkeyPatch, threads: int, tokens: int
) -> None:
    monkeypatch.setattr(native, "threads", lambda: threads)
    assert Cpu().suits == {"rows": 64, "step_tokens": tokens}


@pytest.mark.parametrize(
    "error",
    [RankLost("rank 1 of 2 has ended"), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ConfigError("no")],
)
def test_only_a_failed_allocation_of_pages_is_reported_as_one(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(problem: BaseException) -> None:
        def runner(*args: object, **options: object) -> None:
            raise problem

        monkeypatch.setattr(assembly, "DeviceRunner", runner)

    fails(error)
    with pytest.raises(type(error)) as caught:
        fresh()
    assert caught.value is error
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 60, dtype=torch.uint8)
    for failed in (torchs.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")):
        fails(failed)
        with pytest.raises(ConfigError, match="pages could not be allocated; lower memory"):
            fresh()
