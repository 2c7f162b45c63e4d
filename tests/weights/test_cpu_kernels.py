"""No linear layer runs on a torch body on a CPU in silence: each scheme has a kernel, or a line of the log says so."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bankfull import LLM, SamplingParams
from bankfull.building import build_weights, plan_build
from bankfull.config import RunConfig
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.limits.model.recipe import recipe_of
from bankfull.models.registry import build_model
from bankfull.ops import kit_for, native
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.rows import BF16_ROW, FP8
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles, open_model
from bankfull.weights.widened_source import in_bfloat16
from tests.tiny import speaking_folder
from tests.weights.schemes import QUANTIZED, InScheme, folder

pytestmark = pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
CPU = torch.device("cpu")
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8]
SLOW = "without a native kernel"


def files_in(scheme: str, **config: object) -> ModelFiles:
    files = open_model(folder())
    source = InScheme(files.source, scheme)
    return replace(files, config={**files.config, **config}, source=source)  # type: ignore[arg-type]


def built(scheme: str, **options: Any) -> tuple[Any, Build]:
    files = files_in(scheme, dtype=options.pop("saved", "bfloat16"))
    build = plan_build(files, RunConfig(device="cpu", **options), Cpu())
    return build_weights(files, build, Cpu()), build


@lru_cache
def expected(scheme: str) -> torch.Tensor:
    files = files_in(scheme)
    build = Build(files.source, kit_for("cpu", "torch"), torch.float64, CPU, expand=True)
    return naive.hidden_states(build_model(files.config, build), TOKENS, CPU)


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "auto": ({}, 0.06),
    "float16, auto": ({"saved": "float16"}, 0.06),
    "float32": ({"dtype": "float32"}, 2e-5),
    "bf16": ({"activations": "bf16"}, 0.06),
}


@pytest.mark.few(88)
@pytest.mark.parametrize(("scheme", "options"), [(scheme, options) for scheme in QUANTIZED for options in OPTIONS])
def test_every_scheme_of_a_checkpoint_is_multiplied_by_kernels(
    scheme: str, options: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, tolerance = OPTIONS[options]
    with caplog.at_level(logging.WARNING, "bankfull"):
        model, build = built(scheme, **given)
    assert not build.kit.bodies and SLOW not in caplog.text
    linears = {name for name in build.kit.chosen if name.startswith("linear")}
    assert linears and all(set(build.kit.chosen[name]) == {"native"} for name in linears)
    found, meant = naive.hidden_states(model, TOKENS, CPU).double(), expected(scheme)
    assert float((found - meant).norm() / meant.norm()) < tolerance


@pytest.mark.parametrize("scheme", ["fp8", "fp8_g128"])
def test_fp8_on_a_cpu_keeps_activations_and_says_what_it_costs(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        model, build = built(scheme)
    assert build.activations.name == "bf16", "as for the unquantized checkpoint"
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("7 fp8 matrices are multiplied") and "MB become" in line and "not rounded to 8 bits" in line
    assert ("exactly their values" in line) == (scheme == "fp8")
    layer = model.blocks[0].feed.down
    assert isinstance(layer, Linear) and layer.stored.scheme.name == (BF16_ROW if scheme == "fp8" else "bf16")
    stored = QTensor.dense(files_in(scheme).source.get("model.layers.0.mlp.down_proj.weight").dequantize())
    values = layer.weight.dequantize()
    if scheme == "fp8":
        assert torch.equal(values, stored.parts["data"])
    else:
        assert torch.equal(values, stored.parts["data"].to(torch.bfloat16).float()), "rounded once"


@pytest.mark.parametrize("wanted", ["int8", "int8-few", "token"])
def test_activations_that_no_cpu_kernel_rounds_for_fp8_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="a CPU multiplies fp8 as bfloat16"):
        built("fp8", activations=wanted)


def test_fp8_codes_are_exact_in_bfloat16_for_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).repeat(9, 1)
    codes = codes[:, codes[0].float().isfinite()]
    scales = torch.tensor([0.0, 1.0, 0.5, 1 / 3, 3e-3, 1.7e-30, 2.0**-100, 1e30, 12345.678]).unsqueeze(1)
    stored = QTensor(SCHEMES[FP8], {"codes": codes, "scales": scales}, tuple(codes.shape))
    made = in_bfloat16(stored)
    assert torch.equal(made.dequantize(), stored.dequantize())
    assert bool(((made.parts["scales"] >= 0.5) & (made.parts["scales"] <= 1)).all()), "a bias is divided by them"


def test_rows_of_int8_whose_scales_float16_cannot_hold_stay_exact(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        model, build = built("int8_row", dtype="float32")
    assert model.blocks[0].feed.down.stored.scheme.name == BF16_ROW
    assert "float16 cannot hold their scales" in caplog.text and not build.kit.bodies


@pytest.mark.parametrize(
    ("options", "scheme", "says"),
    [
        ({"dtype": "float64"}, "f64", "no kernel computes in float64: use dtype='float32'"),
        ({"dtype": "float16", "activations": "float"}, "f16", "no kernel computes in float16"),
        ({"dtype": "bfloat16", "activations": "float"}, "bf16", "use activations='bf16'"),
    ],
)
def test_one_line_says_which_layers_have_no_kernel_and_what_to_do(
    options: dict[str, Any], scheme: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        LLM(str(speaking_folder()), memory="8MiB", **options)
    (line,) = [record.message for record in caplog.records if SLOW in record.message]
    assert says in line and line.endswith(".")
    assert re.match(rf"15 layers run without a native kernel \(15 of {scheme}\)", line)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bankfull"):
        LLM(str(speaking_folder()), memory="8MiB", providers="torch", **options)
    assert SLOW not in caplog.text, "torch bodies were asked for"


def test_rounding_to_fp8_at_load_runs_what_a_published_fp8_checkpoint_runs(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = "The engine fills its channel"
    at_load = LLM(str(speaking_folder()), memory="8MiB", quantize="fp8")
    made = tmp_path / "fp8"
    made.mkdir()
    tensors = {}
    for name, stored in load_file(speaking_folder() / "model.safetensors").items():
        tensors[name] = stored
        if is_inner_matrix(open_model(speaking_folder()).source, name):
            rounded = quantize(stored.float(), FP8)
            tensors[name] = rounded.parts["codes"]
            tensors[name.removesuffix("weight") + "weight_scale"] = rounded.parts["scales"]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((speaking_folder() / "config.json").read_text())
    said = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    for file in speaking_folder().glob("tokenizer*"):
        (made / file.name).write_bytes(file.read_bytes())
    published = LLM(str(made), memory="8MiB")
    runs = [llm.generate(prompt, greedy)[0].outputs[0].token_ids for llm in (at_load, published)]
    assert runs[0] == runs[1] and at_load.loaded.uncaptured is published.loaded.uncaptured is None
    for llm in (at_load, published):
        assert llm.loaded.build.activations.name == "float", "as the model without rounding, in float32"
        assert not llm.loaded.engine.runner.run_model.tape.breaks  # type: ignore[attr-defined]


def test_the_bytes_that_fp8_takes_on_a_cpu_are_those_that_are_planned() -> None:
    source = open_model(folder())
    sizes = {device: recipe_of(source, device, RunConfig(quantize="fp8")) for device in ("cpu", "cuda")}
    name = "model.layers.0.mlp.down_proj.weight"
    assert sizes["cpu"].schemes[name].name == BF16_ROW and sizes["cuda"].schemes[name].name == FP8
