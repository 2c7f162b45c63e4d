"""Messages between the engine or the server and a template worker: a kind, a length, and a text."""

from __future__ import annotations

import socket

CPU_SECONDS = 1.0
"""CPU time of one call in seconds."""
MEMORY = 512 << 20
"""Memory in bytes beyond the worker's own at its start."""

TOO_MUCH = f"it needs more than {MEMORY >> 20} MiB of memory"
NO_MEMORY = 3
"""Exit status of a worker without memory to read its call."""

STARTED, COMPILED, MADE, RAISED, FAILED, LIMITED, BROKEN, REQUEST = (bytes([number]) for number in range(8))
_HEADER = 9


def send(connection: socket.socket, kind: bytes, text: str) -> None:
    # A Python string may contain a lone surrogate; the reader of the text reports it.
    body = text.encode("utf-8", "surrogatepass")
    connection.sendall(b"".join((kind, len(body).to_bytes(8, "big"), body)))


def receive(connection: socket.socket, most: int | None = None) -> tuple[bytes, str] | None:
    """None at the end of the stream. A message has at most `most` bytes."""
    head = _exactly(connection, _HEADER)
    if head is None:
        return None
    length = int.from_bytes(head[1:], "big")
    if most is not None and length > most:
        return None
    body = _exactly(connection, length)
    return None if body is None else (bytes(head[:1]), body.decode("utf-8", "surrogatepass"))


def too_long(longest: int) -> str:
    return f"it makes more than {longest} characters"


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    got = bytearray(count)
    view, filled = memoryview(got), 0
    while filled < count:
        read = connection.recv_into(view[filled:])
        if not read:
            return None
        filled += read
    return got
