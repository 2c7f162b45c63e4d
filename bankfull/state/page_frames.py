"""What passes over a connection between an engine that computes prompts and one that decodes: a handshake in which both
prove that they know the server's secret, then frames with one page or snapshot each, each answered by a byte.

Everything has a fixed length, but for the content of a frame, whose length follows from the receiver's layout. Every
wait ends at a time that the caller names. Content is not encrypted, as prompts and tokens between machines are not.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass

from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import KINDS, MOST_NAME, ExchangeShape

MAGIC = b"bankfull page v1"
NONCE, IDENTITY, MAC = 32, 32, 32
GREETING = struct.Struct(f"<{len(MAGIC)}s{NONCE}s")
"""From the receiver."""
CLAIM = struct.Struct(f"<{NONCE}s{IDENTITY}s{MAC}s")
"""From the sender: a nonce of its own, the form of its state, and its proof."""
VERDICT = struct.Struct(f"<c{MAC}s")
"""From the receiver: the outcome, and its proof if it accepts."""
ACCEPTED, WRONG_SECRET, OTHER_FORM = b"+", b"S", b"F"

FRAME = struct.Struct(f"<BQQI{MOST_NAME + 1}s")
"""Kind of place, place, bytes and checksum of the content, length and bytes of its name."""
CHECK = struct.Struct("<I")
"""Checksum of the frame's head, behind it."""
WRITTEN, REFUSED = b"+", b"-"


class BrokenFrame(DamagedPlace):
    """What has arrived is no frame: nothing behind it can be understood."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    place: int
    nbytes: int
    checksum: int
    key: bytes

    def head(self) -> bytes:
        name = bytes((len(self.key),)) + self.key
        head = FRAME.pack(KINDS.index(self.kind), self.place, self.nbytes, self.checksum, name)
        return head + CHECK.pack(zlib.crc32(head))


HEAD_BYTES = FRAME.size + CHECK.size


def frame_of(head: bytes, shape: ExchangeShape) -> Frame:
    """Raises BrokenFrame, unless the frame is for a place of this exchange."""
    if CHECK.unpack(head[FRAME.size :])[0] != zlib.crc32(head[: FRAME.size]):
        raise BrokenFrame("A frame from the engine that computes prompts is damaged.")
    kind, place, nbytes, checksum, name = FRAME.unpack(head[: FRAME.size])
    if kind >= len(KINDS) or name[0] > MOST_NAME:
        raise BrokenFrame("A frame from the engine that computes prompts is of an unknown kind.")
    found = Frame(KINDS[kind], place, nbytes, checksum, name[1 : 1 + name[0]])
    if not 1 <= place <= shape.places[found.kind] or nbytes != shape.place_bytes[found.kind]:
        raise BrokenFrame(f"There is no place {place} for {nbytes} bytes in the exchange.")
    return found


class PageLine:
    """A connection. `ends` is always a time of `time.monotonic`: TimeoutError is raised then."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def send(self, *parts: bytes | memoryview, ends: float) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            self._bound(ends)
            sent = self._connection.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def receive(self, size: int, ends: float) -> bytes:
        got = bytearray(size)
        self.receive_into(memoryview(got), ends)
        return bytes(got)

    def receive_into(self, into: memoryview, ends: float) -> None:
        """Raises ConnectionError if the other end closes before all has arrived."""
        done = 0
        while done < len(into):
            self._bound(ends)
            count = self._connection.recv_into(into[done:])
            if not count:
                raise ConnectionResetError("the other engine has closed the connection")
            done += count

    def _bound(self, ends: float) -> None:
        left = ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other engine is too slow")
        self._connection.settimeout(left)

    def close(self) -> None:
        """From any thread: whoever waits for the connection gets an error."""
        with suppress(OSError):  # it is closed already, or was never open
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def claim(line: PageLine, secret: bytes, identity: bytes, ends: float) -> None:
    """The sender's part of the handshake. Raises DamagedPlace if the two do not belong together, or OSError."""
    magic, nonce = GREETING.unpack(line.receive(GREETING.size, ends))
    if magic != MAGIC:
        raise DamagedPlace("The process at the address of the engine that decodes is not one of bankfull's.")
    own = secrets.token_bytes(NONCE)
    said = nonce + own + identity
    line.send(CLAIM.pack(own, identity, _proof(secret, b"sender", said)), ends=ends)
    outcome, proof = VERDICT.unpack(line.receive(VERDICT.size, ends))
    if outcome == OTHER_FORM:
        raise DamagedPlace("The engine that decodes keeps its state in another form.")
    if outcome != ACCEPTED or not hmac.compare_digest(proof, _proof(secret, b"receiver", said)):
        raise DamagedPlace("The engine that decodes has another secret: it belongs to another server.")


def verify(line: PageLine, secret: bytes, identity: bytes, ends: float) -> bool:
    """The receiver's part; whether it accepts. Raises OSError."""
    nonce = secrets.token_bytes(NONCE)
    line.send(GREETING.pack(MAGIC, nonce), ends=ends)
    own, theirs, proof = CLAIM.unpack(line.receive(CLAIM.size, ends))
    said = nonce + own + theirs
    if not hmac.compare_digest(proof, _proof(secret, b"sender", said)):
        line.send(VERDICT.pack(WRONG_SECRET, bytes(MAC)), ends=ends)
        return False
    accepts = theirs == identity
    mine = _proof(secret, b"receiver", said)
    line.send(VERDICT.pack(ACCEPTED if accepts else OTHER_FORM, mine), ends=ends)
    return accepts


def _proof(secret: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + said, "sha256")
