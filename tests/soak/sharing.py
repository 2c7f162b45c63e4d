"""Online calls beside a batch that could use the whole machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from random import Random

import httpx

from tests.soak.asking import completion, connect, send
from tests.soak.figures import Figure, percentile
from tests.soak.served import Served, serving, until

PROMPT_WORDS = 128
LINE_TOKENS = 64
BATCH_ROWS = 16
"""Running lines of the batch before it is measured. On slow cores, lines end about as fast as prompts are computed, and
no more than 24 run at once."""
PAUSE = 1.0
"""Average seconds between two online calls, a light load."""


def sharing(model: str, seconds: float, rounds: int) -> Iterator[Figure]:
    """Alternate between online calls alone, the batch alone, and both. The rate of a batch comes from its token
    counter."""
    random = Random(7)
    with serving(model, "--no-prefix-cache") as served:
        asyncio.run(_calls(served.port, 3, 0.0, random))
        idle, beside, alone, shared = list[float](), list[float](), list[float](), list[float]()
        for _ in range(rounds):
            idle += asyncio.run(_calls(served.port, max(2, int(seconds / PAUSE)), PAUSE, random))
            batch = _submit(served, random, lines=int(40 * seconds) + 400)
            assert until(lambda: served.metrics()["num_requests_running"] >= BATCH_ROWS, 30.0) is not None, (
                "the batch did not start"
            )
            alone.append(_rate(served, seconds, None))
            shared.append(_rate(served, seconds, (beside, random)))
            httpx.post(f"{served.url}/v1/batches/{batch}/cancel", timeout=30).raise_for_status()
            assert until(served.holds_nothing, 30.0) is not None, "the cancelled batch kept running"
    yield Figure("sharing: first token of a call alone, median", 1e3 * percentile(idle, 0.5), "ms")
    yield Figure("sharing: first token beside a batch, median", 1e3 * percentile(beside, 0.5), "ms")
    yield Figure("sharing: the one over the other", percentile(beside, 0.5) / percentile(idle, 0.5), most=1.5)
    yield Figure("sharing: the batch alone", percentile(alone, 0.5), "tokens/s")
    kept = [both / one for one, both in zip(alone, shared, strict=True)]
    yield Figure("sharing: what a batch keeps beside light load", percentile(kept, 0.5), least=0.7)


def _submit(served: Served, random: Random, lines: int) -> str:
    rows = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": _prompt(random), "max_tokens": LINE_TOKENS, "ignore_eos": True},
        }
        for i in range(lines)
    ]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    with httpx.Client(base_url=served.url, timeout=60) as client:
        file = client.post("/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"})
        file.raise_for_status()
        wanted = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=wanted)
        batch.raise_for_status()
    return str(batch.json()["id"])


def _rate(served: Served, seconds: float, online: tuple[list[float], Random] | None) -> float:
    """Tokens per second of the batch, with or without online calls."""
    before, begun = served.metrics()["batch_generation_tokens_total"], time.monotonic()
    if online is None:
        time.sleep(seconds)
    else:
        firsts, random = online
        firsts += asyncio.run(_calls(served.port, max(2, int(seconds / PAUSE)), PAUSE, random))
    after = served.metrics()["batch_generation_tokens_total"]
    return (after - before) / (time.monotonic() - begun)


async def _calls(port: int, count: int, pause: float, random: Random) -> list[float]:
    """Times to first token of consecutive calls."""
    firsts = []
    for _ in range(count):
        await asyncio.sleep(pause * (0.5 + random.random()))
        reader, writer = await connect(port)
        begun = time.monotonic()
        send(writer, completion(16, prompt=_prompt(random)))
        await reader.readuntil(b'"text":')
        firsts.append(time.monotonic() - begun)
        rest = await reader.read(-1)
        assert b"data: [DONE]" in rest, f"an incomplete response: {rest[-200:]!r}"
        writer.close()
    return firsts


def _prompt(random: Random) -> str:
    words = ("river", "stone", "cloud", "garden", "letter", "window", "harbour", "winter", "candle", "bridge")
    return " ".join(random.choice(words) for _ in range(PROMPT_WORDS))
