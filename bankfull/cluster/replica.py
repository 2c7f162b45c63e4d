"""The actor that Ray runs for each replica: a gateway on its own thread.

Ray passes it a token and a version, and gets numbers and names back: nothing that a client has sent is ever pickled.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from concurrent.futures import Future
from typing import Any

import bankfull
from bankfull.serve.engine.gateway import Gateway

START_SECONDS = 30.0


class EngineReplica:
    """One replica. Its engine process exists as long as a server is connected to its gateway."""

    def __init__(self, token: str, host: str) -> None:
        """`host`: the address to listen on; the address of this machine in the cluster if it is empty."""
        from bankfull.cluster.ray_version import import_ray

        ray = import_ray()
        if not host:
            host = ray.util.get_node_ip_address()
        self._node_id = str(ray.get_runtime_context().get_node_id())
        self._gateway = Gateway(bytes.fromhex(token), _environment())
        listening: Future[tuple[str, int]] = Future()
        threading.Thread(target=self._run, args=(host, listening), name="bankfull-gateway", daemon=True).start()
        self._address = listening.result(START_SECONDS)

    def status(self) -> dict[str, Any]:
        host, port = self._address
        return {
            "host": host,
            "port": port,
            "node": platform.node(),
            "node_id": self._node_id,
            "version": bankfull.__version__,
            "pid": os.getpid(),
            "engine": self._gateway.engine_pid,
        }

    def _run(self, host: str, listening: Future[tuple[str, int]]) -> None:
        async def serve() -> None:
            try:
                address = await self._gateway.start(host)
            except OSError as error:
                listening.set_exception(error)
                return
            listening.set_result(address)
            await asyncio.Event().wait()

        # Not Ray's own event loop: heartbeats must not wait for it.
        try:
            asyncio.run(serve())
        except BaseException:
            os._exit(1)  # Ray starts the replica again


def _environment() -> dict[str, str]:
    """Of the engine process: without Ray's own variables, its token above all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
