"""Mixtures of experts on a GPU: kernels for very few, some and many tokens. No step waits for the host: which experts a
step uses is known on the device only, so launches depend on the number of tokens alone.

Dense weights, int8 and fp8 with a scale per row, and int8 and int4 with a scale per group are read as stored. Layers
dequantize other formats (GGUF blocks) at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.reference.experts import expert_mlp
from bankfull.ops.triton.experts_rows import pair_down_kernel, pair_gate_kernel
from bankfull.ops.triton.experts_tiles import (
    blocks_kernel,
    many_down_kernel,
    many_gate_kernel,
    some_down_kernel,
    some_gate_kernel,
    sum_kernel,
)
from bankfull.ops.triton.experts_weights import ExpertWeight, form_of, prepare
from bankfull.ops.triton.launch import overlapped, power_of_two
from bankfull.ops.triton.rows import DTYPES, contiguous_rows
from bankfull.weights.qtensor import QTensor

FEW_TOKENS, SOME_TOKENS = 4, 64
"""Most tokens of a step for the kernels of single pairs, and for those that multiply every token with each expert."""
HELD, GATE_HELD = 8192, 2048
"""Weights that a program of the pair kernels holds at once, of down, and of each of gate and up: enough loads in flight
for the bandwidth, and enough programs to finish together (H200, Qwen3-30B-A3B: 14.0 us, at the limit 11.4)."""


@dataclass(frozen=True, slots=True)
class Operands:
    """A call's operands after checks."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    gate: ExpertWeight
    up: ExpertWeight
    down: ExpertWeight
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    kind: str

    @property
    def gate_up(self) -> tuple[Tensor, ...]:
        """Weights, scales and biases of gate and up in kernel argument order; missing biases are dummies."""
        gate_bias, up_bias, _ = (self.x if bias is None else bias for bias in self.biases)
        return self.gate.data, self.gate.scales, self.up.data, self.up.scales, gate_bias, up_bias

    @property
    def last(self) -> tuple[Tensor, ...]:
        bias = self.biases[2]
        return self.down.data, self.down.scales, self.x if bias is None else bias

    @property
    def gate_form(self) -> tuple[int, int, bool, str]:
        """The last constants of every kernel of gate and up: form and group of the weights, biases, activation."""
        return self.gate.form, self.gate.group, self.biases[0] is not None, self.kind

    @property
    def down_form(self) -> tuple[int, int, bool]:
        return self.down.form, self.down.group, self.biases[0] is not None

    @property
    def wide(self) -> bool:
        """Whether products are float32, which has no tensor cores: smaller tiles, to fit into registers."""
        return self.x.element_size() > 2

    def results(self) -> tuple[Tensor, Tensor]:
        """Room for what passes between the two kernels, and for the results, of every pair of token and expert."""
        pairs = self.chosen.numel()
        return self.x.new_empty(pairs, self.gate.shape[1]), self.x.new_empty(pairs, self.x.shape[1])

    @property
    def per_token(self) -> int:
        return self.chosen.shape[1]


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
    gate: ExpertWeight,
    up: ExpertWeight,
    down: ExpertWeight,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    kind: str,
) -> Tensor:
    biases = tuple(None if bias is None else bias.contiguous() for bias in (gate_bias, up_bias, down_bias))
    assert len(biases) == 3
    own = Operands(contiguous_rows(x), chosen.contiguous(), weights.contiguous(), gate, up, down, biases, kind)
    if not len(x):
        return torch.empty_like(x)
    if len(x) <= FEW_TOKENS:
        return _few(own)
    return _summed(own, _some(own) if len(x) <= SOME_TOKENS else _many(own))


