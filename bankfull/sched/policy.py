"""Who goes first, and when a batch may take in more: two small questions, answered by interchangeable parts."""

from __future__ import annotations

from typing import Protocol

from bankfull.config import SchedConfig

Rank = tuple[int, int]
"""Smaller runs first and is preempted last."""

BATCH_PRIORITY = 1_000_000
"""From this number on, work is batch work: nobody waits for its next token."""


def yields_of(policy: str, priority: int) -> bool:
    """Does a request of this priority give way: keep its pages, but get no tokens beside an online prompt?"""
    return policy == "priority" and priority >= BATCH_PRIORITY


COMPANY_STEPS = 256
"""So long after online work a batch expects more of it."""


def batch_share(step_tokens: int, decoding: int, company: bool) -> tuple[int, int]:
    """What batch work may get of a step: rows that decode, and tokens in all. Whoever comes in the meantime waits for
    the end of the step, so it has to be short: a prompt loses little by being cut into more chunks. Where somebody came
    lately, rows decode in turns, too, which costs a batch a little; where nobody does, none is held back."""
    few = max(1, step_tokens // 16)
    return (few, 2 * few) if company else (decoding, max(step_tokens // 4, decoding + few))


def rank_of(policy: str, priority: int, arrival: int) -> Rank:
    """Arrival breaks ties, so that a rank is unique and a resumed sequence keeps its place."""
    return (priority if policy == "priority" else 0, arrival)


class Gate(Protocol):
    """How many waiting sequences may be admitted now."""

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int: ...

    def admitted(self) -> None:
        """A sequence was admitted for the first time."""
        ...

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        """When `open` may answer differently although nothing arrives or leaves."""
        ...


class Continuous:
    """The batch is formed anew at every step."""

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        return waiting

    def admitted(self) -> None:
        pass

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return None


class Static:
    """A full batch starts together and runs to its end; `sealed` (no more will come) lets the last one start short."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = 0

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        if not running and not self.left and self.ready(waiting, first_queued, now, sealed):
            self.left = self.size
        # A member that was aborted while it waited leaves no seat to a later arrival.
        self.left = min(self.left, waiting)
        return self.left

    def admitted(self) -> None:
        self.left = max(0, self.left - 1)

    def ready(self, waiting: int, first_queued: float, now: float, sealed: bool) -> bool:
        return waiting >= self.size or (sealed and waiting > 0)

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return None


class Dynamic(Static):
    """As static, but a batch also starts when its first request has waited for `delay` seconds."""

    def __init__(self, size: int, delay: float) -> None:
        super().__init__(size)
        self.delay = delay

    def ready(self, waiting: int, first_queued: float, now: float, sealed: bool) -> bool:
        return super().ready(waiting, first_queued, now, sealed) or (waiting > 0 and now >= first_queued + self.delay)

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return first_queued + self.delay if waiting else None


def gate_of(config: SchedConfig) -> Gate:
    if config.batching == "static":
        return Static(config.batch_size)
    if config.batching == "dynamic":
        return Dynamic(config.batch_size, config.batch_delay)
    return Continuous()
