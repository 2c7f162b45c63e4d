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
from bankfull.ops.experts.triton.tiles import (
    many_down_kernel,
    many_gate_kernel,
    some_down_kernel,
    some_gate_kernel,
    sum_kernel,
)
from bankfull.ops.experts.triton.weights import ExpertWeight, ExpertWords, Stacked, form_of, prepare
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
    else:
        middle = (
            _few_gate(operands, gate)
            if few
            else _some_gate(operands, gate)
            if order is None
            else _many_gate(operands, gate, order)
        )
    if isinstance(down, ExpertWords):
        if few and experts_words.closes_few(operands):
            return experts_words.few_down(operands, middle)
        return _summed(operands, experts_words.tile_down(operands, order, middle))
    if few:
        return _few_down(operands, down, middle)
    return _summed(
        operands, _some_down(operands, down, middle) if order is None else _many_down(operands, down, order, middle)
    )


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and aligned for vector loads."""
    rows = x.contiguous()
    return rows.clone() if rows.storage_offset() * rows.element_size() % 16 else rows


def _gate_up(own: Operands) -> tuple[Tensor, ...]:
    """Weights, scales and biases of gate and up in kernel argument order."""
    gate, up = own.gate, own.up
    assert isinstance(gate, ExpertWeight) and isinstance(up, ExpertWeight)
    return gate.data, gate.scales, up.data, up.scales, *own.gate_biases


def _gate_form(own: Operands, gate: ExpertWeight) -> tuple[int, int, bool, str]:
    """The last constants of every kernel of gate and up: form and group of the weights, biases, activation."""
    return gate.form, gate.group, own.has_biases, own.kind


def _few_gate(own: Operands, gate: ExpertWeight) -> Tensor:
    _, inner, hidden = gate.shape
    middle = own.for_pairs(inner)
    depth = min(GATE_HELD, power_of_two(hidden))
    out = GATE_HELD // depth
    pair_gate_kernel[(own.chosen.numel(), -(-inner // out))](
        own.x,
        own.x.stride(0),
        own.chosen,
        *_gate_up(own),
        middle,
        inner,
        hidden,
        own.per_token,
        out,
        depth,
        *_gate_form(own, gate),
        num_warps=2,
        **overlapped(own.x),
    )
    return middle


def _few_down(own: Operands, down: ExpertWeight, middle: Tensor) -> Tensor:
    _, hidden, inner = down.shape
    y = own.x.new_empty(own.tokens, hidden)
    depth = min(1024, power_of_two(inner))
    together = max(1, min(power_of_two(own.per_token), HELD // depth))
    out = max(1, HELD // (together * depth))
    pair_down_kernel[(own.tokens, -(-hidden // out))](
        middle,
        own.chosen,
        own.weights,
        down.data,
        down.scales,
        own.down_bias,
        y,
        hidden,
        inner,
        own.per_token,
        together,
        out,
        depth,
        down.form,
        down.group,
        own.has_biases,
        num_warps=4,
        **overlapped(own.x),
    )
    return y


def _some_gate(own: Operands, gate: ExpertWeight) -> Tensor:
    """A row for each pair, in the order of tokens."""
    experts, inner, hidden = gate.shape
    depth, stages = (32, 2) if own.wide else (64, 4)
    middle, tile = own.for_pairs(inner), 64
    some_gate_kernel[(-(-inner // tile), experts)](
        own.x,
        own.x.stride(0),
        own.chosen,
        *_gate_up(own),
        middle,
        own.tokens,
        inner,
        hidden,
        own.per_token,
        power_of_two(own.per_token),
        max(16, power_of_two(own.tokens)),
        tile,
        depth,
        stages,
        *_gate_form(own, gate),
        num_warps=4,
        **overlapped(own.x),
    )
    return middle


def _some_down(own: Operands, down: ExpertWeight, middle: Tensor) -> Tensor:
    """A row for each pair, in the order of tokens."""
    experts, hidden, inner = down.shape
    depth, stages = (32, 2) if own.wide else (64, 4)
    out, tile = own.for_pairs(hidden), 128 if hidden >= 1024 else 64
    some_down_kernel[(-(-hidden // tile), experts)](
        middle,
        own.chosen,
        down.data,
        down.scales,
        own.down_bias,
        out,
        own.tokens,
        hidden,
        inner,
        own.per_token,
        power_of_two(own.per_token),
        max(16, power_of_two(own.tokens)),
        tile,
        depth,
        stages,
        down.form,
        down.group,
        own.has_biases,
        num_warps=4,
        **overlapped(own.x),
    )
    return out


def _many_gate(own: Operands, gate: ExpertWeight, order: Order) -> Tensor:
    """A row for each place in the order."""
    _, inner, hidden = gate.shape
    tile, depth, stages = (64, 32, 2) if own.wide else (128, 64, 3)
    middle = own.for_pairs(inner)
    many_gate_kernel[(order.blocks * -(-inner // tile),)](
        own.x,
        own.x.stride(0),
        *order.tensors,
        *_gate_up(own),
        middle,
        inner,
        hidden,
        own.per_token,
        order.rows,
        tile,
        depth,
        stages,
        *_gate_form(own, gate),
        num_warps=8 if order.rows == 128 else 4,
        **overlapped(own.x),
    )
    return middle


def _many_down(own: Operands, down: ExpertWeight, order: Order, middle: Tensor) -> Tensor:
    """A row for each pair, in the order of tokens."""
    _, hidden, inner = down.shape
    tile, depth, stages = (64, 32, 2) if own.wide else (128, 64, 4)
    out = own.for_pairs(hidden)
    many_down_kernel[(order.blocks * -(-hidden // tile),)](
        middle,
        *order.tensors,
        down.data,
        down.scales,
        own.down_bias,
        out,
        hidden,
        inner,
        order.rows,
        tile,
        depth,
        stages,
        down.form,
        down.group,
        own.has_biases,
        num_warps=8 if order.rows == 128 else 4,
        **overlapped(own.x),
    )
    return out


def _summed(own: Operands, out: Tensor) -> Tensor:
    tokens, hidden = own.x.shape
    y, block = own.x.new_empty(tokens, hidden), min(1024, power_of_two(hidden))
    sum_kernel[(tokens, -(-hidden // block))](
        out, own.weights, y, hidden, own.per_token, block, num_warps=4, **overlapped(own.x)
    )
    return y
