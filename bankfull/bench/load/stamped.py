"""A socket with kernel receive timestamps, which hold even if the reader is late.

A reader's own clock is late by any stall of the reader. Linux timestamps packets on arrival and returns with the bytes
the timestamp of the last packet read from. It may merge unread, acknowledged packets, and then also keeps the last
timestamp.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from time import CLOCK_REALTIME, clock_gettime_ns, monotonic_ns

SO_TIMESTAMPNS = 35
"""Linux socket option; Python has no constant for it."""
STAMP = struct.Struct("@ll")
SLACK = 10_000
"""Nanoseconds; smaller adjustments of the wall clock are ignored."""
FRESH = 200_000
"""Nanoseconds; bytes that arrived less than this before reading are read in one call."""


class KernelClock:
    """Converts kernel timestamps to the monotonic clock of event loops.

    Timestamps use the wall clock, which can be set. Its offset to the monotonic clock changes only then. While the
    offset is unchanged, conversion is exact; timestamps from before a change are rejected.
    """

    def __init__(self) -> None:
        self._ahead = self._measure()
        self._since = monotonic_ns()

    def moment(self, stamp: int) -> float | None:
        """Seconds; None for a timestamp that cannot be converted."""
        before, wall, now = monotonic_ns(), clock_gettime_ns(CLOCK_REALTIME), monotonic_ns()
        if not wall - now - SLACK <= self._ahead <= wall - before + SLACK:
            ahead = self._measure()
            # If the wall clock was set back, earlier timestamps appear later by the same amount.
            self._since, self._ahead = now + max(0, self._ahead - ahead), ahead
        moment = stamp - self._ahead
        return moment / 1e9 if self._since <= moment <= now else None

    @staticmethod
    def _measure() -> int:
        """The offset from the fastest of several readings of both clocks; slower ones may have been interrupted."""
        looks = [(monotonic_ns(), clock_gettime_ns(CLOCK_REALTIME), monotonic_ns()) for _ in range(10)]
        before, wall, after = min(looks, key=lambda look: look[2] - look[0])
        return wall - (before + after) // 2


class StampedSocket(socket.socket):
    """`came` is the arrival time of the last byte returned by `recv`, in the monotonic clock. None: no kernel
    timestamp is available. asyncio transports call `recv`, which leaves later bytes for the next call."""

    def __init__(self, family: socket.AddressFamily, clock: KernelClock) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._clock = clock
        self.came: float | None = None
        with suppress(OSError):  # no support for timestamps
            self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def recv(self, size: int, flags: int = 0) -> bytes:
        _, first = self._read(1, flags | socket.MSG_PEEK)
        if first is None or clock_gettime_ns(CLOCK_REALTIME) - first < FRESH:
            data, stamp = self._read(size, flags)
        else:
            data, stamp = self._read(self._count(first, size), flags)[0], first
        self.came = None if stamp is None else self._clock.moment(stamp)
        return data

    def _count(self, stamp: int, size: int) -> int:
        """Number of bytes from here on with that timestamp."""
        data, last = self._read(size, socket.MSG_PEEK)
        some, more = 1, len(data)
        if last == stamp:
            return more
        while more - some > 1:
            middle = (some + more) // 2
            some, more = (middle, more) if self._read(middle, socket.MSG_PEEK)[1] == stamp else (some, middle)
        return some

    def _read(self, size: int, flags: int) -> tuple[bytes, int | None]:
        data, notes, _, _ = self.recvmsg(size, socket.CMSG_SPACE(STAMP.size), flags)
        for level, kind, note in notes:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(note) == STAMP.size:
                seconds, rest = STAMP.unpack(note)
                return data, int(seconds) * 1_000_000_000 + int(rest)
        return data, None


async def connect(ip: str, port: int, clock: KernelClock) -> StampedSocket:
    connection = StampedSocket(socket.AF_INET6 if ":" in ip else socket.AF_INET, clock)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (ip, port))
    except BaseException:
        connection.close()
        raise
    return connection
