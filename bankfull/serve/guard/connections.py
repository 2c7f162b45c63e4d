"""Open connections: how many there may be, which are closed to admit others, and which do not read their responses.

A connection is *idle* while the server does nothing for it: it has sent no request yet, only part of a request head, or
it is kept alive between requests. When the table is full, a new connection replaces the one that has been idle longest,
so any number of silent connections keeps no client out. When no connection is idle, a few more are admitted to a
reserve, for health probes and admins.
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
CHECKS_PER_TIMEOUT = 8
"""How often a client is checked within `read_seconds`."""


class Slot(Enum):
    REGULAR = "regular"
    RESERVED = "reserved"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    connections: int = MAX_CONNECTIONS
    per_address: int | None = None
    """Connections per client address; 0 sets no limit of its own, None a quarter of `connections`."""
    reserved: int = RESERVED_CONNECTIONS
    """Connections beyond either limit, for probes and admins."""
    read_seconds: float = 30.0
    read_bytes: int = 64 << 10
    """Bytes that a client with unread data must read within `read_seconds`."""
    unread_bytes: int = 256 << 20
    """Bytes of unread responses that the server holds for all clients together."""

    def __post_init__(self) -> None:
        if self.connections < 1:
            raise ConfigError(f"--max-connections {self.connections} is too low; it must be at least 1.")
        if self.per_address is not None and self.per_address < 0:
            raise ConfigError(
                f"--connections-per-address {self.per_address} is too low; it must be at least 0, which sets no limit."
            )

    @property
    def address_limit(self) -> int:
        if self.per_address is None:
            return max(1, self.connections // 4)
        return self.per_address or self.connections


class TrackedConnection:
    """A connection as the connection table sees it."""

    address = ""
    slot = Slot.NONE
    transport: asyncio.Transport
    written = 0
    """Bytes written to the transport so far."""
    held = 0
    """Bytes of a response that wait for room in the transport's buffer."""
    read_before = 0
    """Bytes the client had read when it last read enough."""
    unread_since: float | None = None
    """Time of that moment; None if the client has read everything."""
    written_before: int = 0
    """Bytes written at the last check."""

    @property
    def unwritten(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        return self.transport.get_write_buffer_size()

    @property
    def unread(self) -> int:
        """Bytes that the client has not acknowledged, in the transport and in the kernel. The kernel accepts more only
        when much of its buffer is free, so `unwritten` alone stays constant for long while a client reads slowly."""
        return self.unwritten + unacknowledged_bytes(self.transport.get_extra_info("socket"))

    def close_idle(self) -> None:
        """Close an idle connection to admit another."""
        if self.unwritten:
            self.abort()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close at once and drop unread data."""
        self.transport.abort()


@dataclass(slots=True)
class Address:
    count: int = 0
    idle: OrderedDict[TrackedConnection, None] = field(default_factory=OrderedDict)


class ConnectionTable:
    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._addresses: dict[str, Address] = {}
        self._idle: OrderedDict[TrackedConnection, None] = OrderedDict()
        self._sending: set[TrackedConnection] = set()
        self._connections: set[TrackedConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.leaving = False
        """Whether another server has taken over: each connection ends with the response to its next request."""
        self.reserved = 0
        self.held = 0
        """Bytes of large responses that clients have not read yet."""

    @property
    def count(self) -> int:
        return len(self._connections)

    # -- opening and closing

    def add(self, connection: TrackedConnection) -> Slot:
        """Add a new connection, which is idle at first, and return its slot."""
        address = self._addresses.get(connection.address)
        if address is None:
            address = self._addresses[connection.address] = Address()
        slot, evictable = Slot.REGULAR, self._evictable(address)
        if evictable:
            oldest = next(iter(evictable))
            slot = oldest.slot
            self._evict(oldest)
        elif evictable is not None:
            if self.reserved >= self._limits.reserved:
                return Slot.NONE
            slot = Slot.RESERVED
        connection.slot = slot
        self.reserved += slot is Slot.RESERVED
        self._connections.add(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(
                self._limits.read_seconds / CHECKS_PER_TIMEOUT, self._check_readers
            )
        # the evicted connection may have been the last one of this address
        address = self._addresses.setdefault(connection.address, address)
        address.count += 1
        self.mark_idle(connection)
        return connection.slot

    def _evictable(self, address: Address) -> OrderedDict[TrackedConnection, None] | None:
        """The idle connections of which one must be closed to admit another; None if there is room."""
        if address.count >= self._limits.address_limit:
            return address.idle
        return self._idle if self.count >= self._limits.connections else None

    def remove(self, connection: TrackedConnection) -> None:
        """Remove a closed connection; a second call does nothing."""
        self._release(connection)
        if connection.slot is Slot.NONE:
            return
        self.mark_busy(connection)
        self.reserved -= connection.slot is Slot.RESERVED
        connection.slot = Slot.NONE
        self._connections.discard(connection)
        address = self._addresses[connection.address]
        address.count -= 1
        if not address.count:
            del self._addresses[connection.address]

    def needs_reserve(self, connection: TrackedConnection) -> bool:
        """Whether the connection may be used only for probes and admin calls. It moves to a regular slot if one is
        free."""
        if connection.slot is Slot.RESERVED:
            others = self._addresses[connection.address].count - 1
            if self.count <= self._limits.connections and others < self._limits.address_limit:
                connection.slot = Slot.REGULAR
                self.reserved -= 1
        return connection.slot is Slot.RESERVED

    def mark_idle(self, connection: TrackedConnection) -> None:
        """Mark a connection as waiting for data from its client."""
        if connection.slot is not Slot.NONE:
            self._idle[connection] = None
            self._addresses[connection.address].idle[connection] = None

    def mark_busy(self, connection: TrackedConnection) -> None:
        """Mark a connection as no longer idle."""
        if self._idle.pop(connection, self) is None:
            del self._addresses[connection.address].idle[connection]

    def _evict(self, connection: TrackedConnection) -> None:
        self.remove(connection)
        connection.close_idle()

    # -- clients that do not read

    @contextmanager
    def holding(self, connection: TrackedConnection, size: int) -> Iterator[None]:
        """Account for a response that exceeds the transport's buffer while it is sent; `sent` reports progress. If the
        total exceeds `unread_bytes`, the slowest other clients are disconnected."""
        connection.held = size
        self.held += size
        self._sending.add(connection)
        try:
            while self.held > self._limits.unread_bytes and len(self._sending) > 1:
                others = [one for one in self._sending if one is not connection]
                slowest = min(others, key=lambda one: (one.unread_since or math.inf, -one.held))
                self._abort(slowest, "the server holds too many unread bytes")
            yield
        finally:
            self._release(connection)

    def sent(self, connection: TrackedConnection, size: int) -> None:
        if connection.held:  # otherwise it was aborted in the meantime
            connection.held -= size
            self.held -= size

    def _release(self, connection: TrackedConnection) -> None:
        self._sending.discard(connection)
        self.held -= connection.held
        connection.held = 0

    def _check_readers(self) -> None:
        loop = asyncio.get_running_loop()
        now, limits = loop.time(), self._limits
        for connection in list(self._connections):
            unwritten = connection.unwritten
            if not unwritten:
                connection.unread_since = None
                continue
            read = connection.written - connection.unread
            # Data written since the last check may still be in the buffer of a client that reads.
            enough = read - connection.read_before >= limits.read_bytes or read >= connection.written_before
            connection.written_before = connection.written
            if connection.unread_since is None or enough:
                connection.read_before, connection.unread_since = read, now
            elif now - connection.unread_since >= limits.read_seconds:
                self._abort(
                    connection, f"the client has not read {limits.read_bytes} bytes in {limits.read_seconds:g} s"
                )
        self._timer = (
            loop.call_later(limits.read_seconds / CHECKS_PER_TIMEOUT, self._check_readers)
            if self._connections
            else None
        )

    def _abort(self, connection: TrackedConnection, why: str) -> None:
        log.warning("closing a connection from %s: %s", connection.address, why)
        self.remove(connection)
        connection.abort()


def unacknowledged_bytes(connection: Any) -> int:
    """Bytes written to a socket that the peer has not acknowledged."""
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, AttributeError):  # closed, or not a socket
        return 0


def address_of(client: tuple[str, int] | None) -> str:
    """The address whose connections are counted together. For IPv6 it is the /64 network, because one host may use all
    addresses of it."""
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
