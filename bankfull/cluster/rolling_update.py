"""A rolling update of the weights: every replica is replaced, one at a time, while requests run.

New requests go to the new weights as soon as one replica has them. A request that has tokens is finished with the
weights that it began with: it stays on its replica, and moves only to another one with the same weights. The last
replica with the old weights waits for its requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from bankfull.errors import BankfullError, ConfigError

log = logging.getLogger("bankfull.serve")

FOREVER = 1e7
"""Seconds of a drain without a limit: max_tokens bounds how long a request runs."""
ROOM_SECONDS = 15.0
"""Time in which Ray reports the resources of a replica that has ended as free."""


class Updatable(Protocol):
    """The replicas, as an update sees them."""

    async def place(self, seconds: float) -> str:
        """Start another replica, without an engine; its name. Raises ConfigError if there is no room for it within
        `seconds`."""
        ...

    async def load_weights(self, name: str, model: str, generation: int) -> None:
        """Start an engine with this model in a replica without one, and wait until it is ready. Raises BankfullError
        if it cannot be loaded or does not fit; then the replica is without an engine again."""
        ...

    async def empty(self, name: str, grace: float) -> None:
        """End a replica's engine after its requests had `grace` seconds."""
        ...

    async def discard(self, name: str) -> None:
        """End a replica without an engine."""
        ...

    def adopt(self, model: str, generation: int) -> None:
        """Engines that are started from now on load this model."""
        ...


class RollingUpdate:
    def __init__(
        self,
        replicas: Updatable,
        names: list[str],
        old: tuple[str, int],
        model: str,
        *,
        grace: float,
        last_grace: float | None = None,
        check: Callable[[str], str] = lambda model: "",
    ) -> None:
        """`old`: the present model and its generation. `grace`: seconds that requests may run on a replica before they
        move to another one with the same weights; `last_grace`: the same for the last of these, where they end with an
        error after it. `check` returns why a model does not fit to the server, or nothing; it may block."""
        self._replicas, self._names, self._old, self._model = replicas, names, old, model
        self._generation = old[1] + 1
        self._grace, self._last_grace, self._check = grace, last_grace, check
        self.state = "running"
        """running, done or failed."""
        self.updated = 0
        """Replicas with the new weights."""
        self.lines: list[str] = []
        """What has happened, one sentence each."""

    def status(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "state": self.state,
            "updated": self.updated,
            "total": len(self._names),
            "lines": self.lines,
        }

    def stop(self, why: str) -> None:
        """The update cannot go on."""
        if self.state == "running":
            self.state = "failed"
            self._say(f"{why} {self._left()}")

    async def run(self) -> None:
        try:
            if why := await asyncio.to_thread(self._check, self._model):
                raise ConfigError(why)
            for name in self._names:
                await self._replace(name)
                self.updated += 1
        except BankfullError as error:
            self.stop(str(error))
        except asyncio.CancelledError:
            self.stop("The update was stopped.")
            raise
        else:
            self.state = "done"
            self._say(f"All {len(self._names)} replicas serve {self._model}.")

    def _left(self) -> str:
        if not self.updated:
            return "Nothing was changed: the replicas go on with the weights that they have."
        return (
            f"{self.updated} of {len(self._names)} replicas have the new weights and get the new requests; run "
            "`bankfull cluster update` again for the others."
        )

    async def _replace(self, name: str) -> None:
        number, total = self._names.index(name) + 1, len(self._names)
        last = number == total
        grace = self._grace if not last else FOREVER if self._last_grace is None else self._last_grace
        which = f"{name} ({number} of {total})"
        try:
            fresh = await self._replicas.place(ROOM_SECONDS if self.updated else 0.0)
        except ConfigError as error:
            if total == 1:
                raise ConfigError(
                    "The only replica would have to end before one with the new weights runs, because the cluster has "
                    f"no room for two: give a smaller --replica-cpus, or more machines. ({error})"
                ) from error
            self._say(f"{which}: there is no room for another replica, so that it is drained first.")
            await self._swap(name, grace)
        else:
            self._say(f"{which}: {fresh} loads the weights first.")
            await self._start(fresh)
            self._say(f"{which}: {fresh} is ready; {name} finishes its requests.")
            await self._replicas.empty(name, grace)
            await self._replicas.discard(name)

    async def _start(self, fresh: str) -> None:
        try:
            await self._replicas.load_weights(fresh, self._model, self._generation)
        except BaseException:
            await self._replicas.discard(fresh)
            raise
        self._replicas.adopt(self._model, self._generation)

    async def _swap(self, name: str, grace: float) -> None:
        """Replace the engine within the same replica."""
        await self._replicas.empty(name, grace)
        try:
            await self._replicas.load_weights(name, self._model, self._generation)
        except BankfullError as error:
            with suppress(BankfullError):  # the files of the old weights may be gone, too
                await self._replicas.load_weights(name, *self._old)
            raise error
        self._replicas.adopt(self._model, self._generation)

    def _say(self, line: str) -> None:
        self.lines.append(line)
        log.info("Update: %s", line)
