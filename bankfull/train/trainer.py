"""The part of training that depends on the kind of drafter, and the measure that all kinds share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bankfull.decode.candidate_tree import CandidateTree, accepted_nodes
from bankfull.ops.cost import Cost
from bankfull.train.states import Examples

RANKS = 10
"""Candidates per draft position whose acceptance is measured. The rank of a token that is none of them is RANKS."""


class Trainer(Protocol):
    """A drafter in training. Its parameters are all that an optimizer step changes."""

    name: str
    """The strategy that runs the result: medusa, ..."""
    taps: tuple[int, ...]
    """Layers of the model whose entering hidden states it reads beside the last ones."""

    def parameters(self) -> Mapping[str, Tensor]:
        """Trainable tensors on the device, in float32."""
        ...

    def loss(self, examples: Examples) -> Tensor:
        """A scalar on the device; nothing here waits for the device."""
        ...

    def ranks(self, examples: Examples) -> Tensor:
        """(positions, depth) the rank of the token that the model wrote among the drafter's candidates for it, for
        every position of the answers that has `depth` drafts before it ends."""
        ...

    def draft_cost(self, depth: int) -> Cost:
        """The cost of proposing drafts of one row, `depth` on a path, beside the step itself."""
        ...

    def save(self, folder: Path, acceptance: Acceptance) -> list[Path]:
        """Write the files that the strategy reads."""
        ...


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the drafter is right on held-out text."""

    ranks: Tensor
    """(positions, depth) on the host; RANKS: not among the candidates."""

    @property
    def by_rank(self) -> list[list[float]]:
        """The frequency with which a candidate is right, by depth and rank."""
        return [[float((of_depth == rank).double().mean()) for rank in range(RANKS)] for of_depth in self.ranks.T]

    @property
    def by_position(self) -> list[float]:
        """The frequency with which the first candidate is right, by depth."""
        return [of_depth[0] for of_depth in self.by_rank]

    def tokens_per_step(self, tree: CandidateTree) -> float:
        """Tokens measured on the same text: accepted drafts of a step, and the model's own token."""
        return 1.0 + float(accepted_nodes(tree, self.ranks).double().mean())


def acceptance_of(parts: Sequence[Tensor]) -> Acceptance:
    """The acceptance from the ranks of several examples on the device; this waits for it."""
    return Acceptance(torch.cat(list(parts)).cpu())
