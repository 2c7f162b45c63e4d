"""The engine as endpoints see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from bankfull.errors import BankfullError
from bankfull.outputs import Delta
from bankfull.serve.engine.wire import Facts, Load, PageTables, RequestDone
from bankfull.submit import Submit

STOPPED = "The server has shut down before the answer was complete."


class Busy(BankfullError):
    """The queue is full: the client may retry."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(BankfullError):
    """There is no engine right now: it is loading, restarting or draining."""


class EngineDied(BankfullError):
    """The engine process ended while a request was running."""


class EngineFault(EngineDied):
    """The engine failed on this one request and goes on with all others: no other engine would do better."""


class DeadlineExceeded(BankfullError):
    """The request's own deadline has passed."""


class Backend(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> Facts | None:
        """None until the model has been loaded for the first time."""
        ...

    @property
    def load(self) -> Load | None: ...

    @property
    def says(self) -> str:
        """Why it is not ready, for clients: without file names or details of the machine."""
        ...

    @property
    def optional(self) -> Mapping[str, str]:
        """Optional parts that were asked for: why each is not used, or nothing. They never decide readiness."""
        ...

    @property
    def restarts(self) -> int:
        """Engine processes started to replace one that ended."""
        ...

    @property
    def failed_loads(self) -> int:
        """Engine processes that ended before the model was loaded."""
        ...

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        """Raises Busy or Unavailable where `generate` would for any prompt, so that none is prepared in vain."""
        ...

    def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        """The deltas of each engine step, until `RequestDone` (always the last item). The request is submitted when
        this returns. Leaving the iterator, by `aclose`, by cancelling a wait or by dropping the last reference, aborts
        the request. The call itself raises Busy or Unavailable, so that a refusal comes at once; the iterator raises
        RequestError, EngineDied, Unavailable (shut down in the meantime) or DeadlineExceeded."""
        ...

    async def page_tables(self) -> dict[str, PageTables]:
        """The page tables of running sequences, by the name of the replica; one without a name where there is one."""
        ...

    async def reset_cache(self) -> int:
        """Drop unused prefixes from the cache; the number of pages freed."""
        ...
