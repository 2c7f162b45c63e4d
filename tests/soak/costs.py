"""The cost of the service on top of its engine: connections, idle time, processor time per token, throughput."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.soak.asking import Answer, ask, completion, connect
from tests.soak.figures import Figure, percentile
from tests.soak.served import serving

TOKENS = 128
"""Tokens of each response in the comparison with the engine alone."""


def crowd(model: str, streams: int, idle: int) -> Iterator[Figure]:
    """Many live streams beside many idle connections."""
    options = ["--dtype", "float32", "--memory", "64MiB", "--page-tokens", "4", "--rows", str(streams)]
    with serving(model, *options) as served:
        silent, answers = asyncio.run(_crowd(served.port, streams, idle))
        alive = served.ready()
    yield Figure("crowd: idle connections that stayed open", silent, least=idle)
    yield Figure("crowd: streams that were whole", sum(one.whole for one in answers), least=streams)
    yield Figure("crowd: first token, p99", percentile([one.first for one in answers], 0.99), "s")
    yield Figure("crowd: the server is still ready", float(alive), least=1)


async def _crowd(port: int, streams: int, idle: int) -> tuple[int, list[Answer]]:
    """An idle connection has made one call; otherwise the server closes it after the time-out for a request head."""
    silent = []
    for _ in range(idle):
        reader, writer = await connect(port)
        writer.write(b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        silent.append((reader, writer))
    answers = await asyncio.gather(*(ask(port, completion(32)) for _ in range(streams)))
    still = sum(not reader.at_eof() for reader, _ in silent)
    for _, writer in silent:
        writer.transport.abort()
    return still, list(answers)


def idle_cpu(model: str, seconds: float) -> Iterator[Figure]:
    with serving(model) as served:
        asyncio.run(ask(served.port, completion(4)))
        engine = served.engine()
        time.sleep(1.0)
        before = served.cpu_seconds() + served.cpu_seconds(engine)
        time.sleep(seconds)
        used = served.cpu_seconds() + served.cpu_seconds(engine) - before
    yield Figure("idle: processor time of both processes", 100 * used / seconds, "%", most=1.0)


def overhead(model: str, streams: int, rounds: int) -> Iterator[Figure]:
    """The same work through the service and through the engine alone, in turns. The best run of each counts, because
    slow runs on a shared machine measure the neighbours. The time of the service includes the work of the clients."""
    command = [sys.executable, "-m", "tests.soak.engine_alone", model, str(streams), str(TOKENS)]
    with (
        serving(model, "--rows", str(streams), "--no-prefix-cache") as served,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as alone,
    ):
        assert alone.stdin is not None and alone.stdout is not None
        through, engine, cost = [], [], []
        for number in range(rounds + 1):
            before = served.cpu_seconds()
            seconds = asyncio.run(_together(served.port, streams, number))
            used = served.cpu_seconds() - before
            alone.stdin.write(f"{number}\n")
            alone.stdin.flush()
            rate = json.loads(alone.stdout.readline())
            if number:  # the first round is a warm-up
                through.append(streams * TOKENS / seconds)
                engine.append(rate)
                cost.append(1e6 * used / (streams * TOKENS))
        alone.stdin.close()
    yield Figure(f"{streams} streams: engine alone, best", max(engine), "tokens/s")
    yield Figure(f"{streams} streams: through the service, best", max(through), "tokens/s")
    yield Figure(f"{streams} streams: the service over the engine", max(through) / max(engine), least=0.9)
    yield Figure(f"{streams} streams: API's processor time per token, median", percentile(cost, 0.5), "us", most=40)


async def _together(port: int, streams: int, number: int) -> float:
    begun = time.monotonic()
    calls = [completion(TOKENS, prompt=f"The river {number} {one}", temperature=0) for one in range(streams)]
    answers = await asyncio.gather(*(ask(port, call) for call in calls))
    seconds = time.monotonic() - begun
    if not all(answer.whole for answer in answers):
        raise AssertionError(f"status {sorted({answer.status for answer in answers})}; every call must succeed")
    return seconds