def _few(own: Operands) -> Tensor:
    tokens, hidden = own.x.shape
    inner, launch = own.gate.shape[1], overlapped(own.x)
    middle = own.x.new_empty(tokens * own.per_token, inner)
    depth = min(GATE_HELD, power_of_two(hidden))
    out = GATE_HELD // depth
    pair_gate_kernel[(tokens * own.per_token, -(-inner // out))](
        own.x,
        own.x.stride(0),
        own.chosen,
        *own.gate_up,
        middle,
        inner,
        hidden,
        own.per_token,
        out,
        depth,
        *own.gate_form,
        num_warps=2,
        **launch,
    )
    y = own.x.new_empty(tokens, hidden)
    depth = min(1024, power_of_two(inner))
    together = max(1, min(power_of_two(own.per_token), HELD // depth))
    out = max(1, HELD // (together * depth))
    pair_down_kernel[(tokens, -(-hidden // out))](
        middle,
        own.chosen,
        own.weights,
        *own.last,
        y,
        hidden,
        inner,
        own.per_token,
        together,
        out,
        depth,
        *own.down_form,
        num_warps=4,
        **launch,
    )
    return y


def _some(own: Operands) -> Tensor:
    """Results of all pairs, in the order of tokens."""
    tokens, hidden = own.x.shape
    experts, inner, _ = own.gate.shape
    launch = overlapped(own.x)
    padded, slots = max(16, power_of_two(tokens)), power_of_two(own.per_token)
    depth, stages = (32, 2) if own.wide else (64, 4)
    middle, out = own.results()
    tile = 64
    some_gate_kernel[(-(-inner // tile), experts)](
        own.x,
        own.x.stride(0),
        own.chosen,
        *own.gate_up,
        middle,
        tokens,
        inner,
        hidden,
        own.per_token,
        slots,
        padded,
        tile,
        depth,
        stages,
        *own.gate_form,
        num_warps=4,
        **launch,
    )
    tile = 128 if hidden >= 1024 else 64
    some_down_kernel[(-(-hidden // tile), experts)](
        middle,
        own.chosen,
        *own.last,
        out,
        tokens,
        hidden,
        inner,
        own.per_token,
        slots,
        padded,
        tile,
        depth,
        stages,
        *own.down_form,
        num_warps=4,
        **launch,
    )
    return out


def _many(own: Operands) -> Tensor:
    """Results of all pairs, in the order of tokens."""
    hidden, wide, launch = own.x.shape[1], own.wide, overlapped(own.x)
    experts, inner, _ = own.gate.shape
    pairs = own.chosen.numel()
    rows = 32 if pairs < 32 * experts else 64 if wide or pairs < 96 * experts else 128
    tile, depth, stages = (64, 32, 2) if wide else (128, 64, 3)
    order, ends, block_expert, block_first = _sorted(own, rows)
    blocks = len(block_expert)
    middle, out = own.results()
    warps = 8 if rows == 128 else 4
    many_gate_kernel[(blocks * -(-inner // tile),)](
        own.x,
        own.x.stride(0),
        order,
        ends,
        block_expert,
        block_first,
        *own.gate_up,
        middle,
        inner,
        hidden,
        own.per_token,
        rows,
        tile,
        depth,
        stages,
        *own.gate_form,
        num_warps=warps,
        **launch,
    )
    many_down_kernel[(blocks * -(-hidden // tile),)](
        middle,
        order,
        ends,
        block_expert,
        block_first,
        *own.last,
        out,
        hidden,
        inner,
        rows,
        tile,
        depth,
        stages if wide else 4,
        *own.down_form,
        num_warps=warps,
        **launch,
    )
    return out


def _sorted(own: Operands, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pairs in the order of experts, where each expert's pairs end, and the blocks of up to `rows` pairs of one expert:
    expert (-1: none) and first place. There are at most as many blocks as fill the pairs, and one more per expert."""
    experts, pairs = own.gate.shape[0], own.chosen.numel()
    ids, order = own.chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(
        ids, torch.arange(experts, dtype=torch.int32, device=ids.device), right=True, out_int32=True
    )
    blocks = pairs // rows + min(experts, pairs)
    block_expert = ids.new_full((blocks,), -1)
    block_first = ids.new_empty(blocks)
    blocks_kernel[(1,)](
        ends,
        block_expert,
        block_first,
        pairs,
        experts,
        power_of_two(experts),
        rows,
        num_warps=4,
        **overlapped(own.x),
    )
    return order.to(torch.int32), ends, block_expert, block_first


def _summed(own: Operands, out: Tensor) -> Tensor:
    tokens, hidden = own.x.shape
    y, block = own.x.new_empty(tokens, hidden), min(1024, power_of_two(hidden))
    sum_kernel[(tokens, -(-hidden // block))](
        out, own.weights, y, hidden, own.per_token, block, num_warps=4, **overlapped(own.x)
    )
    return y
