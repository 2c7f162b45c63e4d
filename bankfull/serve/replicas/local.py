"""Several engine processes on this machine behind one API, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from bankfull.errors import ConfigError
from bankfull.fleet.routing import DEFAULT_POLICY, routing_policy
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.process import EngineFactory, EngineProcess
from bankfull.serve.replicas.replica_set import ReplicaSet

MOST_LOCAL = 64
"""Engine processes that one machine may run."""


class MakeLink(Protocol):
    """Makes a link, not started yet, with the server's options and limits, and its model if no other is given."""

    def __call__(
        self, open_engine: EngineFactory = EngineProcess, threads: int | None = None, *, model: str = ...
    ) -> Link: ...


SetFactory = Callable[[MakeLink], ReplicaSet]
"""Makes the replicas of a server; called once, before its event loop runs."""


def local_replicas(count: int, routing: str = DEFAULT_POLICY) -> SetFactory:
    """`count` engine processes on this machine. They share its cores evenly, unless the option `threads` is set; each
    has its own KV cache, so the option `memory` must fit `count` times."""
    if not 1 <= count <= MOST_LOCAL:
        raise ConfigError(f"{count} replicas cannot run on this machine: give 1 to {MOST_LOCAL}.")
    policy = routing_policy(routing)

    def make(make_link: MakeLink) -> ReplicaSet:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, cores // count)
        return ReplicaSet({f"local-{i}": make_link(threads=threads) for i in range(count)}, policy)

    return make
