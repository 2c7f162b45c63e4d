"""Admission: requests that are refused, sequences that wait for a row, and the gates that limit how many of them a
policy may admit in a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from bankfull.config import SchedConfig
from bankfull.errors import ConfigError, RequestError
from bankfull.sched.sequence import OrderedSequences, Sequence
from bankfull.state.manager import StateManager
from bankfull.types import Request


class Gate(Protocol):
    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        """Sequences that may be admitted now, out of `waiting` that never ran. `first_queued` is the time at which the
        oldest of them arrived; `sealed` means that no more will arrive."""
        ...

    def admitted(self) -> None:
        """A sequence was admitted for the first time."""
        ...

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        """The time at which `open` may return more although nothing arrives or leaves; None if only that helps."""
        ...


class Continuous:
    """Continuous batching: the batch is formed anew at every step."""

    def open(self, waiting: int, first_queued: float, running: int, now: float, sealed: bool) -> int:
        return waiting

    def admitted(self) -> None:
        pass

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return None


class Static:
    """Static batching: a full batch starts together and runs to its end. The last batch of a sealed queue may be
    incomplete."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = 0
        """Members of the current batch that were not admitted yet."""

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
    """Dynamic batching: as static, but an incomplete batch starts when its first request has waited `delay` seconds."""

    def __init__(self, size: int, delay: float) -> None:
        super().__init__(size)
        self.delay = delay

    def ready(self, waiting: int, first_queued: float, now: float, sealed: bool) -> bool:
        return super().ready(waiting, first_queued, now, sealed) or (waiting > 0 and now >= first_queued + self.delay)

    def wake_at(self, waiting: int, first_queued: float) -> float | None:
        return first_queued + self.delay if waiting else None


GATES: dict[str, Callable[[SchedConfig], Gate]] = {
    "continuous": lambda config: Continuous(),
    "static": lambda config: Static(config.batch_size),
    "dynamic": lambda config: Dynamic(config.batch_size, config.batch_timeout),
}
"""Makers of the gates, by the value of `SchedConfig.batching`."""


def gate_of(config: SchedConfig) -> Gate:
    if config.batching != "continuous" and config.rows and config.batch_size > config.rows:
        raise ConfigError(
            f"batch_size={config.batch_size} is more than the {config.rows} rows of a step; lower it, or raise rows."
        )
    return GATES[config.batching](config)


class WaitingQueue(OrderedSequences):
    """Sequences that wait for a row, in their order; the gate limits how many new ones are admitted."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate
        self.only: Hashable | None = None
        """The request that alone may be admitted; None: any."""
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        """Sequences that never ran, in the order of arrival."""

    def arrive(self, seq: Sequence) -> None:
        """Queue a new sequence; preempted ones come back by `enter`."""
        self._fresh[seq] = None
        self.enter(seq)

    def leave(self, seq: Sequence) -> None:
        super().leave(seq)
        self._fresh.pop(seq, None)

    def quota(self, running: int, now: float, sealed: bool) -> int:
        """New sequences that may be admitted now. A preempted sequence is still a member of its batch."""
        if not self._fresh:
            return 0
        members = running + len(self) - len(self._fresh)
        return self.gate.open(len(self._fresh), self._first_queued, members, now, sealed)

    def wake_at(self) -> float | None:
        """The time at which `quota` may grow although nothing arrives."""
        return self.gate.wake_at(len(self._fresh), self._first_queued)

    @property
    def _first_queued(self) -> float:
        return next(iter(self._fresh)).queued_at if self._fresh else 0.0

    def admissible(self, index: int, quota: int, tenant: str | None = None) -> int | None:
        """Index of the first sequence from `index` on, of this tenant or of any, that could be admitted."""
        if quota <= 0 and len(self._fresh) == len(self):
            return None
        for i in range(index, len(self)):
            seq = self[i]
            allowed = tenant in (None, seq.tenant) and self.only in (None, seq.request.id)
            if allowed and seq.parent is None and (seq.admitted or quota > 0):
                return i
        return None


def check_request(request: Request, waiting: int, config: SchedConfig, state: StateManager) -> None:
    """Refuses a request that can never run, or that finds the queue full. `waiting`: sequences in the queue before this
    request's."""
    if not request.prompt:
        raise RequestError("The prompt is empty; give at least one token.")
    if request.samples < 1:
        raise RequestError(f"samples={request.samples!r} must be a whole number of at least 1.")
    arriving = request.samples - len(request.finished)
    if waiting + arriving > config.max_waiting:
        raise RequestError(
            f"{waiting} sequences are waiting and {arriving} more would exceed max_waiting="
            f"{config.max_waiting}; try again later."
        )
    if request.generates and request.limit <= len(request.prompt):
        raise RequestError(
            f"The prompt has {len(request.prompt)} tokens and the limit is {request.limit}; shorten the prompt or "
            "raise the limit so that at least one token can follow."
        )
    length = request.limit if request.generates else len(request.prompt)
    need = state.frames_for(length, config.step_tokens)
    if need > state.pages.size:
        raise RequestError(
            f"The request may grow to {length} tokens, which need {need} pages of state, but the pool has "
            f"{state.pages.size}; lower max_tokens, shorten the prompt, or give the pool more memory."
        )
