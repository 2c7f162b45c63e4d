"""Draft tokens that the host finds, and the number of draft tokens that each row verifies in the next step.

The host knows the tokens up to the last settled step; at loop depth 1 another step is in flight. So a guess is not a
draft for the next step, but a continuation from a position that the host knows. The device takes from it the tokens
after its own newest one. A guess that has become wrong costs the drafts of one step, never a wrong token.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bankfull.decode.gain import StepCosts, best_widths
from bankfull.types import Guess, StepPlan

SEPARATOR = -1
"""The token between a reference text and the prompt: no match crosses it."""


class Lookup(Protocol):
    """An index of sequences that predicts their next tokens (`SuffixLookup`)."""

    def open(self, tokens: Sequence[int]) -> int:
        """A new sequence; its number."""
        ...

    def close(self, sequence: int) -> None: ...

    def extend(self, sequences: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        """counts[i] new tokens of sequences[i]; `tokens` holds those of one sequence after the other."""
        ...

    def predict(self, sequences: Sequence[int], width: int) -> list[list[float]]:
        """The probability, for each sequence and each of up to `width` predicted tokens, that it and all before it are
        right."""
        ...

    def tokens(self, sequence: int, width: int) -> list[int]:
        """The predicted tokens of a sequence, at most `width`."""
        ...


@dataclass(slots=True)
class Tracked:
    """A sequence in the index."""

    number: int
    known: int
    """Settled tokens, prompt included."""
    alone: bool
    """Whether the sequence verifies no other drafts."""


@dataclass(slots=True)
class Expected:
    """A request that has not ended."""

    samples: int
    """Sequences that have not ended."""
    reference: Sequence[int]
    alone: bool


class Drafting:
    """`width`: the most drafts of a row. `depth`: steps in flight while the next one is planned. `least_gain`: drafts
    are verified if that gives this many times the tokens per second; None: whenever there are any."""

    def __init__(self, lookup: Lookup, width: int, depth: int, least_gain: float | None) -> None:
        self.width, self.least_gain = width, least_gain
        self.costs = StepCosts()
        self._lookup, self._depth = lookup, depth
        self._expected: dict[Hashable, Expected] = {}
        self._tracked: dict[Hashable, Tracked] = {}
        """Sequences in the index, by request and number of the sample."""
        self._guesses: dict[int, Guess] = {}
        """Guesses of the newest plan, by row."""

    def expect(self, request: Hashable, samples: int, reference: Sequence[int], alone: bool = False) -> None:
        """A request whose sequences are looked up, and in the reference text, too. `alone`: they verify no other
        drafts."""
        self._expected[request] = Expected(samples, reference, alone)

    def open(self, request: Hashable, child: int, tokens: Sequence[int]) -> None:
        """A sequence got a row. One that was preempted is known already."""
        key, expected = (request, child), self._expected.get(request)
        if expected is not None and key not in self._tracked:
            text = [*expected.reference, SEPARATOR, *tokens] if expected.reference else tokens
            self._tracked[key] = Tracked(self._lookup.open(text), len(tokens), expected.alone)

    def close(self, request: Hashable, child: int) -> None:
        """A sequence has ended, which may never have had a row."""
        if (gone := self._tracked.pop((request, child), None)) is not None:
            self._lookup.close(gone.number)
        if (expected := self._expected.get(request)) is not None:
            expected.samples -= 1
            if expected.samples == 0:
                del self._expected[request]

    def extend(self, settled: Sequence[tuple[Hashable, Sequence[int]]]) -> None:
        """New tokens of sequences."""
        known = [(self._tracked[key], tokens) for key, tokens in settled if tokens and key in self._tracked]
        if not known:
            return
        for one, tokens in known:
            one.known += len(tokens)
        counts = [len(tokens) for _, tokens in known]
        self._lookup.extend([one.number for one, _ in known], counts, [t for _, tokens in known for t in tokens])

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step has taken this long. Only steps without prompts are compared."""
        if all(work.count == 1 for work in plan.work):
            self.costs.observe(plan.tokens, seconds)

    def widths(self, owners: Mapping[int, Hashable], spare: int) -> dict[int, int]:
        """Drafts to verify in the next step, by row; rows without any are left out, except those that may verify no
        other ones. `owners`: the sequences of the rows that decode. `spare`: the most drafts of the step."""
        self._guesses = {}
        tracked = [(row, one) for row, key in owners.items() if (one := self._tracked.get(key)) is not None]
        widths = {row: 0 for row, one in tracked if one.alone}
        if not tracked or spare <= 0:
            return widths
        most = self._depth * (1 + self.width) + self.width  # steps in flight may add tokens before the drafts
        chances = self._lookup.predict([one.number for _, one in tracked], most)
        if not any(chances):
            return widths
        offered = [of_row[self._depth : self._depth + self.width] for of_row in chances]
        if self.least_gain is None:
            wanted = [len(of_row) for of_row in offered]
        else:
            wanted = best_widths(offered, len(owners), self.costs, self.least_gain, spare)
        for (row, one), drafts in zip(tracked, wanted, strict=True):
            if drafts:
                widths[row] = drafts
                self._guesses[row] = Guess(row, one.known, tuple(self._lookup.tokens(one.number, most)))
        return widths

    def known(self, key: Hashable) -> int:
        """Settled tokens of a sequence that has a row."""
        return self._tracked[key].known

    def guesses(self, plan: StepPlan) -> list[Guess]:
        """The guesses of the rows that verify drafts in this plan."""
        return [self._guesses[work.row] for work in plan.work if work.drafts and work.row in self._guesses]
