"""Round-to-nearest quantization: the standard bytes where a standard exists, and errors within half a step."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError, ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import TYPES, quantize
from bankfull.weights.requantized import Requantized, bits_per_weight, block_types, parse_quantization
from tests.quick import examples

STANDARD = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
SUPER = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
GROUP = {"q2_k": 16, "q3_k": 16, "q4_k": 32, "q5_k": 32, "q6_k": 16}


def reference(values: np.ndarray, name: str) -> np.ndarray:
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name.upper()])


def awkward(columns: int = 256) -> torch.Tensor:
    """Normal rows over many magnitudes, and rows with zeros, ties, one sign only, and half steps."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(200, columns, generator=generator) * 10 ** torch.linspace(-4, 3, 200)[:, None]
    ties = torch.where(torch.randn(20, columns, generator=generator) > 0, 1.5, -1.5)
    steps = torch.randint(-127, 128, (20, columns), generator=generator) / 2
    flat = torch.zeros(2, columns)
    flat[1] = -0.75
    return torch.cat((rows, ties, steps, flat, rows[:20].abs(), -rows[:20].abs()))


@pytest.mark.parametrize("name", STANDARD)
def test_standard_types_are_encoded_bit_for_bit_as_the_format_says(name: str) -> None:
    values = awkward()
    made = quantize(values, name)
    np.testing.assert_array_equal(made.parts["blocks"].numpy(), reference(values.numpy(), name))


@pytest.mark.parametrize("name", STANDARD)
@examples(40, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e4))
def test_any_values_are_encoded_as_the_format_says(name: str, seed: int, scale: float) -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).mul(scale)
    np.testing.assert_array_equal(quantize(values, name).parts["blocks"].numpy(), reference(values.numpy(), name))


@pytest.mark.parametrize("name", STANDARD)
def test_standard_errors_are_within_half_a_step(name: str) -> None:
    values = awkward()
    made = quantize(values, name)
    step = steps_of(made)
    error = (made.dequantize() - values).abs().reshape(len(values), -1, 32)
    # The one code that a symmetric type lacks above zero costs the opposite extreme up to a whole step, and scales and
    # minima are themselves rounded to float16, where values below 2^-14 lose bits.
    allowed = 1.0 if name in ("q4_0", "q5_0") else 0.5
    slack = values.abs().reshape(len(values), -1, 32).amax(-1, keepdim=True) * 2**-10 + 128 * 2**-25
    assert bool((error <= step * allowed + slack).all())


@pytest.mark.parametrize("name", SUPER)
def test_super_block_errors_are_within_half_of_each_groups_own_step(name: str) -> None:
    values = awkward(512)
    assert_within_half_a_step(quantize(values, name), values)


@pytest.mark.parametrize("name", SUPER)
@examples(40, deadline=None)
@given(seed=st.integers(0, 2**31), scale=st.floats(1e-6, 1e3), shift=st.floats(-3, 3))
def test_any_super_block_is_within_half_a_step(name: str, seed: int, scale: float, shift: float) -> None:
    values = (torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)) + shift) * scale
    assert_within_half_a_step(quantize(values, name), values)


def assert_within_half_a_step(made: QTensor, values: torch.Tensor) -> None:
    error = (made.dequantize(torch.float64) - values).abs()
    step = steps_of(made).expand(-1, -1, GROUP[made.scheme.name]).reshape(values.shape)
    assert bool((error <= step.double() * 0.5 * (1 + 1e-6) + values.abs() * 1e-6).all())


def steps_of(made: QTensor) -> torch.Tensor:
    """(rows, groups, 1): the distance of adjacent codes, from dequantizing codes 0 and 1."""
    scheme, blocks = made.scheme, made.parts["blocks"].reshape(-1, made.scheme.block_bytes)
    codes = {
        "q4_0": (2, 18),
        "q4_1": (4, 20),
        "q5_0": (6, 22),
        "q5_1": (8, 24),
        "q8_0": (2, 34),
        "q2_k": (16, 80),
        "q3_k": (32, 96),
        "q4_k": (16, 144),
        "q5_k": (48, 176),
        "q6_k": (0, 128),
    }[scheme.name]
    one = {"q8_0": 1, "q2_k": 0x55, "q3_k": 0x55}.get(scheme.name, 0x11)
    both = []
    for fill in (0, one):
        changed = blocks.clone()
        changed[:, codes[0] : codes[1]] = fill
        if scheme.name in ("q5_0", "q5_1", "q3_k", "q5_k", "q6_k"):
            at = {"q5_0": (2, 6), "q5_1": (4, 8), "q3_k": (0, 32), "q5_k": (16, 48), "q6_k": (128, 192)}[scheme.name]
            changed[:, at[0] : at[1]] = 0
        both.append(QTensor(scheme, {"blocks": changed}, (len(blocks), scheme.block)).dequantize(torch.float64))
    group = GROUP.get(scheme.name, 32)
    return (both[1] - both[0]).abs().reshape(made.shape[0], -1, group)[..., :1]


