"""A day of traffic for a simulated fleet: conversations whose turns share prefixes, synthetic or recorded.

The synthetic day has a diurnal curve, short bursts, conversations of a few turns, and lengths and pauses with heavy
tails. A day with fewer requests than its rate gives in 24 hours is shorter: the curve is compressed, while pauses and
token times stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from bankfull.bench.load.workloads import Prompt, RecordedTrace
from bankfull.errors import ConfigError
from bankfull.plan.day_content import OpeningParts
from bankfull.plan.traffic import TrafficSpec, UniformLengths

MOST_REQUESTS = 10_000_000
"""Requests that a day may have."""
SWING = 0.6
"""Amplitude of the diurnal curve, relative to the mean rate."""
BURSTS, BURST_FACTOR, BURST_SHARE = 6, 2.5, 0.005
"""Bursts in a day, their rate relative to the curve, and the fraction of the day that each takes."""
TURNS = 4.0
"""Mean number of requests of a conversation."""
PAUSE_SECONDS, PAUSE_SPREAD = 20.0, 1.0
"""Median pause between an answer and the next turn, and its standard deviation as a logarithm."""
LATER_SHARE = 8
"""A later turn adds one token for this many of a first prompt."""
SYSTEM_PROMPTS = 16
"""Different prefixes that conversations share; a few of them are much more frequent than the others."""


@dataclass(slots=True)
class DayTurn:
    pause: float
    """Seconds after the answer before."""
    new: int
    """Tokens that the user adds."""
    output: int
    """Tokens of the answer."""


@dataclass(slots=True)
class DayConversation:
    begins: float
    opening: OpeningParts
    """Tokens before the first turn that other conversations may share."""
    turns: list[DayTurn]


class SyntheticDay:
    def __init__(self, traffic: TrafficSpec, requests: int, context: int, seed: int = 0) -> None:
        """`context`: tokens that a prompt and its output may have together."""
        self.traffic, self.requests, self.context = traffic, requests, context
        self.seconds = requests / traffic.rate
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._turns = self._turn_counts()
        self._begins = self._begin_times(len(self._turns))
        weights = 1 / np.arange(1, SYSTEM_PROMPTS + 1)
        self._systems = self._random.choice(SYSTEM_PROMPTS, len(self._turns), p=weights / weights.sum())
        self._prompts, self._outputs = (self._lengths(each) for each in (traffic.prompt, traffic.output))
        self._pauses = self._random.lognormal(np.log(PAUSE_SECONDS), PAUSE_SPREAD, requests)

    def conversations(self) -> Iterator[DayConversation]:
        """The day's conversations in the order of their first turns."""
        shared, at = self.traffic.shared, 0
        openings: list[OpeningParts] = [((shared, system),) if shared else () for system in range(SYSTEM_PROMPTS)]
        each = zip(self._begins.tolist(), self._turns.tolist(), self._systems.tolist(), strict=True)
        for begins, turns, system in each:
            pauses, prompts, outputs = (
                column[at : at + turns].tolist() for column in (self._pauses, self._prompts, self._outputs)
            )
            at += turns
            parts = []
            for turn, (pause, prompt, output) in enumerate(zip(pauses, prompts, outputs, strict=True)):
                first = max(1, prompt - shared)
                new = max(1, first // LATER_SHARE) if turn else first
                parts.append(DayTurn(pause if turn else 0.0, new, output))
            yield DayConversation(begins, openings[system], parts)

    def rate_at(self, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Relative rate of conversations, at times from 0 to 1."""
        curve = 1 - SWING * np.cos(2 * np.pi * times)
        random = np.random.default_rng((self._seed, 1))
        for begin in random.uniform(0, 1 - BURST_SHARE, BURSTS):
            curve = np.where((times >= begin) & (times < begin + BURST_SHARE), BURST_FACTOR * curve, curve)
        return np.asarray(curve)

    def _turn_counts(self) -> np.ndarray[Any, Any]:
        counts = self._random.geometric(1 / TURNS, int(1.2 * self.requests / TURNS) + 64)
        while counts.sum() < self.requests:
            counts = np.concatenate((counts, self._random.geometric(1 / TURNS, len(counts))))
        sums = counts.cumsum()
        last = int(np.searchsorted(sums, self.requests))
        counts = counts[: last + 1]
        counts[-1] -= int(sums[last]) - self.requests
        return np.asarray(counts)

    def _begin_times(self, count: int) -> np.ndarray[Any, Any]:
        grid = np.linspace(0, 1, 20_001)
        share = np.concatenate(([0.0], self.rate_at((grid[1:] + grid[:-1]) / 2).cumsum()))
        drawn = np.sort(self._random.uniform(0, 1, count))
        return np.asarray(np.interp(drawn, share / share[-1], grid) * self.seconds)

    def _lengths(self, lengths: UniformLengths) -> np.ndarray[Any, Any]:
        """Log-normal between the ends of the range, which are two standard deviations from the median."""
        low, high = np.log(lengths.low), np.log(lengths.high)
        drawn = self._random.lognormal((low + high) / 2, (high - low) / 4, self.requests)
        return np.asarray(drawn.astype(np.int32).clip(lengths.low, lengths.high))


class _PartPrompts:
    """Prompts of a recorded trace as parts, in the place of tokens: [number, tokens, number, tokens, ...]."""

    def take(self, numbers: Random, tokens: int) -> Prompt:
        return [numbers.getrandbits(40), tokens]

    def join(self, first: Prompt, second: Prompt) -> Prompt:
        assert isinstance(first, list) and isinstance(second, list)
        return first + second

    def count(self, text: str) -> int:
        raise NotImplementedError("a recorded trace has lengths, not texts")


class RecordedDay:
    """A recorded trace: the formats of `bankfull bench serve --trace`."""

    def __init__(self, path: Path, requests: int, context: int, seed: int = 0) -> None:
        recorded: list[tuple[float, OpeningParts, int]] = []
        beginnings: dict[tuple[int, int], int] = {}
        """(number of the beginning before, number of a part) -> number of the beginning that ends with the part."""
        for one in RecordedTrace(path).make(requests, seed, _PartPrompts()):
            [turn] = one.turns
            assert isinstance(turn.prompt, list) and turn.tokens is not None
            if turn.tokens + turn.max_tokens > context:
                raise ConfigError(
                    f"The trace {path} has a request of {turn.tokens} + {turn.max_tokens} tokens, but a replica "
                    f"holds {context}; leave it out, or choose a device with more memory."
                )
            end, beginning, parts = 0, 0, []
            for number, tokens in zip(turn.prompt[::2], turn.prompt[1::2], strict=True):
                end += tokens
                beginning = beginnings.setdefault((beginning, number), len(beginnings) + 1)
                parts.append((end, beginning))
            recorded.append((one.at or 0.0, tuple(parts), turn.max_tokens))
        self._found = recorded
        uses = Counter(beginning for _, parts, _ in recorded for _, beginning in parts)
        self._shared = {beginning for beginning, count in uses.items() if count > 1}
        self.requests = len(recorded)
        self.context = context
        self.seconds = max(recorded[-1][0], 1e-3)

    def conversations(self) -> Iterator[DayConversation]:
        for begins, parts, output in self._found:
            opening = tuple(part for part in parts if part[1] in self._shared)
            new = parts[-1][0] - (opening[-1][0] if opening else 0)
            yield DayConversation(begins, opening, [DayTurn(0.0, new, output)])


Day = SyntheticDay | RecordedDay
