"""Disconnecting clients, a killed engine, and overload."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from random import Random

import httpx

from tests.soak.asking import Answer, ask, completion, connect, send
from tests.soak.figures import Figure, percentile
from tests.soak.served import IDLE, Served, serving, until

SMALL = ["--dtype", "float32", "--memory", "4MiB", "--page-tokens", "4", "--rows", "8"]
AT_ONCE = 20


def disconnects(model: str, count: int) -> Iterator[Figure]:
    """Clients disconnect before the request is read, in the queue, during prefill and during decode; nothing of theirs
    may remain."""
    with serving(model, *SMALL) as served:
        asyncio.run(_leave(served.port, count, Random(11)))
        emptied = until(served.holds_nothing, 10.0)
        held = sum(served.metrics()[name] for name in IDLE)
        answered = asyncio.run(ask(served.port, completion(4)))
        yield Figure("disconnects", count)
        yield Figure("disconnects: requests and pages still held", held, most=0)
        yield Figure("disconnects: until nothing was held", float("nan") if emptied is None else emptied, "s", most=2.0)
        yield Figure("disconnects: the next client is answered", float(answered.whole), least=1)


async def _leave(port: int, count: int, random: Random) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with room:
            reader, writer = await connect(port)
            prompt = "river " * random.randint(1, 30)
            send(writer, completion(100, prompt=prompt, stream=random.random() < 0.7))
            await asyncio.sleep(0)
            stage = random.randrange(4)
            if stage == 1:
                await asyncio.sleep(random.random() * 0.02)
            elif stage == 2:
                await asyncio.sleep(random.random() * 0.2)
            elif stage == 3:
                await reader.read(300)
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)))


def overload(model: str, seconds: float, rounds: int) -> Iterator[Figure]:
    """Five clients per available place. A refused client waits half of its Retry-After."""
    rows = waiting = 8
    with serving(model, "--rows", str(rows), "--queue-requests", str(waiting)) as served:
        asyncio.run(_load(served.port, rows + waiting, 1.0))
        ratios, refusals, slower = [], [], []
        for _ in range(rounds):
            peak, _, peak_rate = asyncio.run(_load(served.port, rows + waiting, seconds))
            loaded, refused, rate = asyncio.run(_load(served.port, 5 * (rows + waiting), seconds))
            ratios.append(rate / peak_rate)
            slower.append(
                percentile([one.seconds for one in loaded], 0.5) / percentile([one.seconds for one in peak], 0.5)
            )
            refusals += [one.seconds for one in refused]
        yield Figure("overload: throughput over the peak, median", percentile(ratios, 0.5), least=0.95)
        yield Figure("overload: latency of the accepted over that at the peak", percentile(slower, 0.5), most=1.25)
        yield Figure("overload: refusals", len(refusals), least=1)
        yield Figure("overload: refusals, p99", 1e3 * percentile(refusals, 0.99), "ms", most=50)


async def _load(port: int, clients: int, seconds: float) -> tuple[list[Answer], list[Answer], float]:
    """Successful responses, refusals, and responses per second until the last response was complete. Any other status
    is an error. Clients start within one second, because starting all at once would measure the client process."""
    begun = last = time.monotonic()
    end = begun + seconds
    accepted: list[Answer] = []
    refused: list[Answer] = []

    async def client(number: int) -> None:
        nonlocal last
        await asyncio.sleep(number / clients)
        while time.monotonic() < end:
            answer = await ask(port, completion(24))
            if answer.whole:
                accepted.append(answer)
                last = time.monotonic()
            elif answer.status == 429:
                retry_after = re.search(rb"retry-after: (\d+)", answer.body)
                if retry_after is None:
                    raise AssertionError("a refusal has no Retry-After header")
                refused.append(answer)
                await asyncio.sleep(min(int(retry_after[1]) / 2, max(0.0, end - time.monotonic())))
            else:
                raise AssertionError(f"status {answer.status} under load: {answer.body[:300]!r}")

    await asyncio.gather(*(client(number) for number in range(clients)))
    return accepted, refused, len(accepted) / (last - begun)


def kills(model: str, count: int) -> Iterator[Figure]:
    """Kill the engine with SIGKILL during streams, repeatedly."""
    failed, red, back = list[float](), list[float](), list[float]()
    with serving(model, *SMALL) as served:
        for _ in range(count):
            engine = served.engine()
            if engine is None:
                raise AssertionError("there is no engine to kill")
            failed.append(asyncio.run(_kill(served, engine, red)))
            recovered = until(served.ready, 60.0)
            back.append(float("nan") if recovered is None else recovered)
        answered = asyncio.run(ask(served.port, completion(4)))
    yield Figure("kills of the engine", count)
    yield Figure("kills: until the last stream had its error, worst", max(failed), "s", most=2.0)
    yield Figure("kills: until /ready was red, worst", max(red), "s", most=1.0)
    yield Figure("kills: until it was ready again, median", percentile(back, 0.5), "s")
    yield Figure("kills: the next client is answered", float(answered.whole), least=1)


async def _kill(served: Served, engine: int, red: list[float]) -> float:
    """Seconds until every stream has ended with an error."""
    connections = [await connect(served.port) for _ in range(6)]
    for _, writer in connections:
        send(writer, completion(200))
    await connections[0][0].readuntil(b"data: ")
    begun = time.monotonic()
    os.kill(engine, signal.SIGKILL)

    async def watch() -> None:
        async with httpx.AsyncClient() as client:
            while (await client.get(served.url + "/ready")).status_code == 200:
                if time.monotonic() - begun > 5:
                    break
                await asyncio.sleep(0.005)
        red.append(time.monotonic() - begun)

    watching = asyncio.create_task(watch())
    rests = await asyncio.gather(*(asyncio.wait_for(reader.read(-1), 10) for reader, _ in connections))
    seconds = time.monotonic() - begun
    await watching
    for (_, writer), rest in zip(connections, rests, strict=True):
        writer.close()
        if b'"error"' not in rest and b"[DONE]" not in rest:
            raise AssertionError(f"a stream ended without an error event: {rest[-200:]!r}")
    return seconds
