"""Machines without a machine: network namespaces, connected by a bridge in a namespace of its own. A cut of a cable at
the bridge is invisible to the other machines, as when one loses its power."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count

_numbers = count()
CLONE_NEWNET = 0x40000000
"""Of <sched.h>: a network namespace."""


def why_impossible() -> str:
    """Why this process cannot make network namespaces, in one sentence; empty if it can."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (package iproute2)"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip() or error}"


class Network:
    def __init__(self, name: str, machines: int) -> None:
        self._name = name
        self.machines = range(machines)

    def address(self, machine: int) -> str:
        return f"10.77.0.{1 + machine}"

    def on(self, machine: int, *command: str) -> list[str]:
        """The command line that runs a command on a machine."""
        return ["ip", "netns", "exec", f"{self._name}-{machine}", *command]

    @contextmanager
    def inside(self, machine: int) -> Iterator[None]:
        """This thread, and the processes that it starts, are on that machine."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self._name}-{machine}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self, machine: int) -> None:
        """No packet reaches or leaves the machine any more, and no other one is told."""
        _ip("-n", f"{self._name}-s", "link", "set", f"p{machine}", "down")

    def mend(self, machine: int) -> None:
        _ip("-n", f"{self._name}-s", "link", "set", f"p{machine}", "up")

    def shape(self, machine: int, *how: str) -> None:
        """Put what the machine sends and receives through a queueing discipline of tc. Raises CalledProcessError."""
        for space, device in ((f"{self._name}-{machine}", "eth0"), (f"{self._name}-s", f"p{machine}")):
            _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", *how)

    def make(self) -> None:
        switch = f"{self._name}-s"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for machine in self.machines:
            space, port = f"{self._name}-{machine}", f"p{machine}"
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def remove(self) -> None:
        for space in ("s", *self.machines):
            with suppress(subprocess.CalledProcessError):  # it was not made
                _ip("netns", "del", f"{self._name}-{space}")


@contextmanager
def network(machines: int) -> Iterator[Network]:
    """Raises CalledProcessError if this process may not make it."""
    made = Network(f"bf{os.getpid()}x{next(_numbers)}", machines)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
