"""The works that engines are compared on, and their prompts: token ids, never the same twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.protocol import Prompts

Measure = Literal["decode", "prefill", "output"]
WARM_UP_TOKENS = 8
FIRST_LENGTH = 16
"""Tokens of the warm-up prompt of a batched turn; as many as in llama-batched-bench."""


class Worker(Protocol):
    def work(self, prompts: Prompts, new: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """The prompts of one turn; both engines of a pair get the same."""

    first: Prompts
    """Prompts of the warm-up, which generates one token."""
    measured: tuple[tuple[Prompts, Prompts], ...]
    """Per repetition: prompts of the work itself, and prompts for timing the first token."""


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    measure: Measure
    prompt_len: int
    new: int
    requests: int = 1
    repetitions: int = 1
    """Repetitions within a turn; the turn's figure is their median."""

    def warm_up(self, worker: Worker, fresh: FreshPrompts) -> None:
        worker.work(fresh.take(self.requests, self.prompt_len), min(self.new, WARM_UP_TOKENS))

    def rate(self, worker: Worker, several: tuple[Prompts, Prompts]) -> float:
        """Tokens per second. Decode time is the time of n tokens minus that of the first, so it takes two prompts."""
        whole = worker.work(several[0], self.new)
        if self.measure == "prefill":
            return self.prompt_len / whole
        if self.measure == "output":
            return self.requests * self.new / whole
        first = worker.work(several[1], 1)
        if whole <= first:
            raise EngineFailed(f"{self.new} tokens took no longer than one; the machine is too busy to measure")
        return self.requests * (self.new - 1) / (whole - first)

    def turn(self, fresh: FreshPrompts) -> Turn:
        def prompts() -> Prompts:
            return fresh.take(self.requests, self.prompt_len)

        first = fresh.take(1, FIRST_LENGTH if self.measure == "output" else self.prompt_len)
        return Turn(first, tuple((prompts(), prompts()) for _ in range(self.repetitions)))


WORKS = {
    work.name: work
    for work in (
        Work("decode", "decode", 32, 128, repetitions=3),
        Work("decode64", "decode", 32, 64, repetitions=3),
        Work("decode64x8", "decode", 32, 64, 8, repetitions=3),
        Work("prefill512", "prefill", 512, 1),
        Work("prefill2048", "prefill", 2048, 1),
        Work("batch8", "output", 128, 128, 8),
        Work("batch32", "output", 128, 128, 32),
        Work("batch64", "output", 128, 128, 64),
    )
}
FOR_SHAPES = "decode64,decode64x8"
"""Default works for shapes: large shapes take long, and decoding is what they are for."""
FOR_MODELS = ",".join(name for name in WORKS if name not in FOR_SHAPES.split(","))


class FreshPrompts:
    """Random ids below `vocab`, different in each call; reproducible for the sequence of calls."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        self._random, self._vocab = random.Random(seed), vocab

    def take(self, count: int, length: int) -> Prompts:
        return [self._random.choices(range(self._vocab), k=length) for _ in range(count)]


def chosen(names: str) -> Iterator[Work]:
    """Parse "decode,prefill512"; ValueError for an unknown work."""
    for name in names.split(","):
        if name not in WORKS:
            raise ValueError(f"the work {name!r} is unknown; choose from {', '.join(WORKS)}")
        yield WORKS[name]
