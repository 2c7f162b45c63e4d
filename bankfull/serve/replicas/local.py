"""Several engine processes on this machine behind one API, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from typing import Protocol

from bankfull.config import parse_bytes
from bankfull.errors import ConfigError
from bankfull.fleet.routing import DEFAULT_POLICY, routing_policy
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.process import EngineFactory, EngineProcess
from bankfull.serve.engine.wire import ExchangeEnds
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.state.exchange import open_exchange

SECRET_BYTES = 32
MOST_LOCAL = 64
"""Engine processes that one machine may run."""
LINKS = ("memory", "socket")
"""How engines hand over state: through memory that they share, or over TCP."""
EXCHANGE = "1GiB"
"""Size of each decoding engine's exchange, unless another one is given."""


class MakeLink(Protocol):
    """Makes a link, not started yet, with the server's options and limits, and its model if no other is given."""

    def __call__(
        self,
        open_engine: EngineFactory = EngineProcess,
        threads: int | None = None,
        *,
        model: str = ...,
        exchange: ExchangeEnds | None = None,
    ) -> Link: ...


SetFactory = Callable[[MakeLink], ReplicaSet]
"""Makes the replicas of a server; called once, before its event loop runs."""


def threads_of(count: int) -> int:
    """Threads of each of `count` engines that share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // count)


@dataclass(frozen=True, slots=True)
class Separation:
    """Engines that compute prompts, engines that decode, and the bytes of each one's exchange."""

    prefill: int
    decode: int
    exchange: int
    link: str = ""
    """How state gets to an exchange: one of LINKS; empty: as it is best where the engines run."""

    @classmethod
    def parse(cls, text: str) -> Separation:
        """The separation that `prefill=1,decode=2[,exchange=1GiB][,link=memory]` names."""
        given: dict[str, str] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or name not in ("prefill", "decode", "exchange", "link"):
                raise ConfigError(
                    f"--separate has no {part.strip()!r}: give prefill=1,decode=2, and exchange=1GiB or link=socket if "
                    "you like."
                )
            if name in given:
                raise ConfigError(f"--separate names {name} twice; give it once.")
            given[name] = value
        prefill, decode = (cls._count(text, name, given.get(name)) for name in ("prefill", "decode"))
        if prefill + decode > MOST_LOCAL:
            raise ConfigError(f"--separate {text!r} asks for {prefill + decode} engines; give at most {MOST_LOCAL}.")
        size = parse_bytes("exchange", given.get("exchange", EXCHANGE))
        assert size is not None, "there is a default"
        link = given.get("link", "")
        if "link" in given and link not in LINKS:
            raise ConfigError(f"--separate link={link} is unknown; give memory or socket.")
        return cls(prefill, decode, size, link)

    @staticmethod
    def _count(text: str, name: str, value: str | None) -> int:
        if value is None:
            raise ConfigError(
                f"--separate {text!r} has no engine for {name}: it needs at least one of each kind, as in "
                "prefill=1,decode=2; one engine alone needs no --separate."
            )
        if not value.isdecimal() or not int(value):
            raise ConfigError(f"--separate {name}={value} is no number of engines; give 1 or more.")
        return int(value)


def local_separate(wanted: Separation, routing: str = DEFAULT_POLICY, tls: str = "") -> SetFactory:
    """Engine processes on this machine, which share its cores evenly. Each has its own KV cache, and each decoding one
    an exchange, which all that compute prompts inherit, or fill over sockets. `tls`: for these
    (`handshake.link_tls`)."""
    policy = routing_policy(routing)

    def make(make_link: MakeLink) -> ReplicaSet:
        files = [] if wanted.link == "socket" else [open_exchange() for _ in range(wanted.decode)]
        secret = token_bytes(SECRET_BYTES)
        threads = threads_of(wanted.prefill + wanted.decode)

        def link(own: int | None) -> Link:
            ends = ExchangeEnds(files, wanted.exchange, own, wanted.decode, secret, tls)
            inherited = files if own is None else files[own : own + 1]
            return make_link(open_engine=partial(EngineProcess, files=inherited), threads=threads, exchange=ends)

        prefill = {f"prefill-{i}": link(None) for i in range(wanted.prefill)}
        decode = {f"decode-{i}": link(i) for i in range(wanted.decode)}
        return SeparateSet(prefill, decode, policy, exchanges=files)

    return make
