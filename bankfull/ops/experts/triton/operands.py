"""What the launches of expert kernels share: a call's operands, and the order of pairs of token and expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.experts.triton.tiles import blocks_kernel
from bankfull.ops.experts.triton.weights import Stacked
from bankfull.ops.triton.launch import overlapped, power_of_two


@dataclass(frozen=True, slots=True)
class Operands:
    """A call's operands after checks."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    gate: Stacked
    up: Stacked
    down: Stacked
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    kind: str

    @property
    def gate_biases(self) -> tuple[Tensor, Tensor]:
        """Biases of gate and up; missing ones are dummies."""
        first, second = (self.x if bias is None else bias for bias in self.biases[:2])
        return first, second

    @property
    def down_bias(self) -> Tensor:
        bias = self.biases[2]
        return self.x if bias is None else bias

    @property
    def has_biases(self) -> bool:
        return self.biases[0] is not None

    @property
    def wide(self) -> bool:
        """Whether products are float32, which has no tensor cores: smaller tiles, to fit into registers."""
        return self.x.element_size() > 2

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def per_token(self) -> int:
        return self.chosen.shape[1]

    def for_pairs(self, columns: int) -> Tensor:
        """Room for a row of every pair of token and expert."""
        return self.x.new_empty(self.chosen.numel(), columns)


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs in the order of experts, cut into blocks of up to `rows` pairs of one expert."""

    rows: int
    pairs: Tensor
    ends: Tensor
    """Where each expert's pairs end."""
    experts: Tensor
    """The expert of each block; -1: none. There are at most as many blocks as fill the pairs, and one more per
    expert."""
    firsts: Tensor
    """The first place of each block."""

    @property
    def blocks(self) -> int:
        return len(self.experts)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.pairs, self.ends, self.experts, self.firsts


def sorted_pairs(own: Operands) -> Order:
    experts, pairs = own.gate.shape[0], own.chosen.numel()
    rows = 32 if pairs < 32 * experts else 64 if own.wide or pairs < 96 * experts else 128
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
    return Order(rows, order.to(torch.int32), ends, block_expert, block_first)
