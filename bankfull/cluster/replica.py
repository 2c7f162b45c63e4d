"""The actors that Ray runs: for each replica a gateway, and for each of its other ranks a host; each on a thread of its
own.

Ray passes them tokens and addresses, and gets numbers and names back: nothing that a client has sent is ever pickled.
"""

from __future__ import annotations

import asyncio
import os
import platform
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import bankfull
from bankfull.handshake.link_tls import LinkTls
from bankfull.parallel.hosting import RankHost
from bankfull.parallel.reaching import RankHosts
from bankfull.serve.engine.gateway import Gateway

START_SECONDS = 30.0


class EngineReplica:
    """One replica, or rank 0 of it. Its engine process exists as long as a server is connected to its gateway."""

    def __init__(self, token: str, host: str, rank_token: str = "", tls: str = "") -> None:
        """`host`: the address to listen on; the address of this machine in the cluster if it is empty. `rank_token`: of
        the hosts of the other ranks, if there are any. `tls`: the folder of its files for TLS; empty: without."""
        self._rank_token = bytes.fromhex(rank_token)
        self._variables = _environment()
        self._tell_ranks(())
        self._gateway = Gateway(bytes.fromhex(token), self._variables, self._rank_token, LinkTls.of(tls))
        self._place = ActorPlace(self._gateway.start, host)

    def status(self, ranks: tuple[tuple[str, int], ...] = ()) -> dict[str, Any]:
        """`ranks`: where the hosts of the other ranks listen, for the engines that start from now on."""
        self._tell_ranks(ranks)
        return {**self._place.status(), "engine": self._gateway.engine_pid}

    def _tell_ranks(self, ranks: tuple[tuple[str, int], ...]) -> None:
        if self._rank_token:
            self._variables.update(RankHosts(tuple(ranks), self._rank_token).variables())


class HostedRank:
    """A rank of a replica but the first. Its process exists as long as the engine of the replica does."""

    def __init__(self, rank_token: str, host: str, threads: int) -> None:
        """`host`: as for `EngineReplica`."""
        self._host = RankHost(bytes.fromhex(rank_token), {**_environment(), "BANKFULL_THREADS": str(threads)})
        self._place = ActorPlace(self._host.start, host)

    def status(self) -> dict[str, Any]:
        return self._place.status()


class ActorPlace:
    """Where an actor is: its machine, and the address at which it listens on a thread of its own."""

    def __init__(self, start: Callable[[str], Awaitable[tuple[str, int]]], host: str) -> None:
        """`start` listens on a host, on the event loop of the thread."""
        from bankfull.cluster.ray_version import import_ray

        ray = import_ray()
        self._node_id = str(ray.get_runtime_context().get_node_id())
        listening: Future[tuple[str, int]] = Future()
        arguments = (start, host or ray.util.get_node_ip_address(), listening)
        threading.Thread(target=self._run, args=arguments, name="bankfull-listener", daemon=True).start()
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
        }

    @staticmethod
    def _run(start: Callable[[str], Awaitable[tuple[str, int]]], host: str, listening: Future[tuple[str, int]]) -> None:
        async def serve() -> None:
            try:
                address = await start(host)
            except OSError as error:
                listening.set_exception(error)
                return
            listening.set_result(address)
            await asyncio.Event().wait()

        # Not Ray's own event loop: heartbeats must not wait for it.
        try:
            asyncio.run(serve())
        except BaseException:
            os._exit(1)  # Ray starts the actor again


def _environment() -> dict[str, str]:
    """Environment of the processes that compute: without Ray's own variables, its token above all."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
