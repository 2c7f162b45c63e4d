"""Outputs of a layer's parts on the calibration text, kept from one pass over the layer to the next.

A method asks for the inputs of one matrix after another, and each pass runs the layer up to that matrix. What comes
before it has not changed since the last pass, but for the matrices that were quantized meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

KEPT_BYTES = 2 << 30
"""Bytes of outputs beyond which others are computed again."""


@dataclass(frozen=True, slots=True)
class KeptOutput:
    weights: tuple[Tensor, ...]
    x: Tensor
    y: Tensor

    def fits(self, weights: tuple[Tensor, ...], x: Tensor) -> bool:
        """Whether this is the output for these tensors (the same objects) and an equal input."""
        same = len(weights) == len(self.weights) and all(a is b for a, b in zip(weights, self.weights, strict=True))
        return same and torch.equal(x, self.x)


@dataclass(slots=True)
class KeptOutputs:
    """Kept outputs by sequence and place. An output is reused only for the same weights and an equal input."""

    most: int = KEPT_BYTES
    sequence: int = 0
    """The sequence that is being run."""
    reused: int = 0
    _kept: dict[tuple[int, str], KeptOutput] = field(default_factory=dict)

    def of(
        self,
        place: str,
        weights: tuple[Tensor, ...],
        x: Tensor,
        compute: Callable[[], Tensor],
        inside: Iterable[str] = (),
    ) -> Tensor:
        """The output of a place for this input. `inside`: places that nobody asks for once this one is kept."""
        at = self.sequence, place
        kept = self._kept.get(at)
        if kept is not None and kept.fits(weights, x):
            self.reused += 1
            return kept.y
        self._kept.pop(at, None)
        y = compute()
        for name in inside:
            self._kept.pop((self.sequence, name), None)
        if self.nbytes + y.nbytes + x.nbytes <= self.most:
            self._kept[at] = KeptOutput(weights, x, y)
        return y

    @property
    def nbytes(self) -> int:
        """Inputs that several places share count once."""
        held = {id(one): one.nbytes for kept in self._kept.values() for one in (kept.x, kept.y)}
        return sum(held.values())
