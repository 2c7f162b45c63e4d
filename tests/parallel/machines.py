"""Ranks on machines of their own: rank 0, and the hosts of the others, as programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bankfull.parallel.reaching import RankHosts

TOKEN = b"r" * 32

HOST = """
import asyncio, sys
from bankfull.parallel.hosting import RankHost

async def serve():
    host = RankHost(b"r" * 32)
    print(*await host.start(sys.argv[1]), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
"""The host of one rank."""

FRONT = """
import json, sys, time
from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError, RankLost
from bankfull.handshake import inherited
from bankfull.parallel import leading

wanted = json.loads(sys.argv[1])
inherited.INHERITED = inherited.Secrets(ranks=b"r" * 32)
leading.BOUNDS = leading.Bounds(collective=wanted["seconds"], step=2 * wanted["seconds"])
if wanted["elsewhere"]:  # the other machines have no model there
    begin = leading.Followers.begin
    leading.Followers.begin = lambda self, model, *more: begin(self, wanted["elsewhere"], *more)

def tell(**what):
    print(json.dumps(what), flush=True)

def tokens(count):
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(["The river runs", "The engine"], params)]

begun = time.monotonic()
try:
    llm = LLM(wanted["model"], dtype="float32", rows=4, threads=1, parallel=wanted["parallel"])
    tell(tokens=tokens(12))
    for line in sys.stdin:
        begun = time.monotonic()
        tell(going=line.strip())
        if line.strip() == "watch":
            tell(lost=llm.loaded.engine.runner.followers.wait_lost(), seconds=time.monotonic() - begun)
        while line.strip() == "run":  # until a rank is lost
            tokens(64)
except RankLost as error:
    tell(lost=str(error), seconds=time.monotonic() - begun)
except ConfigError as error:
    tell(refused=str(error))
"""
"""Rank 0. It writes tokens. At the word `run` it goes on until a rank is lost, at `watch` it waits for that idly."""


class Program:
    """A program that writes lines."""

    def __init__(self, command: list[str], variables: dict[str, str] | None = None) -> None:
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = subprocess.Popen(command, env=os.environ | (variables or {}), **how)  # type: ignore[call-overload]

    def line(self) -> str:
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        assert text, "it has ended"
        return str(text)

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line())
        return found

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        for pid in [*children(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def host_command(address: str) -> list[str]:
    return [sys.executable, "-c", HOST, address]


def front_command(model: str, parallel: str, seconds: float = 60.0, elsewhere: str = "") -> list[str]:
    wanted = {"model": model, "parallel": parallel, "seconds": seconds, "elsewhere": elsewhere}
    return [sys.executable, "-c", FRONT, json.dumps(wanted)]


@contextmanager
def programs() -> Iterator[list[Program]]:
    """A list of programs, which all end."""
    begun: list[Program] = []
    try:
        yield begun
    finally:
        for one in begun:
            one.end()


def started_host(command: list[str]) -> tuple[Program, tuple[str, int]]:
    program = Program(command)
    host, port = program.line().split()
    return program, (host, int(port))


def variables(*hosts: tuple[str, int]) -> dict[str, str]:
    return RankHosts(hosts, TOKEN).variables()


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            own = [int(child) for child in file.read().split()]
    except OSError:
        return []
    return own + [below for child in own for below in children(child)]
