"""Latent attention: both ways to attend agree, and the cache holds one latent and one key per token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bankfull.layers.latent import LatentShape
from bankfull.ops import OPERATIONS, HeadWeights, PagedMeta
from bankfull.ops.attention.sight import live_from, visible_pairs
from bankfull.ops.cost import nbytes
from bankfull.ops.latent import body as latent
from bankfull.weights.qtensor import QTensor
from tests.ops import cases

DEEPSEEK = {"heads": 16, "rank": 512, "nope": 128, "rope": 64, "value": 128}
TOLERANCE = {torch.float64: 1e-9, torch.bfloat16: 1e-2}


def attended(dtype: torch.dtype, seed: int, window: int | None = None) -> tuple[Tensor, Tensor]:
    """The same queries over the same latents, absorbed and expanded, with DeepSeek's sizes; relative to the largest."""
    make = cases.Maker(seed, dtype)
    heads, rank, nope, rope, value = DEEPSEEK.values()
    pages, _, meta = cases.paged(make, 1, rank + rope, 1, window)
    meta = replace(meta, ancestors=make.pick.choice((None, cases.trees(make, meta.q_start))))
    pages = pages.nan_to_num()  # positions outside of a window are expanded together with their page
    tokens, scale = int(meta.q_start[-1]), (nope + rope) ** -0.5
    keys = HeadWeights(QTensor.dense(torch.randn(heads, nope, rank, generator=make.numbers).to(dtype) / rank**0.5))
    values = HeadWeights(QTensor.dense(torch.randn(heads, value, rank, generator=make.numbers).to(dtype) / rank**0.5))
    q = torch.randn(tokens, heads, nope + rope, generator=make.numbers).to(dtype)
    turns = torch.randn(tokens, rope // 2, generator=make.numbers, dtype=torch.float64)
    angles = turns.cos().to(dtype), turns.sin().to(dtype)
    absorbed = latent.absorb_queries(q, *angles, keys.reversed())
    mixed = latent.head_products(latent.latent_attention(absorbed, pages, rank, meta, scale, window), values)
    expanded = latent.expanded_attention(q, *angles, pages, meta, keys, values, scale, window)
    largest = expanded.abs().max()
    return mixed / largest, expanded / largest


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", (None, 7))
def test_absorbed_and_expanded_attention_agree(dtype: torch.dtype, window: int | None) -> None:
    for seed in range(3):
        absorbed, expanded = attended(dtype, seed, window)
        assert float((absorbed.double() - expanded.double()).abs().max()) < TOLERANCE[dtype]


def test_each_row_of_the_cache_is_read_once_for_all_heads() -> None:
    q, pages = torch.zeros(3, 16, 576, dtype=torch.bfloat16), torch.zeros(9, 4, 1, 576, dtype=torch.bfloat16)
    meta = PagedMeta(np.array([0, 1, 3]), np.array([7, 9]), torch.ones(2, 3).long(), torch.zeros(3).long(), 4)
    cost = latent.latent_attention.cost(q, pages, 512, meta, 1.0)
    assert cost.read == nbytes(q) + (7 + 9) * 576 * 2
    assert cost.write == 3 * 16 * 512 * 2
    assert cost.flops == 2 * (7 + 8 + 9) * 16 * (576 + 512)


def test_expansion_costs_each_position_once_and_less_per_pair() -> None:
    for seed in range(20):
        q, cos, sin, pages, meta, keys, values, scale, window = cases.case("expanded_attention", seed).args
        cost = latent.expanded_attention.cost(q, cos, sin, pages, meta, keys, values, scale, window)
        live = pairs = 0
        for count, length in zip(np.diff(meta.q_start).tolist(), meta.kv_len.tolist(), strict=True):
            live += length - live_from(count, length, window)
            pairs += visible_pairs(count, length, window)
        per_row = 2 * keys.heads * keys.columns * (keys.outputs + values.outputs)
        per_pair = 2 * keys.heads * (q.shape[2] + values.outputs)
        turned = 3 * q.shape[0] * q.shape[1] * (q.shape[2] - keys.outputs)
        assert cost.flops == live * per_row + pairs * per_pair + turned
        row = pages.shape[3] * pages.element_size()
        assert cost.read == nbytes(q, cos, sin, keys, values) + live * row


@pytest.mark.parametrize("name", ["head_products", "absorb_queries", "write_latents"])
def test_small_operations_move_each_operand_once(name: str) -> None:
    for seed in range(20):
        made = cases.case(name, seed)
        cost = OPERATIONS[name].cost(*made.args)
        if name == "write_latents":
            kv, weight, _, cos, sin, pages, slots = made.args
            assert cost.read == nbytes(kv, weight, cos, sin, slots)
            assert cost.write == kv.numel() * pages.element_size()
            continue
        x, *_, weight = made.args
        angles = made.args[1:3] if name == "absorb_queries" else ()
        assert cost.read == nbytes(x, weight.stored, *angles)
        assert cost.write == nbytes(OPERATIONS[name].body(*made.args))
        product = 2 * x.shape[0] * x.shape[1] * weight.outputs * weight.columns
        turned = 0 if name == "head_products" else 3 * x.shape[0] * x.shape[1] * (x.shape[2] - weight.columns)
        assert cost.flops == product + turned


def test_expansion_is_chosen_where_it_takes_fewer_flops() -> None:
    rank, expanded, rope, heads = 512, 256, 64, 16
    shape = LatentShape(2048, heads, rank, 128, rope, 128, 0.1)
    for length in (64, 200, 1000, 5000):
        for new in (1, 16, 63, 64, 150, 180, 400, length):
            if new > length:
                continue
            pairs = visible_pairs(new, length, None)
            absorbed = 2 * heads * (pairs * (2 * rank + rope) + new * rank * expanded)
            whole = 2 * heads * (pairs * (shape.nope + rope + shape.value) + length * rank * expanded)
            assert latent.expansion_pays(new, length, rank, expanded) == (new >= 64 and whole < absorbed)
    assert not latent.expansion_pays(1, 4096, rank, expanded) and latent.expansion_pays(2048, 2048, rank, expanded)
