"""Helpers for the tests of the client: the timestamping server as a process, and outcomes made by hand."""

from __future__ import annotations

import asyncio
import selectors
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bankfull.bench.load.client import LoadClient, Outcome, RequestOptions
from bankfull.bench.load.server import ServerUnderTest, parse_address
from bankfull.bench.load.stalls import Stall
from bankfull.bench.load.workloads import Conversation, ConversationTurn
from tests.bench.load.stamped_server import Faults, Line, Stamping

SERVER = f"{shlex.quote(sys.executable)} -m {Stamping.__module__}"
"""A command to run in the project's folder."""
CLOSE, PART = 1e-3, 0.01
"""Tolerance of a figure: a millisecond or one percent."""
ROOT = Path(__file__).parents[3]


class Process(ServerUnderTest):
    """A server and its process."""

    pid: int


@contextmanager
def stamped(**options: float) -> Iterator[Process]:
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [*shlex.split(SERVER), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
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


@dataclass(frozen=True, slots=True)
class Account:
    """Kernel timestamps of a server's response."""

    came: float
    """Arrival of the request, in the clock that all processes share."""
    written: list[float]
    """Seconds from the arrival of the request to the sending of each token."""
    confirmed: bool
    """Whether the kernel timestamped every write, between the server's clock readings around it."""

    def figures(self, since: float) -> dict[str, float]:
        """`since`: the time from which they count."""
        before, first, last = self.came - since, self.written[0], self.written[-1]
        return {"TTFT": before + first, "E2E": before + last, "TPOT": (last - first) / (len(self.written) - 1)}


@dataclass(frozen=True, slots=True)
class Notes:
    """The server's record of a run."""

    stalls: list[Stall]
    accounts: dict[str, Account]
    """Records by the text of the response."""


def notes_of(server: ServerUnderTest) -> Notes:
    told = server.ask("GET", "/notes").json
    accounts = {}
    for one in told["accounts"]:
        came, writes = one["came"], one["writes"]
        written = [((after if left is None else left) - came) / 1e9 for left, _, after in writes]
        confirmed = all(left is not None and before <= left <= after for left, before, after in writes)
        accounts[one["text"]] = Account((came - told["ahead"]) / 1e9, written, confirmed)
    return Notes([Stall(*noted) for noted in told["stalls"]], accounts)


def make_conversations(tokens: int, count: int, prompt: str = "a few words") -> list[Conversation]:
    return [Conversation((ConversationTurn(prompt, tokens),))] * count


def figures(one: Outcome) -> dict[str, float]:
    assert one.ttft is not None and one.tpot is not None
    return {"TTFT": one.ttft, "E2E": one.e2e, "TPOT": one.tpot}


def off(one: Outcome, theirs: Mapping[str, float]) -> float:
    """The largest error relative to its tolerance; below 1 if all figures are within it."""
    return max(abs(ours - theirs[name]) / max(CLOSE, PART * theirs[name]) for name, ours in figures(one).items())


def stamps(outcome: Outcome) -> tuple[float, list[float]]:
    """Arrival of the request and the write time of each token, as reported by the server itself."""
    arrived, *written = map(float, outcome.text.split())
    return arrived, written


def outcome(
    due: float, times: tuple[float, ...], tokens: int | None = None, *, error: str | None = None, prompt: int = 10
) -> Outcome:
    """An outcome whose events arrived at these times."""
    ended = times[-1] if times else due + 1.0
    return Outcome(due, due, times, ended, prompt, len(times) if tokens is None else tokens, error=error)


class Jumping(selectors.EpollSelector):
    """A clock that jumps to the next timer when nothing is left to read: an hour of load takes a second."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout:
            self.now += timeout
        return found


def simulated(line: Line, conversations: list[Conversation], offsets: Sequence[float]) -> list[Outcome]:
    """The client and the server on one loop with a simulated clock, so that nothing disturbs them."""
    server = ServerUnderTest(parse_address("http://127.0.0.1:1"), name="stamps")
    faults, clock = Faults(0, 0), Jumping()
    loop: Any = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now
    connect = loop.create_connection

    async def paired(make: Callable[[], asyncio.Protocol], *place: object, **how: object) -> Any:
        """Bytes written to one end are readable at the other at once, which a network does not guarantee."""
        one, other = socket.socketpair()
        await loop.connect_accepted_socket(lambda: Stamping(line, faults), other)
        return await connect(make, sock=one)

    def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop.create_connection = paired
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(work())

    return sorted(LoadClient(server, RequestOptions(), run).run(conversations, offsets), key=lambda one: one.due)
