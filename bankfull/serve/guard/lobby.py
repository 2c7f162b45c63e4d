"""Everybody who is connected: how many there may be, who makes room for whom, and what they have not read yet.

A connection *waits* while nothing of ours is under way on it: it has sent no request yet, or not all of a request's
head, or it is kept open for the next one. Where there is no room for a newcomer, the one that has waited longest makes
it; so silent connections, however many, keep nobody out. Where nobody waits, a few more are let in on reserve, for
those who look after the server.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import math
import sys
import termios
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bankfull.errors import ConfigError

log = logging.getLogger("bankfull.serve")

MAX_CONNECTIONS = 8192
RESERVED_CONNECTIONS = 64
BEATS = 8
"""In the time that a client has for reading: how often it is looked at."""


class Place(Enum):
    ROOM = "room"
    RESERVE = "reserve"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LobbyLimits:
    connections: int = MAX_CONNECTIONS
    per_address: int | None = None
    """Connections from one address; 0: as many as there may be at all; None: a quarter of these."""
    reserved: int = RESERVED_CONNECTIONS
    """Beyond `connections`, or beyond an address's own, for probes and admins."""
    read_seconds: float = 30.0
    read_bytes: int = 64 << 10
    """Whoever has not read all that was sent must read so much of it in so many seconds."""
    unread_bytes: int = 256 << 20
    """That the server holds for all clients together."""

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ConfigError(f"{self.connections} connections are too few; give 1 or more.")
        if self.per_address is not None and self.per_address < 0:
            raise ConfigError(f"{self.per_address} connections of an address are too few; give 0 for no limit.")

    @property
    def of_one_address(self) -> int:
        if self.per_address is None:
            return max(1, self.connections // 4)
        return self.per_address or self.connections


class Guest:
    """A connection, as the lobby knows it."""

    address = ""
    place = Place.NONE
    transport: asyncio.Transport
    written = 0
    """Bytes that were written to its transport so far."""
    held = 0
    """Bytes of an answer that wait until the transport has room for them."""
    read_before = 0
    """What it had read when it last had read enough."""
    unread_since: float | None = None
    """When that was; None where it has read all."""
    written_before: int = 0
    """At the last look."""

    @property
    def unwritten(self) -> int:
        """Bytes that the system has not taken yet."""
        return self.transport.get_write_buffer_size()

    @property
    def unread(self) -> int:
        """Those, and what the system has taken, and its client has not. The system takes more only when much of that
        is gone, so that `unwritten` alone would not move for a long time while somebody reads slowly."""
        return self.unwritten + taken_by_the_system(self.transport.get_extra_info("socket"))

    def show_out(self) -> None:
        """It waits, and its place is needed."""
        if self.unwritten:
            self.cut()
        else:
            self.transport.close()

    def cut(self) -> None:
        """At once, whatever it has not read."""
        self.transport.abort()


@dataclass(slots=True)
class Address:
    count: int = 0
    waiting: OrderedDict[Guest, None] = field(default_factory=OrderedDict)


class Lobby:
    def __init__(self, limits: LobbyLimits | None = None) -> None:
        self._limits = limits or LobbyLimits()
        self._addresses: dict[str, Address] = {}
        self._waiting: OrderedDict[Guest, None] = OrderedDict()
        self._sending: set[Guest] = set()
        self._guests: set[Guest] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.on_reserve = 0
        self.held = 0
        """Bytes of large answers that clients have not read yet."""

    @property
    def count(self) -> int:
        return len(self._guests)

    # -- coming and going

    def enter(self, guest: Guest) -> Place:
        """A newcomer waits from its first moment."""
        address = self._addresses.get(guest.address)
        if address is None:
            address = self._addresses[guest.address] = Address()
        place, crowd = Place.ROOM, self._crowd(address)
        if crowd:
            oldest = next(iter(crowd))
            place = oldest.place
            self._show_out(oldest)
        elif crowd is not None:
            if self.on_reserve >= self._limits.reserved:
                return Place.NONE
            place = Place.RESERVE
        guest.place = place
        self.on_reserve += place is Place.RESERVE
        self._guests.add(guest)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limits.read_seconds / BEATS, self._beat)
        address = self._addresses.setdefault(guest.address, address)  # whoever was shown out may have been its only one
        address.count += 1
        self.wait(guest)
        return guest.place

    def _crowd(self, address: Address) -> OrderedDict[Guest, None] | None:
        """Of whom one must go before another can come: those who wait; None where there is room."""
        if address.count >= self._limits.of_one_address:
            return address.waiting
        return self._waiting if self.count >= self._limits.connections else None

    def leave(self, guest: Guest) -> None:
        """Whatever the reason; a second time does nothing."""
        self._let_go(guest)
        if guest.place is Place.NONE:
            return
        self.busy(guest)
        self.on_reserve -= guest.place is Place.RESERVE
        guest.place = Place.NONE
        self._guests.discard(guest)
        address = self._addresses[guest.address]
        address.count -= 1
        if not address.count:
            del self._addresses[guest.address]

    def on_reserve_still(self, guest: Guest) -> bool:
        """Whether it may only do what the reserve is for. It moves up where there is room by now."""
        if guest.place is Place.RESERVE:
            others = self._addresses[guest.address].count - 1
            if self.count <= self._limits.connections and others < self._limits.of_one_address:
                guest.place = Place.ROOM
                self.on_reserve -= 1
        return guest.place is Place.RESERVE

    def wait(self, guest: Guest) -> None:
        """It has to send something next."""
        if guest.place is not Place.NONE:
            self._waiting[guest] = None
            self._addresses[guest.address].waiting[guest] = None

    def busy(self, guest: Guest) -> None:
        """It waits no more."""
        if self._waiting.pop(guest, self) is None:
            del self._addresses[guest.address].waiting[guest]

    def _show_out(self, guest: Guest) -> None:
        self.leave(guest)
        guest.show_out()

    # -- what they do not read

    @contextmanager
    def holding(self, guest: Guest, size: int) -> Iterator[None]:
        """Around the sending of an answer that is too large for a transport's buffer. `sent` tells how it goes."""
        guest.held = size
        self.held += size
        self._sending.add(guest)
        try:
            while self.held > self._limits.unread_bytes and len(self._sending) > 1:
                others = [one for one in self._sending if one is not guest]
                slowest = min(others, key=lambda one: (one.unread_since or math.inf, -one.held))
                self._cut(slowest, "the server holds too much that clients have not read")
            yield
        finally:
            self._let_go(guest)

    def sent(self, guest: Guest, size: int) -> None:
        if guest.held:  # else it was cut meanwhile
            guest.held -= size
            self.held -= size

    def _let_go(self, guest: Guest) -> None:
        self._sending.discard(guest)
        self.held -= guest.held
        guest.held = 0

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        now, limits = loop.time(), self._limits
        for guest in list(self._guests):
            unwritten = guest.unwritten
            if not unwritten:
                guest.unread_since = None
                continue
            read = guest.written - guest.unread
            # What was written a moment ago is still in the buffer of whoever reads.
            enough = read - guest.read_before >= limits.read_bytes or read >= guest.written_before
            guest.written_before = guest.written
            if guest.unread_since is None or enough:
                guest.read_before, guest.unread_since = read, now
            elif now - guest.unread_since >= limits.read_seconds:
                self._cut(guest, f"it has not read {limits.read_bytes} bytes in {limits.read_seconds:g} s")
        self._timer = loop.call_later(limits.read_seconds / BEATS, self._beat) if self._guests else None

    def _cut(self, guest: Guest, why: str) -> None:
        log.warning("a connection from %s is cut: %s", guest.address, why)
        self.leave(guest)
        guest.cut()


def taken_by_the_system(connection: Any) -> int:
    """Bytes that were written to a socket, and that the other side has not acknowledged."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, AttributeError):  # it is closed, or no socket
        return 0


def address_of(client: tuple[str, int] | None) -> str:
    """Whose connections are counted together: one of IPv6 has 2**64 addresses to itself."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        if not address.is_loopback:
            return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
