"""What passes over a connection between an engine that computes prompts and one that decodes: a handshake in which both
prove that they know the server's secret (`bankfull.handshake`), then frames with one page or snapshot each, each
answered by a byte.

Everything has a fixed length, but for the content of a frame, whose length follows from the receiver's layout. Heads,
contents and answers are sealed by keys of this connection, so that nobody on the way can change, repeat, reorder or
add any. Every wait ends at a time that the caller names. Content is not encrypted, as prompts and tokens between
machines are not, unless the server has --link-tls: then all that follows the handshake is inside TLS. The seals stay
there: they tie the other end of TLS to the handshake.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from bankfull.handshake.proof import GREETING, PAGES, REPLY, TAG, CallerSide, HandshakeRefused, Seal
from bankfull.state.disk import DamagedPlace
from bankfull.state.exchange import KINDS, MOST_NAME, ExchangeShape

FRAME = struct.Struct(f"<BQQ{MOST_NAME + 1}s")
"""Kind of place, place, bytes of the content, length and bytes of its name."""
WRITTEN, REFUSED = b"+", b"-"


class BrokenFrame(DamagedPlace):
    """What has arrived is no frame: nothing behind it can be understood."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: str
    place: int
    nbytes: int
    key: bytes

    def head(self) -> bytes:
        name = bytes((len(self.key),)) + self.key
        return FRAME.pack(KINDS.index(self.kind), self.place, self.nbytes, name)


def frame_of(head: bytes, shape: ExchangeShape) -> Frame:
    """Raises BrokenFrame, unless the frame is for a place of this exchange."""
    kind, place, nbytes, name = FRAME.unpack(head)
    if kind >= len(KINDS) or name[0] > MOST_NAME:
        raise BrokenFrame("A frame from the engine that computes prompts is of an unknown kind.")
    frame = Frame(KINDS[kind], place, nbytes, name[1 : 1 + name[0]])
    if not 1 <= place <= shape.places[frame.kind] or nbytes != shape.place_bytes[frame.kind]:
        raise BrokenFrame(f"There is no place {place} for {nbytes} bytes in the exchange.")
    return frame


class PageLine:
    """A connection. `ends` is always a time of `time.monotonic`: TimeoutError is raised then."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection

    def secure(self, context: ssl.SSLContext, ends: float, listens: bool = False) -> None:
        """Use TLS from now on. Raises OSError."""
        self._bound(ends)
        self._connection = context.wrap_socket(self._connection, server_side=listens)

    def send(self, *parts: bytes | memoryview, ends: float) -> None:
        views = [memoryview(part).cast("B") for part in parts if len(part)]
        while views:
            self._bound(ends)
            over_tls = isinstance(self._connection, ssl.SSLSocket)  # which has no sendmsg
            sent = self._connection.send(views[0]) if over_tls else self._connection.sendmsg(views)
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
        """Close the connection, from any thread: whoever waits for it gets an error."""
        with suppress(OSError):  # it is closed already, or was never open
            # Not that of TLS, which first lets other threads write without it.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)
        self._connection.close()


def claim(line: PageLine, secret: bytes, identity: bytes, ends: float) -> SealedLine:
    """The sender's part of the handshake. Raises DamagedPlace if the two do not belong together, or OSError."""
    caller = CallerSide(secret, PAGES, identity)
    line.send(caller.hello, ends=ends)
    try:
        line.send(caller.proof(line.receive(GREETING.size, ends)), ends=ends)
        keys = caller.judge(line.receive(REPLY.size, ends))
    except HandshakeRefused as error:
        raise DamagedPlace(f"The engine that decodes gets no state: {error}") from None
    return SealedLine(line, Seal(keys.of_caller), Seal(keys.of_listener))


class SealedLine:
    """A connection after the handshake: what arrives was sent by the other end, in this order."""

    def __init__(self, line: PageLine, own: Seal, theirs: Seal) -> None:
        self._line, self._own, self._theirs = line, own, theirs

    def secure(self, context: ssl.SSLContext, ends: float, listens: bool = False) -> None:
        """Use TLS from now on. The caller learns here, and not from its first page, that its certificate is refused.
        Raises OSError or BrokenFrame."""
        self._line.secure(context, ends, listens)
        if listens:
            self.send(WRITTEN, ends=ends)
        else:
            self.receive(len(WRITTEN), ends)

    def send(self, *messages: bytes | memoryview, ends: float) -> None:
        parts = [part for message in messages for part in (message, self._own.tag(message))]
        self._line.send(*parts, ends=ends)

    def receive(self, size: int, ends: float) -> bytes:
        got = bytearray(size)
        self.receive_into(memoryview(got), ends)
        return bytes(got)

    def receive_into(self, into: memoryview, ends: float) -> None:
        """Raises BrokenFrame if the other end has not sent this, or not now."""
        self._line.receive_into(into, ends)
        if not self._theirs.opens(self._line.receive(TAG, ends), into):
            raise BrokenFrame("What has arrived over a connection for pages is not what the other engine has sent.")

    def close(self) -> None:
        self._line.close()
