"""Edge cases of the small GPU kernels: strided halves, long and odd rows, wide streams, large positions, empty
inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bankfull.ops.triton.providers  # noqa: F401  (registers the kernels)
from bankfull.ops import OPERATIONS, RecurrentMeta
from bankfull.ops.norm.triton import LONGEST, tile
from bankfull.ops.pointwise.body import _KINDS as KINDS
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import moved

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU, kernels are interpreted on the host."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: One ulp of values near one.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture
def draw() -> Callable[..., Tensor]:
    numbers = torch.Generator().manual_seed(5)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=numbers).to(dtype).to(DEVICE)

    return normal


def ran(name: str, *args: Any) -> Any:
    """The kernels' results, which must have the body's dtype and shape."""
    operation = OPERATIONS[name]
    got, expected = operation.providers["triton"].run(*args), operation.body(*args)
    for one, other in zip(_each(got), _each(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return got, expected


def _each(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def check(name: str, *args: Any, steps: int = 1) -> None:
    got, expected = ran(name, *args)
    for one, other in zip(_each(got), _each(expected), strict=True):
        scale = max(1.0, other.abs().max().item()) if other.numel() else 1.0
        torch.testing.assert_close(one, other, rtol=0, atol=steps * STEP[other.dtype] * scale)


def mostly_equal(got: Tensor, expected: Tensor) -> None:
    """Bitwise equal, except where a square root or an exponential differs in its last place and that shows: results are
    rounded where the body rounds. In float32 every last place shows."""
    if got.dtype is not torch.float32:
        same = (got == expected) | ((got - expected).abs() < 1e-6)
        assert same.float().mean().item() > 0.97


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_gate_and_up_may_be_halves_of_one_row(kind: str, dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    for rows, columns in ((1, 1), (3, 37), (5, 2048), (33, 1040)):
        gate, up = (3 * draw(rows, 2 * columns, dtype=dtype)).chunk(2, -1)
        check("activate_mul", gate, up, kind)
        check("activate", gate, kind)
    mostly_equal(*ran("activate_mul", gate, up, kind))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_activations_are_exact_to_rounding(kind: str) -> None:
    x = torch.linspace(-30, 30, 20001).to(DEVICE)
    got = OPERATIONS["activate"].providers["triton"].run(x, kind).double()
    expected = OPERATIONS["activate"].body(x.double(), kind)
    assert ((got - expected).abs() / x.abs().double().clamp(min=1)).max().item() < 3e-7
    if kind == "softplus":  # time steps of a recurrence: small ones must not become zero
        assert ((got - expected).abs() / expected).max().item() < 1e-5
    unusual = torch.tensor([math.nan, 100.0, 0.0, -100.0], device=DEVICE)
    got, expected = ran("activate", unusual, kind)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap_is_straight_near_zero_and_bounded_far_off(dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    x = torch.cat((draw(4, 333), 1e-3 * draw(4, 333), 1e4 * draw(4, 333))).to(dtype)
    got, expected = ran("soft_cap", x, 30.0)
    torch.testing.assert_close(got, expected, rtol=2 * STEP[dtype], atol=4e-6)  # float16 has few bits for small values
    check("soft_cap", x[:, 5:-1], 30.0)


@pytest.mark.parametrize("stream", DTYPES)
@pytest.mark.parametrize("branch", DTYPES)
def test_a_narrow_branch_joins_a_wide_stream(
    stream: torch.dtype, branch: torch.dtype, draw: Callable[..., Tensor]
) -> None:
    x, delta, weight = draw(3, 130, dtype=stream), draw(3, 130, dtype=branch), draw(130, dtype=branch)
    for offset in (0.0, 1.0):
        check("add_rms_norm", x, delta, weight, 1e-5, offset)
        check("rms_norm", x, weight, 1e-5, offset)
    joined, expected = ran("add", x, delta)
    assert torch.equal(joined, expected)
    assert torch.equal(ran("add_rms_norm", x, delta, weight, 1e-5)[0][0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 17, 128, 4096, LONGEST, LONGEST + 1, LONGEST + 9000])
def test_rows_of_every_length(columns: int, dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    x, delta, weight, bias = (draw(*shape, dtype=dtype) for shape in ((2, columns),) * 2 + ((columns,),) * 2)
    check("rms_norm", x, weight, 1e-5)
    check("add_rms_norm", x, delta, weight, 1e-5, 1.0)
    check("layer_norm", 100 + x, weight, bias, 1e-5, steps=20)  # the common offset is lost to rounding
    check("layer_norm", x, weight, bias, 1e-5)
    (_, got), (_, expected) = ran("add_rms_norm", x, delta, weight, 1e-5)
    mostly_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_share_a_program_once_there_are_many(dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    x, delta, weight = draw(37, 1000, dtype=dtype), draw(37, 1000, dtype=dtype), draw(1000, dtype=dtype)
    assert tile(37, 1000, x.device)[1]["ROWS"] > 1 or DEVICE == "cuda"
    check("add_rms_norm", x, delta, weight, 1e-5)
    check("layer_norm", x, weight, weight, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_in_a_stacked_row_are_normed_and_rotated_in_place(
    dtype: torch.dtype, draw: Callable[..., Tensor]
) -> None:
    for tokens, heads, size, half in ((1, 3, 16, 8), (9, 3, 24, 6), (5, 2, 1030, 512)):
        q, k, _ = draw(tokens, 3 * heads, size, dtype=dtype).chunk(3, 1)
        angles = draw(tokens, half)
        for x in (q, k.transpose(0, 1).contiguous().transpose(0, 1), k[..., : 2 * half]):
            check("rms_norm", x, draw(x.shape[-1], dtype=dtype), 1e-6)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            rotated, _ = ran("rotate", x, cos, sin)
            assert torch.equal(rotated, OPERATIONS["rotate"].providers["triton"].run(x.contiguous(), cos, sin))
            assert torch.equal(rotated[..., 2 * half :], x[..., 2 * half :])
            rounded_once(rotated[..., : 2 * half], x, cos, sin)


def rounded_once(rotated: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """As close to the exact result as the dtype allows, except for the last places of float32 products."""
    half = cos.shape[1]
    left, right, c, s = (part.double() for part in (x[..., :half], x[..., half : 2 * half], cos[:, None], sin[:, None]))
    exact = torch.cat((left * c - right * s, right * c + left * s), -1)
    products = torch.cat(((left * c).abs() + (right * s).abs(), (right * c).abs() + (left * s).abs()), -1)
    allowed = torch.finfo(rotated.dtype).eps / 2 * exact.abs() + 2.0**-23 * products
    assert bool(((rotated.double() - exact).abs() <= allowed + torch.finfo(rotated.dtype).tiny).all())


@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_angles_of_far_positions_are_exact(integers: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 4095, 65537, 105615, 105616, 131071, 131072, 1000003], device=DEVICE).to(integers)
    frequencies = (1.0 / 500000 ** (torch.arange(33, dtype=torch.float64) / 33)).float().to(DEVICE)
    for scale in (1.0, 1.19):
        cos, sin = OPERATIONS["rope_angles"].providers["triton"].run(positions, frequencies, scale, torch.float32)
        angles = (positions[:, None].float() * frequencies).double()  # the product is rounded to float32
        assert (cos.double() - scale * angles.cos()).abs().max().item() < 5e-7
        assert (sin.double() - scale * angles.sin()).abs().max().item() < 5e-7
        check("rope_angles", positions, frequencies, scale, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
def test_rows_of_a_table(stored: torch.dtype, dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    table = QTensor.dense(draw(11, 2100, dtype=stored))
    ids = torch.tensor([0, 10, 3, 3], device=DEVICE)
    for scale in (1.0, 45.25):
        got, expected = ran("embedding", ids, table, dtype, scale)
        assert torch.equal(got, expected)
        assert torch.equal(OPERATIONS["embedding"].providers["triton"].run(ids.int(), table, dtype, scale), expected)


def test_an_invalid_id_reads_the_nearest_row(draw: Callable[..., Tensor]) -> None:
    run = OPERATIONS["embedding"].providers["triton"].run
    table = draw(7, 40)
    got = run(torch.tensor([-1, 7, 2**40, -(2**62)], device=DEVICE), QTensor.dense(table), torch.float32)
    assert torch.equal(got, table[[0, 6, 6, 0]])


def recurrent_meta(counts: list[int], kept: list[int], on_device: bool = True) -> tuple[RecurrentMeta, int]:
    """Sequence i reads slot i + 1; the slots it writes follow those that are read."""
    q_start, first = np.concatenate(([0], np.cumsum(counts))), len(counts) + 1
    write = torch.zeros(len(counts), max(kept, default=1), dtype=torch.int64)
    for i, many in enumerate(kept):
        write[i, :many] = torch.arange(first, first + many)
        first += many
    numbers = (torch.from_numpy(np.array(values, np.int32)) if on_device else None for values in (q_start, kept))
    read = torch.arange(1, len(counts) + 1)
    meta = RecurrentMeta(q_start, np.array(kept, dtype=np.int64), read, write, *numbers)
    if on_device:
        return moved(meta, DEVICE), first
    return RecurrentMeta(q_start, meta.kept, read.to(DEVICE), write.to(DEVICE)), first


@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrences_over_ragged_batches(dtype: torch.dtype, draw: Callable[..., Tensor]) -> None:
    channels, size, width = 40, 16, 4
    for counts, kept in (([1] * 4, [1] * 4), ([11, 1, 3], [4, 1, 3]), ([2], [1])):
        meta, slots = recurrent_meta(counts, kept, on_device=len(counts) > 1)
        tokens = sum(counts)
        stacked = draw(tokens, 2 * channels, dtype=dtype)
        state = draw(slots + 1, channels, width)[..., :-1]  # as a slice of a slot
        weight, bias = draw(channels, width, dtype=dtype), draw(channels, dtype=dtype)
        for own_bias in (bias, None):
            for name in ("causal_conv", "causal_conv_silu"):
                _recurrent(name, 3, stacked[:, channels:], weight, own_bias, state, meta)
        delta = torch.nn.functional.softplus(draw(tokens, channels, dtype=dtype))
        b, c = draw(tokens, 5 + 2 * size, dtype=dtype)[:, 5:].chunk(2, -1)
        a, d, state = -draw(channels, size).exp(), draw(channels), draw(slots + 1, channels, size)
        _recurrent("selective_scan", 6, stacked[:, :channels], delta, a, b, c, d, state, meta)


def _recurrent(name: str, written: int, *args: Any) -> None:
    """Outputs and all slots, including untouched ones, are the body's."""
    results = []
    for run in (OPERATIONS[name].providers["triton"].run, OPERATIONS[name].body):
        own = list(args)
        own[written] = torch.empty_strided(
            args[written].shape, args[written].stride(), dtype=args[written].dtype, device=DEVICE
        ).copy_(args[written])
        results.append((run(*own), own[written]))
    (got, state), (expected, state_expected) = results
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=STEP[got.dtype], atol=4 * STEP[got.dtype])
    torch.testing.assert_close(state, state_expected, rtol=1e-4, atol=1e-4)
    untouched = torch.ones(len(state), dtype=torch.bool)
    untouched[args[-1].write.flatten().cpu()] = False
    assert untouched.any() and torch.equal(state[untouched.to(DEVICE)], args[written][untouched.to(DEVICE)])


