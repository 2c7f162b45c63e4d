"""The shape of one step: everything its cost depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bankfull.errors import ConfigError
from bankfull.types import Work

LARGEST_STEP = 1 << 24
"""Tokens in a step at most; bounds the memory for costing it."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Per sequence: tokens that the step runs, length afterwards, recurrent states written."""

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    logits: int
    """Tokens whose logits are computed."""
    kept: tuple[int, ...] = ()
    """Recurrent states written per sequence; one each by default."""

    def __post_init__(self) -> None:
        kept = self.kept or (1,) * len(self.counts)
        object.__setattr__(self, "kept", kept)
        if not self.counts or not len(self.counts) == len(self.lengths) == len(kept):
            raise ConfigError("A step needs at least one sequence, and one length for each.")
        for count, length, states in zip(self.counts, self.lengths, kept, strict=True):
            if not 1 <= count <= length or not 0 <= states <= count:
                raise ConfigError(
                    f"A sequence cannot run {count} tokens, end at length {length} and keep {states} states."
                )
        if not 0 <= self.logits <= self.tokens or self.tokens > LARGEST_STEP:
            raise ConfigError(f"A step of {self.tokens} tokens with {self.logits} rows of logits cannot be costed.")

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @staticmethod
    def prefill(tokens: int, sequences: int = 1, past: int = 0) -> StepShape:
        """`tokens` new tokens per sequence after `past` cached ones; logits for the last one."""
        return StepShape((tokens,) * sequences, (past + tokens,) * sequences, sequences)

    @staticmethod
    def decode(sequences: int = 1, context: int = 1) -> StepShape:
        """One token per sequence, which attends to `context` tokens including itself."""
        return StepShape((1,) * sequences, (context,) * sequences, sequences)

    @staticmethod
    def of(work: Sequence[Work]) -> StepShape:
        """The shape of a planned step. Its lengths are lower bounds while the previous step is still running."""
        counts = tuple(w.count + w.drafts for w in work)
        return StepShape(
            counts,
            tuple(w.start + count for w, count in zip(work, counts, strict=True)),
            sum(w.lines for w in work),
            tuple(len(w.slots) or 1 for w in work),
        )
