"""Rank 0's way to ranks on other machines: where their hosts listen, and connections to them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bankfull.errors import ConfigError, RankLost
from bankfull.handshake.calling import reach
from bankfull.handshake.inherited import inherited
from bankfull.handshake.proof import RANK, SUBJECT, HandshakeRefused, derived

HOSTS = "BANKFULL_RANK_HOSTS"
"""Variable of an engine process whose other ranks have hosts (`hosting.RankHost`): their addresses in the order of the
ranks, separated by commas. The process inherits their token (`handshake.inherited`)."""


@dataclass(frozen=True, slots=True)
class RankHosts:
    """Where the other ranks of a replica run, from rank 1 on."""

    addresses: tuple[tuple[str, int], ...]
    token: bytes

    def variables(self) -> dict[str, str]:
        told = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)
        return {HOSTS: ",".join(told)}

    @staticmethod
    def of_environment() -> RankHosts | None:
        """The hosts that the starter of this process names; None: the ranks are processes of this machine."""
        told, token = os.environ.get(HOSTS), inherited().ranks
        if told is None or not token:
            return None
        parts = [address.rpartition(":") for address in told.split(",") if address]
        return RankHosts(tuple((host.strip("[]"), int(port)) for host, _, port in parts), token)

    def connect(self, ranks: int) -> list[socket.socket]:
        """A connection to each of so many ranks, whose processes are starting."""
        if not self.addresses:
            raise RankLost("the other ranks of this replica have no place yet.")
        if len(self.addresses) != ranks:
            raise ConfigError(f"{ranks} other ranks need a place, and {len(self.addresses)} have one; start them anew.")
        with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop of its own
            outcomes = pool.submit(lambda: asyncio.run(_connect_all(self.addresses, self.token))).result()
        problem = next((one for one in outcomes if isinstance(one, Exception)), None)
        if problem is None:
            return [one for one in outcomes if isinstance(one, socket.socket)]
        for one in outcomes:
            if isinstance(one, socket.socket):
                one.close()
        raise problem


def meeting_key(token: bytes) -> bytes:
    """The meeting key of a replica's ranks, from the token of their hosts."""
    return derived(token, b"meeting of ranks")


async def _connect_all(
    addresses: Sequence[tuple[str, int]], token: bytes
) -> Sequence[socket.socket | RankLost | ConfigError]:
    return await asyncio.gather(*(_connect(rank, address, token) for rank, address in enumerate(addresses, 1)))


async def _connect(rank: int, address: tuple[str, int], token: bytes) -> socket.socket | RankLost | ConfigError:
    where = f"{address[0]}:{address[1]}"
    try:
        connection, _ = await reach(address, token, RANK, bytes(SUBJECT))
    except HandshakeRefused as error:
        return ConfigError(f"Rank {rank} at {where}: {error}")
    except OSError as error:
        why = "no answer in time" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
        return RankLost(f"rank {rank} cannot be reached at {where} ({why}).")
    connection.setblocking(True)
    return connection