def test_token_counts_may_change_between_replays(draw: Callable[..., Tensor]) -> None:
    """The counts on the device are used; those on the host only give the number of sequences."""
    meta, slots = recurrent_meta([3, 2], [2, 1])
    stale = RecurrentMeta(np.array([0, 4, 5]), np.array([1, 1]), meta.read, meta.write, meta.starts, meta.kepts)
    x, weight, state = draw(5, 20), draw(20, 3), draw(slots, 20, 2)
    there = state.clone()
    got = OPERATIONS["causal_conv"].providers["triton"].run(x, weight, None, there, stale)
    torch.testing.assert_close(got, OPERATIONS["causal_conv"].body(x, weight, None, state, meta), rtol=0, atol=1e-5)
    torch.testing.assert_close(there, state, rtol=0, atol=0)


def test_empty_inputs(draw: Callable[..., Tensor]) -> None:
    none, weight = draw(0, 32), draw(32)
    for kind in KINDS:
        check("activate", none, kind)
        check("activate_mul", *draw(0, 64).chunk(2, -1), kind)
    check("soft_cap", none, 30.0)
    check("add", none, none)
    check("rms_norm", none, weight, 1e-5)
    check("rms_norm", draw(0, 4, 32), weight, 1e-5)
    check("add_rms_norm", none, none, weight, 1e-5)
    check("layer_norm", none, weight, weight, 1e-5)
    check("rotate", draw(0, 2, 8), draw(0, 4), draw(0, 4))
    check("rope_angles", torch.zeros(0, dtype=torch.int64, device=DEVICE), weight, 1.0, torch.float32)
    check("embedding", torch.zeros(0, dtype=torch.int64, device=DEVICE), QTensor.dense(draw(3, 5)), torch.float32)
    meta, _ = recurrent_meta([], [])
    check("causal_conv", none, draw(32, 3), None, draw(2, 32, 2), meta)
    b = draw(0, 4)
    check("selective_scan", none, none, draw(32, 4), b, b, weight, draw(2, 32, 4), meta)


def test_float64_is_left_to_the_bodies() -> None:
    for name in (
        "activate",
        "activate_mul",
        "soft_cap",
        "add",
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "rope_angles",
        "rotate",
        "embedding",
        "causal_conv",
        "selective_scan",
    ):
        assert not OPERATIONS[name].providers["triton"].accepts(dtype=torch.float64)
