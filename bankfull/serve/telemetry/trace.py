"""One HTTP request on its way through the service: who asks, and what it has cost so far.

The outermost layer makes a `Trace`; all that runs on its behalf finds it here, so that no endpoint can forget to count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from bankfull.errors import BankfullError
from bankfull.serve.engine.backend import STOPPED, Unavailable
from bankfull.serve.guard.keys import Key


@dataclass(slots=True)
class Trace:
    id: str
    method: str
    path: str
    arrived: float
    """On the monotonic clock."""
    key: Key | None = None
    route: str = ""
    """The path with the ids in it replaced by their names: few values, unlike `path`."""
    status: int = 0
    problem: str | None = None
    """Why the answer broke off after its status had been sent."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    ttft: float | None = None
    batch: bool = False
    """A line of a batch: nobody waits for it."""
    body: bytes | None = None
    """What was asked; kept only where logs may hold it."""
    ended: BankfullError | None = None
    """Why the server itself has cancelled the task that answers it."""


_current: ContextVar[Trace | None] = ContextVar("bankfull_call", default=None)


def current_trace() -> Trace | None:
    return _current.get()


def owner_of_call() -> str:
    """The name of the key that this call is charged to; none where there are no keys."""
    trace = _current.get()
    return "" if trace is None or trace.key is None else trace.key.name


def why_ended() -> BankfullError:
    """What a client is told whose call the server has cancelled. Nobody gives a reason at the end of the server."""
    trace = current_trace()
    return Unavailable(STOPPED) if trace is None or trace.ended is None else trace.ended


@contextmanager
def during(trace: Trace) -> Iterator[None]:
    """Whatever runs inside, and every task that it starts, counts for it."""
    token = _current.set(trace)
    try:
        yield
    finally:
        _current.reset(token)
