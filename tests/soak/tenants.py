"""One honest client beside an attacker: how much the attacker slows it down."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bankfull.serve.guard.keys import new_key
from tests.soak.asking import completion, connect, send
from tests.soak.figures import Figure, percentile
from tests.soak.served import Served, serving

PAUSE = 0.5
"""Seconds between the starts of two honest calls."""
TOKENS = 16
STEP = 0.25
"""Seconds that one step may delay others: the default bound on the predicted time of a step."""
FACTOR = 3.0
API_BYTES, ENGINE_BYTES = 768 << 20, 1 << 30
"""Most resident bytes of the API processes, and most growth of the engine, under any attack."""


@dataclass
class Latencies:
    """Latencies of the honest client, in seconds."""

    firsts: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Before the second token, which may be the first of another engine."""
    gaps: list[float] = field(default_factory=list)
    """Between the later ones."""
    broken: int = 0

    def add(self, other: Latencies) -> None:
        self.firsts += other.firsts
        self.seconds += other.seconds
        self.gaps += other.gaps
        self.broken += other.broken


TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "": (),
    "separate": ("--separate", "prefill=1,decode=1,exchange=64MiB"),
    "replicas": ("--replicas", "2"),
    "disk": ("--kv-disk", "256MiB:{folder}/kv"),
}
"""Options of the server by the name of its trial."""


def tenants_everywhere(model: str, seconds: float, rounds: int) -> Iterator[Figure]:
    """The same promises however the engines are arranged; pinned prefixes are among the attacks on all of them."""
    for name in TOPOLOGIES:
        yield from tenants(model, seconds, rounds, topology=name)


def tenants(model: str, seconds: float, rounds: int, number: int = 1, topology: str = "") -> Iterator[Figure]:
    """Alternate between quiet and attack, each for `seconds`."""
    label = f"tenants, {topology}" if topology else "tenants"
    honest, honest_key = new_key("honest")
    greedy, greedy_key = new_key("greedy")
    quiet, attacked, sent = Latencies(), Latencies(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.txt"
        keys.write_text(f"{honest_key.line}\n{greedy_key.line}\n")
        options = [option.format(folder=folder) for option in TOPOLOGIES[topology]]
        with serving(model, "--api-key-file", str(keys), *options) as served:
            asyncio.run(_calls(served.port, honest, 2.0))
            memory = Memory(served)
            for turn in range(rounds):
                quiet.add(asyncio.run(_calls(served.port, honest, seconds)))
                command = [
                    sys.executable,
                    "-m",
                    "tests.soak.attacks",
                    str(served.port),
                    greedy,
                    str(seconds + 1.0),
                    str(number + turn),
                ]
                with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
                    assert attacker.stdout is not None
                    attacker.stdout.readline()  # the attacker has built all its calls
                    attacked.add(asyncio.run(_calls(served.port, honest, seconds, memory)))
                    printed, _ = attacker.communicate()
                assert attacker.returncode == 0, "the attacker itself failed"
                sent.update(json.loads(printed))
                assert served.process.poll() is None, "the server ended"
    yield Figure(f"{label}: hostile calls", sum(sent.values()), least=len(sent))
    yield Figure(f"{label}: kinds of them", len(sent), least=20)
    yield Figure(f"{label}: honest calls beside them", len(attacked.firsts), least=1)
    yield Figure(f"{label}: honest streams that broke", quiet.broken + attacked.broken, most=0)
    for what, before, during in (
        ("first token", quiet.firsts, attacked.firsts),
        ("gap before the second token", quiet.seconds, attacked.seconds),
        ("gap between tokens", quiet.gaps, attacked.gaps),
    ):
        calm, measured = percentile(before, 0.99), percentile(during, 0.99)
        yield Figure(f"{label}: {what}, p99, in quiet", 1e3 * calm, "ms")
        yield Figure(f"{label}: {what}, p99, under attack", 1e3 * measured, "ms", most=1e3 * (FACTOR * calm + STEP))
    yield Figure(f"{label}: memory of the API's processes", memory.api / 2**20, "MiB", most=API_BYTES / 2**20)
    yield Figure(f"{label}: growth of the engine", memory.growth / 2**20, "MiB", most=ENGINE_BYTES / 2**20)


class Memory:
    """Resident bytes of the server's processes, measured from outside."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._begin = self._look()[1]
        self.api = self.growth = 0
        self.look()

    def look(self) -> None:
        api, engine = self._look()
        self.api, self.growth = max(self.api, api), max(self.growth, engine - self._begin)

    def _look(self) -> tuple[int, int]:
        sizes = self._served.resident_bytes()
        engine = sum(size for command, size in sizes if "bankfull.serve.engine.worker" in command)
        return sum(size for _, size in sizes) - engine, engine


async def _calls(port: int, key: str, seconds: float, memory: Memory | None = None) -> Latencies:
    """Calls that start at fixed times, whether or not earlier ones have ended."""
    measured, calls = Latencies(), []
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        calls.append(asyncio.create_task(_call(port, key, measured)))
        if memory is not None:
            memory.look()
        await asyncio.sleep(max(0.0, begun + PAUSE * len(calls) - time.monotonic()))
    await asyncio.gather(*calls)
    return measured


async def _call(port: int, key: str, measured: Latencies) -> None:
    try:
        reader, writer = await connect(port)
        try:
            last = time.monotonic()
            send(writer, completion(TOKENS, prompt="The river runs " * 10), key=key)
            for token in range(TOKENS):
                async with asyncio.timeout(120):
                    await reader.readuntil(b'"text":')
                now = time.monotonic()
                lines = (measured.firsts, measured.seconds, measured.gaps)
                lines[min(token, 2)].append(now - last)
                last = now
            async with asyncio.timeout(120):
                measured.broken += b"data: [DONE]" not in await reader.read(-1)
        finally:
            writer.close()
    except (OSError, EOFError, TimeoutError) as error:
        print(f"soak: tenants: an honest stream broke: {error!r}", file=sys.stderr)
        measured.broken += 1
