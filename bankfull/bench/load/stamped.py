"""A socket that knows when its bytes came, not only when somebody got round to reading them.

A reader's own clock is late by whatever kept the reader: other work, or a machine that ran others meanwhile. Linux
stamps packets as they arrive and hands the stamp out with the bytes: that of the last packet that it reads from. It may
also join packets that lie unread and were acknowledged, and keeps the last stamp of those, too.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from time import CLOCK_REALTIME, clock_gettime_ns, monotonic_ns

SO_TIMESTAMPNS = 35
"""Linux's; Python has no name for it."""
STAMP = struct.Struct("@ll")
SLACK = 10_000
"""Nanoseconds: a clock that was set by less is as good as one that was not."""
FRESH = 200_000
"""Nanoseconds: bytes that came so shortly before they are read are all read at once."""


class KernelClock:
    """From the kernel's stamps to the monotonic clock, which event loops go by.

    Stamps are of the clock on the wall, which somebody may set. It is ahead of the monotonic one by a number that
    nothing else changes: while that holds it translates exactly, and stamps of before a change are not believed.
    """

    def __init__(self) -> None:
        self._ahead = self._measure()
        self._since = monotonic_ns()

    def moment(self, stamp: int) -> float | None:
        """Seconds; None where the stamp cannot be believed."""
        before, wall, now = monotonic_ns(), clock_gettime_ns(CLOCK_REALTIME), monotonic_ns()
        if not wall - now - SLACK <= self._ahead <= wall - before + SLACK:
            ahead = self._measure()
            # If the wall's clock was set back, what came before seems to come later, by as much.
            self._since, self._ahead = now + max(0, self._ahead - ahead), ahead
        found = stamp - self._ahead
        return found / 1e9 if self._since <= found <= now else None

    @staticmethod
    def _measure() -> int:
        """By the quickest of some looks at both clocks: in others somebody may have interrupted."""
        looks = [(monotonic_ns(), clock_gettime_ns(CLOCK_REALTIME), monotonic_ns()) for _ in range(10)]
        before, wall, after = min(looks, key=lambda look: look[2] - look[0])
        return wall - (before + after) // 2


class StampedSocket(socket.socket):
    """asyncio's transports read with `recv`, which leaves what came later for the next call. `came` is then when the
    last byte of what they got had arrived, by the monotonic clock. None: the kernel did not say, and nobody knows
    better than the reader."""

    def __init__(self, family: socket.AddressFamily, clock: KernelClock) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._clock = clock
        self.came: float | None = None
        with suppress(OSError):  # a system that has no stamps
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
        """How many bytes from here on came at that moment."""
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
    made = StampedSocket(socket.AF_INET6 if ":" in ip else socket.AF_INET, clock)
    made.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(made, (ip, port))
    except BaseException:
        made.close()
        raise
    return made
