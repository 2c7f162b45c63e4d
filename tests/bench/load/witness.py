"""Kernel timestamps of a server's received and sent bytes: the reference for a client's figures.

The server's own times are not accurate enough: it reads its clock before it writes and when it reads, and may be
interrupted in between. A request arrives when its bytes are there, whether or not the server has read them: the time
until it does is part of its response time. A token is written when its bytes leave.

The kernel timestamps both. Nothing is shared with the client: this uses another kernel option, sent bytes are
timestamped on another path than received ones, and times stay in the wall clock.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from time import time_ns
from typing import Any

SO_TIMESTAMPING, SO_EE_ORIGIN_TIMESTAMPING = 37, 4
TX_SOFTWARE, RX_SOFTWARE, SOFTWARE, OPT_ID, OPT_TSONLY = (1 << bit for bit in (1, 3, 4, 7, 11))
TIMES, ERROR = struct.Struct("@6l"), struct.Struct("@IBBBBII")
SPACE = 512


class WitnessSocket(socket.socket):
    """An accepted connection."""

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(fileno=accepted.detach())
        self.setblocking(False)
        with suppress(OSError):  # no support for timestamps
            wanted = TX_SOFTWARE | RX_SOFTWARE | SOFTWARE | OPT_ID | OPT_TSONLY
            self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, wanted)
        self.came: int | None = None
        """Arrival time of the bytes read last."""
        self.sent = 0
        self.left: dict[int, int] = {}
        """n -> when the first n bytes had left."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._hear()  # the timestamp of a write wakes the loop like received bytes
        data, notes, _, _ = self.recvmsg(size, SPACE, flags)
        self.came = _stamp(notes)
        return data

    def send(self, data: Any, flags: int = 0) -> int:
        count = super().send(data, flags)
        self.sent += count
        self._hear()
        return count

    def _hear(self) -> None:
        while True:
            try:
                _, notes, _, _ = self.recvmsg(0, SPACE, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            stamp = _stamp(notes)
            for level, _, data in notes:
                if level in (socket.IPPROTO_IP, socket.IPPROTO_IPV6):
                    _, origin, _, _, _, _, last = ERROR.unpack_from(data)
                    if origin == SO_EE_ORIGIN_TIMESTAMPING and stamp is not None:
                        self.left.setdefault(last + 1, stamp)  # a retransmitted packet is timestamped again


def _stamp(notes: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in notes:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPING:
            seconds, rest, *_ = TIMES.unpack(data)
            return int(seconds) * 1_000_000_000 + int(rest)
    return None


class Account:
    """Times of one response, in nanoseconds of the wall clock."""

    def __init__(self, witness: WitnessSocket) -> None:
        self._witness, self._text = witness, ""
        self._came = time_ns() if witness.came is None else witness.came
        self._writes: list[tuple[int, int, int]] = []

    def wrote(self, text: str, before: int) -> None:
        self._text += text
        self._writes.append((before, time_ns(), self._witness.sent))

    def as_json(self) -> dict[str, Any]:
        """Each write: the kernel's timestamp, if any, and the server's clock before and after it."""
        left = self._witness.left
        writes = [(left.get(upto), before, after) for before, after, upto in self._writes]
        return {"text": self._text, "came": self._came, "writes": writes}
