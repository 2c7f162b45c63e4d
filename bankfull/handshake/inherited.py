"""Secrets for a process that is being started: in an unnamed file that it inherits and reads once. Its command line,
its environment and that of its own children show nothing of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile

import msgspec

from bankfull.handshake.proof import SessionKeys

MOST_BYTES = 4096


class Secrets(msgspec.Struct, frozen=True):
    exchange: bytes = b""
    """The secret of the engines that hand over state to each other (`state.page_listener`)."""
    ranks: bytes = b""
    """The token of the hosts of the other ranks."""
    meeting: bytes = b""
    """What the ranks of a replica show each other (`parallel.meeting`). It follows from `ranks`."""
    link: SessionKeys | None = None
    """Keys of an engine's connection to its server; None: a private pair of sockets."""
    host: str = ""
    """No secret: the address at which others reach this machine, where the process that has started this one holds the
    connection from there."""


INHERITED = Secrets()
"""Secrets of this process."""


@contextmanager
def handed(secrets: Secrets) -> Iterator[int]:
    """The number of an open file for the new process."""
    try:
        file = os.memfd_create("bankfull-secrets")
    except (AttributeError, OSError):  # not on this system
        with TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    try:
        os.write(file, msgspec.msgpack.encode(secrets))
        yield file
    finally:
        os.close(file)


def inherit(file: int) -> None:
    """Read this process's secrets, and close their file."""
    global INHERITED
    try:
        INHERITED = msgspec.msgpack.decode(os.pread(file, MOST_BYTES, 0), type=Secrets)
    finally:
        os.close(file)


def inherited() -> Secrets:
    return INHERITED
