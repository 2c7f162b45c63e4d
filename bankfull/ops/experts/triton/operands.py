"""What the launches of expert kernels share: a call's operands, and the order of pairs of token and expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bankfull.ops.experts.triton.tiles import blocks_kernel
from bankfull.ops.experts.triton.weights import Stacked
from bankfull.ops.triton.launch import overlapped


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
    def wide(self) -> bool:
        """Whether products are float32, which has no tensor cores: smaller tiles, to fit into registers."""
        return self.x.element_size() > 2

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def per_token(self) -> int:
        return self.chosen.shape[1]

    @property
    def block_rows(self) -> int:
        """Most pairs of a block in the order of experts."""
        experts, pairs = self.gate.shape[0], self.chosen.numel()
        return 32 if pairs < 32 * experts else 64 if self.wide or pairs < 96 * experts else 128

    def for_pairs(self, columns: int) -> Tensor:
        """Room for a row of every pair of token and expert."""
        return self.x.new_empty(self.chosen.numel(), columns)


class Order(NamedTuple):
    """Pairs in the order of experts, cut into blocks of up to `Operands.block_rows` pairs of one expert."""

    pairs: Tensor
    ends: Tensor
    """Where each expert's pairs end."""
    experts: Tensor
    """The expert of each block; -1: none. There are at most as many blocks as fill the pairs, and one more per
    expert."""
    firsts: Tensor
    """The first place of each block."""


def sorted_pairs(own: Operands) -> Order:
    experts, pairs, rows = own.gate.shape[0], own.chosen.numel(), own.block_rows
    ids, order = own.chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(
        ids, torch.arange(experts, dtype=torch.int32, device=ids.device), right=True, out_int32=True
    )
    blocks = pairs // rows + min(experts, pairs)
    found = Order(order.to(torch.int32), ends, ids.new_full((blocks,), -1), ids.new_empty(blocks))
    blocks_kernel[(1,)](found, experts, rows, num_warps=4, **overlapped(own.x))
    return found
