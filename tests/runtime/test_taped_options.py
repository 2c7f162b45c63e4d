"""No weight type, KV cache type or format of activations loses the tape of a CPU: a whole step is one call into C++."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from bankfull.building import build_weights, plan_build
from bankfull.config import RunConfig
from bankfull.errors import ConfigError
from bankfull.layers.decoder import Decoder
from bankfull.ops import Kit, native
from bankfull.ops.products.activations import RULES
from bankfull.quantize import outliers
from bankfull.quantize.at_load import rounded
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.runtime.forward import Eager, Forward
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles, open_model
from tests.weights.schemes import QUANTIZED, InScheme, folder

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.runtime.taped import Taped

CPU = torch.device("cpu")
TYPES = ("int8", "int8:row", "int8:128", "int4", "int3", "int2:64", "uint4", "fp8", "q4_0", "q4_k", "int4,tables")
TYPES += ("fp8,tables", outliers.NAME)
TOKENS = [3, 14, 15, 9, 26, 5, 35, 8, 60, 33, 12, 1]
CHUNKS = (5, 1, 4, 1, 1)


def files_of(quantize: str | None) -> ModelFiles:
    files = open_model(folder())
    if quantize is None:
        return files
    if quantize != outliers.NAME:
        return rounded(files, quantize, Cpu())
    names = [name for name in files.source.names() if is_inner_matrix(files.source, name)]
    columns = {name: (0, 7, 200) if "mlp" in name else (5,) for name in names}
    columns["model.layers.0.self_attn.o_proj.weight"] = ()
    return replace(files, source=OutlierSource(files.source, columns, CPU))


def built(files: ModelFiles, **options: Any) -> tuple[Decoder, Kit]:
    build = plan_build(files, RunConfig(device="cpu", **options), Cpu())
    return build_weights(files, build, Cpu()), build.kit


def run(model: Decoder, forward: Forward) -> torch.Tensor:
    """Hidden states of a prompt, decodes and a verify width."""
    layout, start, made = layout_of(model.states(), 16), 0, []
    with torch.inference_mode():
        for turn, count in enumerate(CHUNKS):
            made.append(forward(naive.single_batch(layout, TOKENS, start, count, turn, CPU)).clone())
            start += count
    return torch.cat(made)


def sides(model: Decoder) -> list[Eager]:
    layout = layout_of(model.states(), 16)
    storages = [Storage(layout, 4, 3, CPU) for _ in range(2)]
    for storage in storages:
        storage.frames.zero_()
    return [Eager(model, layout, storage.layers) for storage in storages]


def check(model: Decoder, kit: Kit) -> None:
    plain, other = sides(model)
    taped = Taped(other, kit)
    assert not taped.tape.breaks
    found, captured = run(model, plain), run(model, taped)
    assert found.isfinite().all() and torch.equal(found, captured)


@pytest.mark.parametrize("quantize", [None, *TYPES])
@pytest.mark.parametrize("activations", ["auto", *RULES])
def test_the_tape_holds_whatever_weights_and_activations_are_rounded_to(quantize: str | None, activations: str) -> None:
    options = {"activations": activations}
    if activations in ("float", "token"):
        options["dtype"] = "float32"  # without it the checkpoint's bfloat16 is computed by torch, which a line declares
    files = files_of(quantize)
    try:
        model, kit = built(files, **options)
    except ConfigError as refused:
        assert "has no use here" in str(refused)
        return
    check(model, kit)


@pytest.mark.parametrize("scheme", [name for name in QUANTIZED if name not in TYPES])
def test_the_tape_holds_for_every_scheme_of_a_checkpoint(scheme: str) -> None:
    files = open_model(folder())
    check(*built(replace(files, source=InScheme(files.source, scheme))))


@pytest.mark.parametrize("quantize", [None, "int8", outliers.NAME])
@pytest.mark.parametrize("pages", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_the_tape_holds_for_every_type_of_keys_and_values(pages: str, quantize: str | None) -> None:
    check(*built(files_of(quantize), kv_dtype=pages))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_dtype_that_loses_kernels_on_the_tape_is_declared(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "bankfull"):
        model, kit = built(files_of("int8"), dtype=dtype, activations="float")
    taped = Taped(sides(model)[1], kit) if any(counts["native"] for counts in kit.chosen.values()) else None
    assert taped is None or taped.tape.breaks
    assert "without a native kernel" in caplog.text


def test_layers_of_llm_int8_with_one_input_share_its_columns() -> None:
    """Queries, keys and values round one row once; so do gate and up."""
    model, kit = built(files_of(outliers.NAME))
    taped = Taped(sides(model)[1], kit)
    kinds = Counter(name for name, _, _ in taped.tape._tape.times())
    assert kinds["gather"] == kinds["scale"] == 3, "queries, keys and values; gate and up; down; the output has none"
    assert kinds["packed"] == 4


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_load_in_8bit_runs_on_the_tape_in_every_dtype(dtype: str) -> None:
    """`torch_dtype=torch.bfloat16` is what callers of transformers add."""
    check(*built(files_of(outliers.NAME), dtype=dtype))
