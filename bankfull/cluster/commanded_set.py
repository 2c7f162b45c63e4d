"""A `ReplicaSet` that `bankfull cluster` commands through a socket, and what it shows of a replica."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from bankfull.cluster.admin import AdminSocket, Controlled
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.view import ReplicaView
from bankfull.tasks import OwnTasks

log = logging.getLogger("bankfull.serve")


class CommandedSet(ReplicaSet, Controlled):
    """Runs on the server's event loop."""

    def __init__(self, *pools_and_policy: Any) -> None:
        """`pools_and_policy`: what the set of the other base class takes."""
        super().__init__(*pools_and_policy)
        self._tasks = OwnTasks(self._task_failed)
        self._admin = AdminSocket(self)

    @abstractmethod
    def _task_failed(self, error: BaseException) -> None:
        """A task of the set has ended with an error."""

    async def _end_places(self) -> None:
        """End what runs the engines, when they have ended."""

    async def start(self) -> None:
        await super().start()
        try:
            await self._admin.start()
        except OSError as error:
            log.error("`bankfull cluster` cannot reach this server: %s.", error)

    async def close(self) -> None:
        """End the engines, and what they run on."""
        await self._tasks.end()
        try:
            await super().close()
        finally:
            await self._end_places()
            await self._admin.close()

    def shrink(self) -> None:
        self._admin.hide()


def shown_replica(
    name: str, view: ReplicaView | None, *, state: str, node: str, address: str, restarts: int = 0
) -> dict[str, Any]:
    """A replica in `bankfull cluster status`. `view`: of its engine; None: it has none yet. `restarts`: of what the
    engine runs on."""
    return {
        "name": name,
        "state": state,
        "node": node,
        "address": address,
        "running": view.load.running if view and view.load is not None else 0,
        "waiting": view.load.waiting if view and view.load is not None else 0,
        "rows": view.rows if view else 0,
        "hit_rate": view.hit_rate if view else None,
        "weights": view.weights if view else "",
        "restarts": (view.restarts if view else 0) + restarts,
    }
