"""Mixtures of experts on a GPU: kernels for very few, some and many tokens. No step waits for the host: which experts a
step uses is known on the device only, so launches depend on the number of tokens alone.

Dense weights and 8-bit codes are read as stored; all other formats are repacked into words (`quantized_layout`), for
which there are kernels of their own (`experts_words`). Gate and up have one format; that of down may differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bankfull.ops.experts.body import expert_mlp
from bankfull.ops.experts.triton import words as experts_words
from bankfull.ops.experts.triton.operands import Operands, Order, sorted_pairs
from bankfull.ops.experts.triton.rows import pair_down_kernel, pair_gate_kernel
from bankfull.ops.experts.triton.tiles import many_experts_kernel, some_experts_kernel, sum_kernel
from bankfull.ops.experts.triton.weights import ExpertTile, ExpertWeight, ExpertWords, Stack, Stacked, form_of, prepare
from bankfull.ops.triton.launch import overlapped, power_of_two
from bankfull.ops.triton.rows import DTYPES, contiguous_rows
from bankfull.weights.qtensor import QTensor

FEW_TOKENS, SOME_TOKENS = 4, 64
"""Most tokens of a step for the kernels of single pairs, and for those that multiply every token with each expert."""
HELD, GATE_HELD = 8192, 2048
"""Weights that a program of the pair kernels holds at once, of down, and of each of gate and up: enough loads in flight
for the bandwidth, and enough programs to finish together (H200, Qwen3-30B-A3B: 14.0 us, at the limit 11.4)."""


def _accepts(*, dtype: torch.dtype | None = None, weights: tuple[QTensor, ...] | None = None, **facts: Any) -> bool:
    if dtype not in DTYPES or weights is None or any(form_of(weight) is None for weight in weights):
        return False
    gate, up, _ = weights
    return gate.scheme == up.scheme and all(not w.is_dense or w.parts["data"].dtype is dtype for w in weights)


@expert_mlp.provider("triton", on="cuda", accepts=_accepts, prepare=prepare)
def run_expert_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: Stacked,
    up: Stacked,
    down: Stacked,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    biases = tuple(None if bias is None else bias.contiguous() for bias in (gate_bias, up_bias, down_bias))
    assert len(biases) == 3
    rows = _aligned(x) if isinstance(gate, ExpertWords) else contiguous_rows(x)
    operands = Operands(rows, chosen.contiguous(), weights.contiguous(), gate, up, down, biases, kind)
    if not len(x):
        return torch.empty_like(x)
    few = len(x) <= FEW_TOKENS
    order = None if len(x) <= SOME_TOKENS else sorted_pairs(operands)
    if isinstance(gate, ExpertWords):
        few_gate = few and experts_words.opens_few(operands)
        middle = experts_words.few_gate(operands) if few_gate else experts_words.tile_gate(operands, order)
    elif few:
        middle = _few_gate(operands, gate)
    else:
        middle = _gate_tiles(operands, gate, order)
    if isinstance(down, ExpertWords):
        if few and experts_words.closes_few(operands):
            return experts_words.few_down(operands, middle)
        return _summed(operands, experts_words.tile_down(operands, order, middle))
    if few:
        return _few_down(operands, down, middle)
    return _summed(operands, _down_tiles(operands, down, middle, order))


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and aligned for vector loads."""
    rows = x.contiguous()
    return rows.clone() if rows.storage_offset() * rows.element_size() % 16 else rows


def _gate_and_up(own: Operands) -> tuple[Stack, Stack]:
    gate, up = own.gate, own.up
    assert isinstance(gate, ExpertWeight) and isinstance(up, ExpertWeight)
    return gate.stack(own.biases[0]), up.stack(own.biases[1])


def _few_gate(own: Operands, gate: ExpertWeight) -> Tensor:
    _, inner, hidden = gate.shape
    x, middle, depth = own.x, own.for_pairs(inner), min(GATE_HELD, power_of_two(hidden))
    tile = ExpertTile(own.per_token, 1, GATE_HELD // depth, depth, gate.form, gate.group, own.kind)
    grid = own.chosen.numel(), -(-inner // tile.outputs)
    arguments = (x, x.stride(0), own.chosen, *_gate_and_up(own), middle, inner, hidden, tile)
    pair_gate_kernel[grid](*arguments, num_warps=2, **overlapped(x))
    return middle


def _few_down(own: Operands, down: ExpertWeight, middle: Tensor) -> Tensor:
    _, hidden, inner = down.shape
    y, depth = own.x.new_empty(own.tokens, hidden), min(1024, power_of_two(inner))
    together = max(1, min(power_of_two(own.per_token), HELD // depth))
    tile = ExpertTile(own.per_token, together, max(1, HELD // (together * depth)), depth, down.form, down.group)
    grid = own.tokens, -(-hidden // tile.outputs)
    arguments = (middle, own.chosen, own.weights, down.stack(own.biases[2]), y, hidden, inner, tile)
    pair_down_kernel[grid](*arguments, num_warps=4, **overlapped(y))
    return y


def _gate_tiles(own: Operands, gate: ExpertWeight, order: Order | None) -> Tensor:
    """f(gate(x)) * up(x) of each pair in the order of tokens, or of each place in the order."""
    few, wide = order is None, own.wide
    tile = ExpertTile(
        per_token=own.per_token,
        rows=max(16, power_of_two(own.tokens)) if few else own.block_rows,
        outputs=64 if few or wide else 128,
        depth=32 if wide else 64,
        form=gate.form,
        group=gate.group,
        kind=own.kind,
        stages=2 if wide else 4 if few else 3,
    )
    return _tiles(own, own.x, _gate_and_up(own), gate.shape, order, tile)


def _down_tiles(own: Operands, down: ExpertWeight, middle: Tensor, order: Order | None) -> Tensor:
    """down(middle) of each pair in the order of tokens."""
    few, wide = order is None, own.wide
    tile = ExpertTile(
        per_token=own.per_token,
        rows=max(16, power_of_two(own.tokens)) if few else own.block_rows,
        outputs=(128 if down.shape[1] >= 1024 else 64) if few else 64 if wide else 128,
        depth=32 if wide else 64,
        form=down.form,
        group=down.group,
        stages=2 if wide else 4,
    )
    return _tiles(own, middle, (down.stack(own.biases[2]), None), down.shape, order, tile)


def _tiles(
    own: Operands,
    x: Tensor,
    stacks: tuple[Stack, Stack | None],
    shape: tuple[int, int, int],
    order: Order | None,
    tile: ExpertTile,
) -> Tensor:
    experts, outputs, columns = shape
    y, across, pdl = own.for_pairs(outputs), -(-outputs // tile.outputs), overlapped(x)
    if order is None:
        some_experts_kernel[(across, experts)](
            x, x.stride(0), own.chosen, *stacks, y, own.tokens, outputs, columns, tile, num_warps=4, **pdl
        )
    else:
        warps = 8 if tile.rows == 128 else 4
        many_experts_kernel[(len(order.experts) * across,)](
            x, x.stride(0), order, *stacks, y, outputs, columns, tile, num_warps=warps, **pdl
        )
    return y


def _summed(own: Operands, out: Tensor) -> Tensor:
    tokens, hidden = own.x.shape
    y, block = own.x.new_empty(tokens, hidden), min(1024, power_of_two(hidden))
    sum_kernel[(tokens, -(-hidden // block))](
        out, own.weights, y, hidden, own.per_token, block, num_warps=4, **overlapped(own.x)
    )
    return y
