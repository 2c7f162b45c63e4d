"""All that an endpoint knows of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from bankfull.errors import BankfullError
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.wire import Done, Facts, Load, Piece

STOPPED = "The server has shut down before the answer was complete."


class Busy(BankfullError):
    """The queue is full: the client may come back."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(BankfullError):
    """There is no engine right now: it loads, restarts or drains."""


class EngineDied(BankfullError):
    """The engine process ended while a request was running."""


class DeadlineExceeded(BankfullError):
    """The request's own deadline has passed."""


class Backend(Protocol):
    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> Facts | None:
        """None until the model was loaded for the first time."""
        ...

    @property
    def load(self) -> Load | None: ...

    @property
    def says(self) -> str:
        """Why it is not ready, for clients: no names of files, no details of the machine."""
        ...

    @property
    def restarts(self) -> int:
        """Engine processes that were started in the place of one that ended."""
        ...

    @property
    def failed_loads(self) -> int:
        """Those that ended before the model was loaded."""
        ...

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        """Raises Busy or Unavailable where `generate` would for any prompt: then there is no use in preparing one."""
        ...

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str = "",
        pool: str | None = None,
        deadline: float | None = None,
        explain: bool = False,
        tenant: str = "",
    ) -> AsyncIterator[list[Piece | Done]]:
        """What each engine step adds, until `Done` (always the last). The request is on its way when this returns;
        leaving the iterator, by `aclose`, by cancelling a wait or by letting go of it, aborts the request.
        `deadline`: seconds from now. `explain`: `Done` tells where the time went. `tenant`: on whose behalf, where
        several share the engine. The call itself raises Busy or
        Unavailable, so that a refusal comes at once; the iterator raises RequestError, EngineDied, Unavailable (shut
        down in the meantime) or DeadlineExceeded."""
        ...

    async def reset_cache(self) -> int:
        """Forget unused prefixes; how many pages that freed."""
        ...
