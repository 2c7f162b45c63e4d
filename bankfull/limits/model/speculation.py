"""The predicted gain of speculative decoding: from acceptance, sizes and a machine, before anything is trained.

A step verifies n draft tokens for each of B sequences. A draft at position d is accepted with the chance a_d, given
that all before it were, so a step yields t = 1 + a_1 + a_1 a_2 + ... tokens of each sequence. It takes the time of the
drafter, D, and the time of a target step with 1 + n tokens per sequence, V. Plain decoding yields one token in the time
P of a step with one token per sequence. The gain is t P / (D + V). With one chance a at every position and D = n c P
this is the known (1 - a^(n+1)) / ((1 - a)(n c + 1)), as long as V = P: while the step is bound by memory.

In a tree a_d is the chance that some draft at depth d continues the accepted path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any, Protocol

from bankfull.limits.meter.step import StepShape

BATCHES = (1, 8, 64)
"""Batch sizes of a forecast, beside those that the user gives."""
CATCHING_UP = 2
"""Tokens per sequence of a drafter's first pass: the newest one, and the last accepted draft."""

Seconds = Callable[[StepShape], float]
"""Seconds of a model's step."""


def accepted_lengths(acceptance: Sequence[float]) -> list[float]:
    """The chance that at least 1, 2, ... drafts are accepted."""
    return list(accumulate(acceptance, mul))


def tokens_per_step(acceptance: Sequence[float]) -> float:
    """Expected tokens of a sequence in a step: the accepted drafts, and the target's own token."""
    return 1.0 + sum(accepted_lengths(acceptance))


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Draft tokens that a step verifies for each sequence, by depth, and the chance that each depth is accepted."""

    levels: tuple[int, ...]
    """Draft tokens at each depth; all 1 for a chain."""
    acceptance: tuple[float, ...]
    """Chance that a draft at this depth is accepted, given that all before it were."""

    @property
    def nodes(self) -> int:
        return sum(self.levels)

    @property
    def depth(self) -> int:
        return len(self.levels)

    @property
    def is_chain(self) -> bool:
        return all(level == 1 for level in self.levels)

    @property
    def tokens(self) -> float:
        return tokens_per_step(self.acceptance)

    def first(self, depth: int) -> DraftShape:
        return DraftShape(self.levels[:depth], self.acceptance[:depth])


class DraftSource(Protocol):
    """What finds the draft tokens, and how long that takes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights beside the target model's."""

    def seconds(self, batch: int, context: int, shape: DraftShape) -> float:
        """Seconds in which it drafts for all sequences of a step."""


@dataclass(frozen=True, slots=True)
class LookupDrafts:
    """Drafts from the sequence itself. The host finds them while the device computes: below 1% of a step."""

    weight_bytes: int = 0

    def seconds(self, batch: int, context: int, shape: DraftShape) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class DraftPasses:
    """A model that runs once for each depth."""

    weight_bytes: int
    one_pass: Seconds
    whole_levels: bool = False
    """Whether a pass continues every draft of the depth before, as EAGLE does, or only the best one."""

    def seconds(self, batch: int, context: int, shape: DraftShape) -> float:
        return sum(self.one_pass(step) for step in self._steps(batch, context, shape))

    def _steps(self, batch: int, context: int, shape: DraftShape) -> Iterator[StepShape]:
        length = context
        for depth in range(shape.depth):
            count = CATCHING_UP if depth == 0 else shape.levels[depth - 1] if self.whole_levels else 1
            length = max(length + (0 if depth == 0 else count), count)
            yield StepShape((count,) * batch, (length,) * batch, batch * (1 if depth == 0 else count))


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """Heads on the target's last hidden state: one pass drafts every depth."""

    weight_bytes: int
    for_batch: Callable[[int], float]
    """Seconds of the heads for a number of sequences."""

    def seconds(self, batch: int, context: int, shape: DraftShape) -> float:
        return self.for_batch(batch) if shape.depth else 0.0


@dataclass(frozen=True, slots=True)
class PredictedGain:
    """Speculative decoding beside plain decoding at one batch size."""

    batch: int
    depth: int
    nodes: int
    tokens: float
    """Tokens of a sequence per step."""
    plain_seconds: float
    """Seconds of a step without drafts."""
    verify_seconds: float
    draft_seconds: float

    @property
    def gain(self) -> float:
        """Tokens per second, relative to plain decoding."""
        return self.tokens * self.plain_seconds / (self.verify_seconds + self.draft_seconds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all sequences together."""
        return self.batch * self.tokens / (self.verify_seconds + self.draft_seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "depth": self.depth,
            "drafts": self.nodes,
            "tokens_per_step": self.tokens,
            "plain_seconds": self.plain_seconds,
            "verify_seconds": self.verify_seconds,
            "draft_seconds": self.draft_seconds,
            "tokens_per_s": self.tokens_per_s,
            "gain": self.gain,
        }


@dataclass(frozen=True, slots=True)
class GainPoint:
    """The forecast of one batch size: all drafts, and the depth with the highest gain, which may be 0."""

    full: PredictedGain
    best: PredictedGain

    def as_json(self) -> dict[str, Any]:
        return {**self.full.as_json(), "best": self.best.as_json()}


@dataclass(frozen=True, slots=True)
class GainForecast:
    """Speculative decoding of one model with one drafter on one machine."""

    name: str
    shape: DraftShape
    source: DraftSource
    target: Seconds
    """Seconds of a step of the target model."""
    context: int
    notes: tuple[str, ...] = ()
    """Assumptions of the figures."""
    recurrent: bool = False
    """Whether the target writes a recurrent state after each token that may be the last accepted one."""

    def at(self, batch: int) -> GainPoint:
        full = self._gain(batch, self.shape)
        tried = [self._gain(batch, self.shape.first(depth)) for depth in range(self.shape.depth)]
        return GainPoint(full, max([*tried, full], key=lambda one: one.gain))

    def points(self, batches: Sequence[int]) -> list[GainPoint]:
        return [self.at(batch) for batch in batches]

    def _gain(self, batch: int, shape: DraftShape) -> PredictedGain:
        return PredictedGain(
            batch,
            shape.depth,
            shape.nodes,
            shape.tokens,
            self.target(self._step(batch, 0)),
            self.target(self._step(batch, shape.nodes)),
            self.source.seconds(batch, self.context, shape),
        )

    def _step(self, batch: int, drafts: int) -> StepShape:
        lines = 1 + drafts
        kept = (lines,) * batch if self.recurrent else ()
        return StepShape((lines,) * batch, (self.context + drafts,) * batch, lines * batch, kept)

    def as_json(self, batches: Sequence[int]) -> dict[str, Any]:
        return {
            "speculative": self.name,
            "drafts_by_depth": list(self.shape.levels),
            "acceptance": list(self.shape.acceptance),
            "drafter_bytes": self.source.weight_bytes,
            "context": self.context,
            "assumptions": list(self.notes),
            "batches": [point.as_json() for point in self.points(batches)],
        }
