"""What the tests of the client share: the stamped server as a process, and outcomes made by hand."""

from __future__ import annotations

import asyncio
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bankfull.limits.load.client import Asking, Client, Outcome
from bankfull.limits.load.server import Server, parse_address
from bankfull.limits.load.stalls import Stall
from bankfull.limits.load.workloads import Conversation, Turn
from tests.limits.load.stamped_server import Faults, Line, Stamping

SERVER = Path(__file__).with_name("stamped_server.py")


class Process(Server):
    """A server with the process that it runs in."""

    pid: int


@contextmanager
def stamped(**options: float) -> Iterator[Process]:
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, str(SERVER), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        server = Process(parse_address(f"http://127.0.0.1:{port}"))
        server.pid = process.pid
        yield server
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def stalls_of(server: Server) -> list[Stall]:
    """What a stamped server noted of its own."""
    return [Stall(*noted) for noted in server.ask("GET", "/stalls").json]


def asking(tokens: int, count: int, prompt: str = "a few words") -> list[Conversation]:
    return [Conversation((Turn(prompt, tokens),))] * count


def stamps(outcome: Outcome) -> tuple[float, list[float]]:
    """When the server got the request, and when it wrote each token, by its own word."""
    arrived, *written = map(float, outcome.text.split())
    return arrived, written


def outcome(
    due: float, times: tuple[float, ...], tokens: int | None = None, *, error: str | None = None, prompt: int = 10
) -> Outcome:
    """One whose events came at those times."""
    ended = times[-1] if times else due + 1.0
    return Outcome(due, due, times, ended, prompt, len(times) if tokens is None else tokens, error=error)


class Jumping(selectors.EpollSelector):
    """A clock that jumps to the next timer as soon as nothing is left to be read: an hour of load in a second."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


def simulated(line: Line, conversations: list[Conversation], offsets: Sequence[float]) -> list[Outcome]:
    """The client and the stamped server on one loop, by a clock of their own: nothing disturbs them."""
    server = Server(parse_address("http://127.0.0.1:1"), name="stamps")
    faults, clock = Faults(0, 0), Jumping()
    loop: Any = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    connect = loop.create_connection

    async def paired(make: Callable[[], asyncio.Protocol], *place: object, **how: object) -> Any:
        """What is written to one end can be read at the other at once, which a network does not promise."""
        one, other = socket.socketpair()
        await loop.connect_accepted_socket(lambda: Stamping(line, faults), other)
        return await connect(make, sock=one)

    def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop.create_connection = paired
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work())

    return sorted(Client(server, Asking(), run).run(conversations, offsets), key=lambda one: one.due)
