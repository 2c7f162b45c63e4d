"""Where the ranks of a mesh meet: the store in which torch.distributed's groups find each other, and the sockets on
which they do.

On one machine the store is a file in a folder of this user. Between machines it is TCPStore, to which anybody can
write: each value is sealed with a key that only the ranks have. Gloo's own sockets authenticate nobody, and stay open.
So the ranks of each group prove to each other that they are its members, and from then on no listening socket takes a
connection any more. NCCL's groups do none of
this: its threads use the store for as long as they run.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bankfull.handshake.proof import derived

KEY, PROOF = 32, 32
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 6, 0, 0, 0)
"""One instruction for the kernel's packet filter: keep 0 bytes."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks meet: at a file, or at the store of rank 0."""

    seconds: float
    """The longest wait for the others."""
    key: bytes
    """A key drawn for each meeting. Between machines it is no secret: there it only tells meetings apart."""
    file: str = ""
    """File of the store of ranks on one machine."""
    host: str = ""
    port: int = 0

    def secret(self, own: bytes) -> bytes:
        """What only the ranks know. `own`: what they have inherited, on several machines."""
        return self.key if self.file else derived(own, self.key)

    def store(self, rank: int, ranks: int, own: bytes, listening: socket.socket | None, sealed: bool = True) -> Any:
        """`listening`: the socket of rank 0 at the place of the meeting. `sealed`: between machines. Raises
        RuntimeError."""
        wait = timedelta(seconds=self.seconds)
        if self.file:
            store: Any = dist.FileStore(self.file, ranks)
            store.set_timeout(wait)
            return store
        file = None if listening is None else listening.dup().detach()
        first = rank == 0
        shared = dist.TCPStore(self.host, self.port, ranks, first, wait, wait_for_workers=False, master_listen_fd=file)
        return SealedStore(shared, self.secret(own)) if sealed else shared


class SealedStore(dist.Store):
    """A store whose values come from members: others can only make a meeting fail."""

    def __init__(self, shared: Any, secret: bytes) -> None:
        super().__init__()
        self._shared, self._secret = shared, secret
        self.set_timeout(shared.timeout)

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._shared.set(key, self._tag(key, content) + content)

    def get(self, key: str) -> bytes:
        sealed = bytes(self._shared.get(key))
        tag, content = sealed[:PROOF], sealed[PROOF:]
        if not hmac.compare_digest(tag, self._tag(key, content)):
            raise RuntimeError(f"the value of {key} at the store of rank 0 is not of a rank")
        return content

    def add(self, key: str, amount: int) -> int:
        return int(self._shared.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._shared.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._shared.wait(list(keys), self._shared.timeout if timeout is None else timeout)

    def _tag(self, key: str, content: bytes) -> bytes:
        tag = blake2b(len(key).to_bytes(4, "little") + key.encode(), digest_size=PROOF, key=self._secret)
        tag.update(content)
        return tag.digest()


def prove_members(group: Any, name: str, ranks: Sequence[int], rank: int, secret: bytes) -> None:
    """Each member of a group shows each other one that it knows the secret. Raises RuntimeError."""

    def proof(of: int, to: int) -> bytes:
        return blake2b(f"{name} {of} {to}".encode(), digest_size=PROOF, key=secret).digest()

    sent = torch.frombuffer(bytearray(b"".join(proof(rank, other) for other in ranks)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    group.alltoall_base(received, sent, [], []).wait()
    expected = b"".join(proof(other, rank) for other in ranks)
    if not hmac.compare_digest(bytes(received.tolist()), expected):
        raise RuntimeError(f"a process that is no rank has joined the group {name}")


_OPENING = threading.Lock()
"""What is new while one device is made belongs to it."""


class GlooDevice:
    """Gloo's sockets of this process: one listens, for all groups."""

    def __init__(self, host: str) -> None:
        gloo: Any = dist.ProcessGroupGloo
        with _OPENING:
            before = set(_open_files())
            self.device: Any = gloo.create_device(hostname=host)
            self._listening = [_copy(file) for file in _listening_since(before)]

    def close_door(self) -> None:
        """Nobody else connects. Pairs that have met keep their connections."""
        for one in self._listening:
            with one:
                deafen(one)
        self._listening = []


def deafen(listening: socket.socket) -> None:
    """No packet arrives at this socket any more. Where the system has no such filter, nothing changes."""
    if sys.platform == "linux":
        code = ctypes.create_string_buffer(_DROP)
        program = struct.pack("HP", len(_DROP) // 8, ctypes.addressof(code))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _open_files() -> dict[int, str]:
    """What the numbers of this process's files stand for; nothing where the system does not tell."""
    files = {}
    for number in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        try:
            files[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # it was the folder's own
            continue
    return files


def _listening_since(before: set[int]) -> list[int]:
    """Sockets that Gloo listens on: new ones, at which a new loop of events looks. Other threads may open some, too."""
    new = {number: what for number, what in _open_files().items() if number not in before}
    watched: set[int] = set()
    for number, what in new.items():
        if "eventpoll" in what:
            told = Path(f"/proc/self/fdinfo/{number}").read_text()
            watched |= {int(target) for target in re.findall(r"^tfd:\s*(\d+)", told, re.MULTILINE)}
    sockets = [number for number, what in new.items() if number in watched and what.startswith("socket")]
    return [number for number in sockets if _listens(number)]


def _copy(number: int) -> socket.socket:
    return socket.socket(fileno=os.dup(number))


def _listens(number: int) -> bool:
    with _copy(number) as one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
