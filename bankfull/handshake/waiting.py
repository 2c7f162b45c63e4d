"""Which connections may wait in their handshake. A new one always enters; the oldest one of the address that holds most
leaves for it.

An honest caller needs a place only until its first packet is read, so whoever fills the room with silent connections
pushes out their own. Callers with an early HMAC have places of their own, which silent ones never take.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv6Address
from typing import Generic, Protocol, TypeVar

MOST_SILENT = 128
"""Connections without an early HMAC."""
MOST_OF_ADDRESS = MOST_SILENT // 4
"""Connections without an early HMAC from one address, so that no address fills the room."""
MOST_CLAIMING = 32
"""Connections with an early HMAC and without a proof."""
MOST_NONCES = 4096
"""Early HMACs that are remembered: a recorded one counts once."""


class Waiting(Protocol):
    """A connection in its handshake."""

    @property
    def address(self) -> str: ...


Who = TypeVar("Who", bound=Waiting)


class WaitingRoom(Generic[Who]):
    def __init__(self) -> None:
        self._silent: dict[Who, None] = {}
        """The oldest first, as in all of these."""
        self._by_address: dict[str, dict[Who, None]] = {}
        self._claiming: dict[Who, None] = {}
        self._nonces: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._claiming)

    def __iter__(self) -> Iterator[Who]:
        yield from (*self._silent, *self._claiming)

    def enter(self, who: Who) -> Who | None:
        """Who must leave for it, if anybody must."""
        at_address, gone = self._by_address.get(who.address, {}), None
        if len(at_address) >= MOST_OF_ADDRESS:
            gone = next(iter(at_address))
        elif len(self._silent) >= MOST_SILENT:
            most = max(map(len, self._by_address.values()))
            gone = next(one for one in self._silent if len(self._by_address[one.address]) == most)
        if gone is not None:
            self.leave(gone)
        self._by_address.setdefault(who.address, {})[who] = None
        self._silent[who] = None
        return gone

    def claim(self, who: Who, nonce: bytes) -> Who | None:
        """It has sent an early HMAC over this nonce. Who must leave: itself, if another one has sent the same."""
        self.leave(who)
        if nonce in self._nonces:
            return who
        self._nonces[nonce] = None
        if len(self._nonces) > MOST_NONCES:
            del self._nonces[next(iter(self._nonces))]
        gone = None
        if len(self._claiming) >= MOST_CLAIMING:
            self.leave(gone := next(iter(self._claiming)))
        self._claiming[who] = None
        return gone

    def leave(self, who: Who) -> None:
        self._claiming.pop(who, None)
        if who in self._silent:
            del self._silent[who]
            at_address = self._by_address[who.address]
            del at_address[who]
            if not at_address:
                del self._by_address[who.address]

    def oldest(self) -> Who | None:
        """The silent one that has waited longest."""
        return next(iter(self._silent), None)


def peer_of(host: str) -> str:
    """What counts as one address: a network of IPv6 belongs to one peer."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or int(address) >> 64)
