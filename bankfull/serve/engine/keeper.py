"""Keeps one engine running: starts it, watches it, starts it again with back-off when it ends, and gives up with a
reason."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from bankfull.errors import BankfullError, ConfigError, ModelError
from bankfull.serve.engine.admission import Admission, QueueLimits
from bankfull.serve.engine.backend import STOPPED, EngineDied, Unavailable
from bankfull.serve.engine.process import EngineConnection, EngineFactory
from bankfull.serve.engine.wire import Configure, Facts, FromEngine, Load, Ready, pack

log = logging.getLogger("bankfull.serve")

MOST_FAILED_LOADS = 3
"""Attempts to load a model for the first time. Later loads are retried for ever, or until `give_up_after`."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Back-off in seconds before a restart: doubled with each death until an engine has served for some time."""
CALM = 5.0
"""Ratio of the time that an engine has served to the last back-off, from which the back-off begins anew."""
STALL_SECONDS = 60.0
LEAVING = 5.0
"""Seconds that the engine process has to exit after its socket was closed."""

NEVER_LOADED = "The model could not be loaded; the server ends, and its log says why."
STARTED_AGAIN = "The engine has ended and is started again; ask again in a moment."
SHUTTING_DOWN = "The server is shutting down; ask again when it is back."


class EngineKeeper(ABC):
    """The life of one engine, without the requests: those are the subclass's. Code that runs for every request is not
    here. All of it runs on one event loop."""

    def __init__(
        self,
        configure: Configure,
        limits: QueueLimits,
        open_engine: EngineFactory,
        stall_seconds: float,
        give_up_after: float,
    ) -> None:
        for name, seconds in (("stall_seconds", stall_seconds), ("give_up_after", give_up_after)):
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{name}={seconds} is no time; give seconds, or 0 to wait for ever.")
        self._stall_seconds, self._give_up_after = stall_seconds, give_up_after
        self._configure, self._open_engine = configure, open_engine
        self._giving_up: asyncio.TimerHandle | None = None
        self._steps = 0
        """Steps that engine processes have reported."""
        self.admission = Admission(limits)
        self.phase = "starting"
        """How far loading is, for the log and the console."""
        self.failure: str | None = None
        """Why the engine is not restarted any more, for the operator; never sent to clients."""
        self.on_change: Callable[[], None] | None = None
        """Called when the engine has become ready, has ended or is given up."""
        self.restarts = self.failed_loads = 0
        self._facts: Facts | None = None
        self._load: Load | None = None
        self._ready = self._draining = False
        self._ready_at = 0.0
        """Time at which the last engine became ready, in seconds."""
        self._engine: EngineConnection | None = None
        self._refusal: str | None = None
        """Why the model cannot be loaded, as the engine process reported it."""
        self._last_failure = ""
        """Why the last load failed, or how its process ended."""
        self._supervisor: asyncio.Task[None] | None = None
        self._changed, self._failed, self._again = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # -- the requests, which the subclass has

    @abstractmethod
    def _receive(self, message: FromEngine) -> None: ...

    @abstractmethod
    def _has_requests(self) -> bool:
        """Whether there is a request that the engine can run at once."""

    @abstractmethod
    def _fail_requests(self, error: BankfullError) -> None:
        """Every request that still runs gets the error."""

    @abstractmethod
    def _notify(self) -> None:
        """Wake all tasks that wait for a change of state."""

    # -- life

    async def start(self) -> None:
        """Returns at once; `wait_ready` waits until the model is loaded."""
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise())
        self._supervisor.add_done_callback(self._orphan)

    async def wait_ready(self) -> None:
        """Raises ModelError when the model was given up."""
        while not self._ready:
            if self.failure is not None:
                raise ModelError(self.failure)
            await self._changed.wait()

    async def wait_failed(self) -> NoReturn:
        """Raises ModelError once the model is given up; otherwise waits for ever."""
        await self._failed.wait()
        raise ModelError(self.failure)

    def try_again(self) -> None:
        """End the back-off: the reason of the last failure may be gone."""
        self._again.set()

    async def close(self) -> None:
        """End the engine process; requests that still run get an error."""
        self._draining = True
        self.admission.close(SHUTTING_DOWN)
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})  # a failure is logged already

    def _orphan(self, supervisor: asyncio.Task[None]) -> None:
        """However the supervisor ends, every waiting request gets an error."""
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            log.error("The engine's supervisor has failed.", exc_info=error)
            if self._engine is not None:
                self._engine.kill()
            self._fail_all(Unavailable(STOPPED))
            self._give_up(f"The engine's supervisor has failed: {error!r}.")

    async def _supervise(self) -> None:
        failed_loads, pause = 0, FIRST_PAUSE
        while True:
            self._again.clear()
            self._engine = engine = self._open_engine(self._receive)
            self._refusal = None
            try:
                await engine.start()
                engine.send(pack(self._configure))
                await engine.until_ended(self._stall_seconds, self._has_work, lambda: self._steps)
            except asyncio.CancelledError:
                self._fail_all(Unavailable(STOPPED))
                await engine.finish(LEAVING)
                raise
            except (OSError, Unavailable) as error:
                log.error("The engine process cannot be started: %s", error)
            was_ready = self._ready
            self._fail_all(EngineDied("The engine process has died while the request was running."))
            how = await engine.finish(patience=1.0)
            if was_ready:
                failed_loads = 0
                if time.monotonic() - self._ready_at > CALM * pause:
                    pause = FIRST_PAUSE
                log.error("The engine process %d ended %s; it is started again.", engine.pid, how)
            else:
                failed_loads += 1
                self.failed_loads += 1
                self._last_failure = self._refusal or f"The engine process ended {how} while it loaded the model."
                if self._facts is None and (self._refusal is not None or failed_loads >= MOST_FAILED_LOADS):
                    self._give_up(self._last_failure)
                    return
                log.error("%s It is tried again in %g seconds.", self._last_failure, pause)
                if not self._draining:
                    self.admission.close(
                        f"The engine has ended, and {failed_loads} attempts to load the model again have failed; the "
                        f"next one begins in {pause:.0f} seconds, and the server's log says why."
                    )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), pause)
            if self.failure is not None:
                return
            pause = FIRST_PAUSE if self._again.is_set() else min(2 * pause, LONGEST_PAUSE)
            self.restarts += 1

    def _has_work(self) -> bool:
        """Whether the engine must make progress."""
        queued = self._load is not None and (self._load.running or self._load.waiting)
        return self._ready and (bool(queued) or self._has_requests())

    def _set_timer(self) -> None:
        """Start the time-out of `give_up_after`: there is no engine from now on."""
        if self._give_up_after and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(self._give_up_after, self._on_give_up)

    def _on_give_up(self) -> None:
        self._give_up(f"There was no engine for {self._give_up_after:g} seconds. {self._last_failure}".strip())

    def _give_up(self, why: str) -> None:
        log.error("%s It is not started again.", why)
        self.failure = why
        self.admission.close(NEVER_LOADED)
        self._failed.set()
        self._announce()

    def _fail_all(self, error: BankfullError) -> None:
        """Fail all requests: the engine process is gone."""
        if self._ready:
            self._set_timer()
            if not self._draining:
                self.admission.close(STARTED_AGAIN)
        self._ready = False
        self._engine = None
        self._load = None
        self._fail_requests(error)
        self._announce()

    def _begin(self, ready: Ready) -> None:
        """The model is loaded."""
        self._facts = ready.facts
        self.phase = "ready"
        self._ready, self._ready_at = True, time.monotonic()
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if not self._draining:
            self.admission.open(ready.facts)
        self._announce()

    def _announce(self) -> None:
        self._notify()
        if self.on_change is not None:
            self.on_change()
