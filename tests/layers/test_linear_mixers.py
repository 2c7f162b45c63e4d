"""Linear mixers equal the quadratic forms of their papers, however a sequence is cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from bankfull.errors import ModelError
from bankfull.layers.based import BasedMixer, BasedShape, ShortConvMixer, ShortConvShape
from bankfull.layers.delta import DeltaMixer, DeltaShape
from bankfull.layers.lightning import LightningMixer, LightningShape, lightning_slopes
from tests.layers.sequences import drawn, run
from tests.models.weights import build_of
from tests.quick import examples

HIDDEN = 12
BASED = BasedShape(HIDDEN, heads=3, size=5, features=4)
LIGHTNING = LightningShape(HIDDEN, heads=4, size=5)
DELTA = DeltaShape(HIDDEN, key_heads=2, heads=4, key=6, value=5)
CONV = ShortConvShape(HIDDEN, inner=7)
TENSORS = {
    "based": drawn(
        1,
        proj_q__weight=(12, HIDDEN),
        proj_k__weight=(12, HIDDEN),
        proj_v__weight=(15, HIDDEN),
        out_proj__weight=(HIDDEN, 15),
    ),
    "lightning": drawn(
        2,
        qkv_proj__weight=(60, HIDDEN),
        output_gate__weight=(20, HIDDEN),
        out_proj__weight=(HIDDEN, 20),
        norm__weight=(20,),
    ),
    "delta": drawn(
        3,
        in_proj_qkvz__weight=(64, HIDDEN),
        in_proj_ba__weight=(8, HIDDEN),
        conv1d__weight=(44, 1, 4),
        A_log=(4,),
        dt_bias=(4,),
        norm__weight=(5,),
        out_proj__weight=(HIDDEN, 20),
    ),
    "conv": drawn(
        4,
        in_proj__weight=(7, HIDDEN),
        gate_proj__weight=(7, HIDDEN),
        out_proj__weight=(HIDDEN, 7),
        conv1d__weight=(7, 1, 3),
        conv1d__bias=(7,),
    ),
}
SLOPES = lightning_slopes(4, 1, 6)


def made(kind: str, dtype: torch.dtype = torch.float64, providers: str = "torch") -> object:
    build = build_of(TENSORS[kind], dtype, providers)
    if kind == "based":
        return BasedMixer(build, BASED)
    if kind == "lightning":
        return LightningMixer(build, LIGHTNING, SLOPES)
    return DeltaMixer(build, DELTA) if kind == "delta" else ShortConvMixer(build, CONV)


def inputs(tokens: int = 23, seed: int = 9) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(x: Tensor, weight: Tensor, size: int) -> Tensor:
    """(heads, tokens, size)"""
    return (x @ weight.T).unflatten(-1, (-1, size)).transpose(0, 1)


def test_based_equals_attention_with_the_taylor_series_instead_of_the_exponential() -> None:
    own, x = TENSORS["based"], inputs()
    q, k = (heads(x, own[f"proj_{name}.weight"], BASED.features) for name in "qk")
    v = heads(x, own["proj_v.weight"], BASED.size)
    scores = q @ k.transpose(1, 2) / math.sqrt(BASED.features)
    weights = (1 + scores + scores**2 / 2).tril()
    mixed = (weights / weights.sum(-1, keepdim=True)) @ v
    want = mixed.transpose(0, 1).flatten(1) @ own["out_proj.weight"].T
    torch.testing.assert_close(run(made("based"), x), want)


def test_sixteen_elements_have_273_features_in_the_state() -> None:
    shape = BasedShape(HIDDEN, heads=1, size=64)
    own = drawn(
        1,
        proj_q__weight=(16, HIDDEN),
        proj_k__weight=(16, HIDDEN),
        proj_v__weight=(64, HIDDEN),
        out_proj__weight=(HIDDEN, 64),
    )
    (spec,) = BasedMixer(build_of(own, torch.float32), shape).states
    assert [part.shape for part in spec.tensors] == [(1, 273, 64), (1, 273)]  # type: ignore[union-attr]


def test_lightning_equals_a_sum_over_all_earlier_tokens() -> None:
    own, x = TENSORS["lightning"], inputs()
    qkv = silu(x @ own["qkv_proj.weight"].T).unflatten(-1, (LIGHTNING.heads, 3, LIGHTNING.size))
    q, k, v = (part.squeeze(2).transpose(0, 1) for part in qkv.split(1, 2))
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    decay = torch.exp(-SLOPES.double()[:, None, None] * distance).tril()
    mixed = ((q @ k.transpose(1, 2) * decay) @ v).transpose(0, 1).flatten(1)
    mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + 1e-6) * own["norm.weight"]
    want = (torch.sigmoid(x @ own["output_gate.weight"].T) * mixed) @ own["out_proj.weight"].T
    torch.testing.assert_close(run(made("lightning"), x), want)


def test_the_gated_convolution_sees_three_tokens() -> None:
    own, x = TENSORS["conv"], inputs()
    line = torch.nn.functional.pad(x @ own["in_proj.weight"].T, (0, 0, 2, 0))
    near = sum(line[i : i + len(x)] * own["conv1d.weight"][:, 0, i] for i in range(3)) + own["conv1d.bias"]
    want = (silu(x @ own["gate_proj.weight"].T) * near) @ own["out_proj.weight"].T
    torch.testing.assert_close(run(made("conv"), x), want)


@pytest.mark.parametrize("kind", TENSORS)
@examples(15)
@given(cuts=st.lists(st.integers(1, 22), unique=True, max_size=6).map(sorted))
def test_pieces_of_any_length_give_the_whole(kind: str, cuts: list[int]) -> None:
    mixer, x = made(kind), inputs()
    torch.testing.assert_close(run(mixer, x, cuts), run(mixer, x))


def test_slopes_fall_with_heads_and_layers() -> None:
    first, last = lightning_slopes(8, 0, 5), lightning_slopes(8, 4, 5)
    assert (first.diff() < 0).all() and (last < first).all() and (last > 0).all()
    assert lightning_slopes(8, 0, 1).isfinite().all()


def test_value_heads_that_key_heads_cannot_share_are_refused() -> None:
    shape = DeltaShape(HIDDEN, key_heads=3, heads=4, key=6, value=5)
    with pytest.raises(ModelError, match=r"4 value heads .* 3 key heads cannot share"):
        DeltaMixer(build_of({}, torch.float64), shape)
