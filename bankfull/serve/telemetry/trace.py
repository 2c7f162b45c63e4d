"""The trace of an HTTP request: its caller, and its cost so far.

The outermost layer makes a `Trace`. All code that runs for the request finds it in a context variable, so that no
endpoint can forget to count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from bankfull.errors import BankfullError
from bankfull.serve.engine.backend import STOPPED, Unavailable
from bankfull.serve.guard.keys import Key


@dataclass(slots=True)
class Trace:
    id: str
    method: str
    path: str
    arrived: float
    """Time of arrival on the monotonic clock."""
    key: Key | None = None
    route: str = ""
    """The path with ids replaced by their names: few values, unlike `path`."""
    status: int = 0
    problem: str | None = None
    """Why the answer broke off after its status had been sent."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft: float | None = None
    batch: bool = False
    """Whether it is a line of a batch, which no client waits for."""
    body: bytes | None = None
    """The request's body; kept only where logs may hold it."""
    ended: BankfullError | None = None
    """Why the server has cancelled the task that answers it."""


_current: ContextVar[Trace | None] = ContextVar("bankfull_call", default=None)


def current_trace() -> Trace | None:
    return _current.get()


def owner_of_call() -> str:
    """The name of the key that this call is charged to; empty without keys."""
    trace = _current.get()
    return "" if trace is None or trace.key is None else trace.key.name


def why_ended() -> BankfullError:
    """The error for a client whose call the server has cancelled. Without a reason, the server is shutting down."""
    trace = current_trace()
    return Unavailable(STOPPED) if trace is None or trace.ended is None else trace.ended


@contextmanager
def during(trace: Trace) -> Iterator[None]:
    """All code that runs inside, and every task that it starts, belongs to this trace."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)


class Running:
    """Calls in progress, so that the server can cancel them."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.Task[Any], Trace] = {}

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def during(self, task: asyncio.Task[Any] | None, trace: Trace | None) -> Iterator[None]:
        if task is None or trace is None:
            yield
            return
        self._calls[task] = trace
        try:
            yield
        finally:
            del self._calls[task]

    async def until_ended(self, which: Callable[[Trace], bool], seconds: float) -> None:
        """Wait until no call that matches runs, at most that many seconds."""
        ends = time.monotonic() + seconds
        while any(which(trace) for trace in self._calls.values()) and time.monotonic() < ends:
            await asyncio.sleep(0.02)

    def end(self, error: BankfullError, which: Callable[[Trace], bool] = lambda trace: True) -> int:
        """Cancel the calls that match; their number. Each gets the error: a stream as its last event, any other call as
        its answer."""
        ended = [(task, trace) for task, trace in self._calls.items() if trace.ended is None and which(trace)]
        for task, trace in ended:
            trace.ended = error
            task.cancel()
        return len(ended)