@pytest.mark.parametrize("name", TYPES)
def test_every_block_type_of_the_engine_can_be_written(name: str) -> None:
    values = awkward()
    made = quantize(values.reshape(2, -1, 256), name)
    assert made.shape == (2, len(values) // 2, 256) and made.scheme == SCHEMES[name]
    assert made.nbytes == len(values) * SCHEMES[name].row_bytes(256)
    assert sorted(TYPES) == sorted(n for n, s in SCHEMES.items() if s.is_rounded)


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_1", "q6_k"])
def test_more_bits_lose_less(name: str) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    coarser = {"q8_0": "q5_1", "q5_1": "q4_1", "q4_1": "q2_k", "q6_k": "q4_k"}[name]

    def error(chosen: str) -> float:
        return float((quantize(values, chosen).dequantize() - values).square().mean())

    assert error(name) < 0.5 * error(coarser)


def test_blocks_wider_than_the_working_memory_bound_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = awkward()
    whole = quantize(values, "q4_k").parts["blocks"]
    monkeypatch.setattr("bankfull.weights.quantize.ELEMENTS_AT_ONCE", 1024)
    assert torch.equal(quantize(values, "q4_k").parts["blocks"], whole)


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ModelError, match="256 columns wide"):
        quantize(torch.zeros(2, 96), "q4_k")
    with pytest.raises(ConfigError, match="q4_0"):
        quantize(torch.zeros(2, 96), "q9_9")
    for name in TYPES:
        with pytest.raises(ModelError, match="not finite"):
            quantize(torch.full((1, 256), float("nan")), name)
        if any(part.name == "scales" and part.dtype == torch.float32 for part in SCHEMES[name].parts):
            continue
        with pytest.raises(ModelError, match="too large"):
            quantize(torch.linspace(-1e30, 1e30, 256)[None], name)


class Tensors:
    """A tensor source in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def scheme(self, name: str):  # type: ignore[no-untyped-def]
        return self.get(name).scheme

    def get(self, name: str) -> QTensor:
        return QTensor.dense(self.tensors[name])

    def unread(self) -> list[str]:
        return []


def source() -> Tensors:
    torch.manual_seed(0)
    return Tensors(
        {
            "model.embed_tokens.weight": torch.randn(10, 64),
            "lm_head.weight": torch.randn(10, 64),
            "model.layers.0.mlp.up_proj.weight": torch.randn(256, 64),
            "model.layers.0.mlp.down_proj.weight": torch.randn(64, 256),
            "model.norm.weight": torch.randn(64),
            "model.layers.0.mixer.A_log": torch.randn(64, 32),
            "model.layers.0.mixer.conv1d.weight": torch.randn(64, 1, 32),
        }
    )


def test_only_matrices_are_requantized_and_tables_only_if_asked() -> None:
    def changed(tables: bool) -> set[str]:
        made = Requantized(source(), ("q4_0",), tables)
        for name in made.names():
            assert made.get(name).scheme == made.scheme(name) and made.get(name).shape == made.shape(name)
        return {name for name in made.names() if made.scheme(name).name == "q4_0"}

    inner = {"model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"}
    assert changed(False) == inner
    assert changed(True) == inner | {"model.embed_tokens.weight", "lm_head.weight"}


def test_matrices_that_the_first_type_does_not_fit_get_the_second_or_a_refusal() -> None:
    made = Requantized(source(), parse_quantization("Q4_K, q5_0").types)
    assert made.scheme("model.layers.0.mlp.down_proj.weight").name == "q4_k"
    assert made.scheme("model.layers.0.mlp.up_proj.weight").name == "q5_0"
    with pytest.raises(ModelError, match=r"up_proj\.weight has 64 columns"):
        Requantized(source(), ("q4_k",)).get("model.layers.0.mlp.up_proj.weight")
    kept = Requantized(source(), parse_quantization("q4_k,keep").types)
    assert [kept.scheme(f"model.layers.0.mlp.{n}_proj.weight").name for n in ("down", "up")] == ["q4_k", "f32"]
    for unknown in ("int5", "keep", "q4_0,", "", "fp8_g128"):
        with pytest.raises(ConfigError, match="cannot be quantized"):
            parse_quantization(unknown)


def test_bits_per_weight_include_the_scales() -> None:
    assert bits_per_weight(source()) == 32
    assert bits_per_weight(Requantized(source(), ("q4_0",), True)) == 4.5


def test_integer_types_fall_back_to_narrower_groups_and_then_keep_a_matrix() -> None:
    assert parse_quantization("int4").types == ("int4_g32", "keep")
    assert parse_quantization("int3:64", "cuda").types == ("int3_g64", "int3_g32", "keep")
    assert parse_quantization("uint2", "cuda").types == ("uint2_g128", "uint2_g64", "uint2_g32", "keep")
    assert parse_quantization("int8:128") == parse_quantization("INT8_g128") and parse_quantization(
        "int8:128"
    ).types == (
        "int8_g128",
        "int8_g64",
        "int8_g32",
        "keep",
    )
    assert parse_quantization("int4:64,q8_0").types == ("int4_g64", "int4_g32", "q8_0")
    widths = {"a.weight": 256, "b.weight": 192, "c.weight": 96, "d.weight": 40, "lm_head.weight": 40}
    made = Requantized(Tensors({n: torch.randn(4, w) for n, w in widths.items()}), parse_quantization("int4:128").types)
    assert [made.get(name).scheme.name for name in widths] == ["int4_g128", "int4_g64", "int4_g32", "f32", "f32"]
    assert made.kept() == ["d.weight"]


def test_tables_are_an_option_of_the_quantization() -> None:
    assert parse_quantization("q4_0, tables").tables and not parse_quantization("q4_0").tables
    for unknown in ("tables", "int4:", "int4:48", "int4:x", "int4_g", "int", "int4:64:32"):
        with pytest.raises(ConfigError):
            parse_quantization(unknown)


def test_the_quantized_types_of_a_source_are_told_without_reading_it() -> None:
    assert block_types(source()) == []
    assert block_types(Requantized(source(), parse_quantization("q4_k,int4:64").types)) == ["int4_g64", "q4_k"]


def test_bits_per_weight_of_groups() -> None:
    assert bits_per_weight(Requantized(source(), ("int4_g64",), True)) == 4.25
    assert bits_per_weight(Requantized(source(), ("int8_g32",), True)) == 8.5
