"""What a command hands over to the warm process: a length, the open files 0, 1 and 2, and a JSON text."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from bankfull.warm.place import is_own, socket_path

HEAD = struct.Struct("<I")
MOST_BYTES = 8 << 20
PATIENCE_SECONDS = 5.0
"""For the other end to send or take a whole message."""
READ_AT_IMPORT = (
    "ATEN",
    "CUDA",
    "GLIBC",
    "GOMP",
    "KMP",
    "LANG",
    "LC_",
    "LD_",
    "MALLOC",
    "MKL",
    "NVIDIA",
    "OMP",
    "OPENBLAS",
    "PYTHON",
    "TORCH",
    "TRITON",
)
"""First letters of the variables that libraries read when they are loaded."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
STARTED, REFUSED = b"S", b"R"
"""What a fork answers: it runs, or the command should begin by itself."""
ANSWER = struct.Struct("<ci")
"""The word, and a number: of the fork that runs, of the warm process that refuses, and at last the exit code."""


def inherited() -> dict[str, Any]:
    """What a process keeps from the one that started it, and cannot simply change later."""
    spaces = {}
    for name in NAMESPACES:
        with suppress(OSError):
            spaces[name] = os.readlink(f"/proc/self/ns/{name}")
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        groups = ""
    limits = [resource.getrlimit(number) for name, number in _limits()]
    return {
        "cgroup": groups,
        "namespaces": spaces,
        "users": [*os.getresuid(), *os.getresgid(), *sorted(os.getgroups())]
        if hasattr(os, "getresuid")
        else [os.getuid(), os.getgid()],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "limits": [list(limit) for limit in limits],
        "read": {name: value for name, value in sorted(os.environ.items()) if name.startswith(READ_AT_IMPORT)},
    }


def _limits() -> list[tuple[str, int]]:
    return sorted((name, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_"))


def request_of(arguments: list[str]) -> dict[str, Any]:
    """A command as it would run here."""
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    mask = os.umask(0)
    os.umask(mask)
    return {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "umask": mask,
        "processors": processors,
        "inherited": inherited(),
    }


def connected() -> socket.socket | None:
    """A connection to the warm process of this user, if there is one. Raises ConfigError or OSError."""
    path = socket_path()
    if not is_own(path.parent) or not path.exists():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(os.fspath(path))
        if peer_is_own(connection):
            return connection
    except OSError:
        connection.close()
        raise
    connection.close()
    return None


def answered(connection: socket.socket, arguments: list[str]) -> tuple[bytes, int]:
    """The answer to a command. Raises OSError or ValueError."""
    send(connection, request_of(arguments), [0, 1, 2])
    return answer_of(connection)


def answer_of(connection: socket.socket) -> tuple[bytes, int]:
    data = b""
    while len(data) < ANSWER.size:
        if not (piece := connection.recv(ANSWER.size - len(data))):
            raise ValueError("the warm process has ended")
        data += piece
    word, number = ANSWER.unpack(data)
    return word, int(number)


def send(connection: socket.socket, message: dict[str, Any], files: list[int]) -> None:
    """Raises OSError, or ValueError for text that is none."""
    data = json.dumps(message).encode()
    if len(data) > MOST_BYTES:
        raise OSError("the message is too long")
    connection.settimeout(PATIENCE_SECONDS)
    socket.send_fds(connection, [HEAD.pack(len(data))], files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A message and its files. Raises OSError or ValueError."""
    connection.settimeout(PATIENCE_SECONDS)
    head, files, _, _ = socket.recv_fds(connection, HEAD.size, 3)
    if len(head) != HEAD.size:
        raise ValueError("no whole message")
    (length,) = HEAD.unpack(head)
    if length > MOST_BYTES:
        raise ValueError("too long a message")
    data = bytearray()
    while len(data) < length:
        if not (piece := connection.recv(length - len(data))):
            raise ValueError("no whole message")
        data += piece
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message, list(files)


def peer_is_own(connection: socket.socket) -> bool:
    """Whether the other end is a process of the same user, where the system tells; the directory lets in no other."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, 12))
    return bool(user == os.getuid())
