"""A stage of a pipeline: some adjacent layers of a model. A rank builds the others without data, so that it knows the
whole model's state and holds only its own weights."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bankfull.ranks.group import Neighbour

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:$|\.)")
"""A layer's number in the names of every family."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers first .. last - 1 of a model."""

    first: int
    last: int
    before: Neighbour | None
    """The rank that computes the layers before these; None for the first stage, which embeds tokens."""
    after: Neighbour | None
    """The rank that computes the layers after these; None for the last stage, which has the head."""

    def holds(self, name: str) -> bool:
        """Whether a layer's tensor is needed here; other tensors are."""
        match = LAYER.search(name)
        return match is None or self.first <= int(match[1]) < self.last
