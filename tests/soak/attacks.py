"""Hostile calls that a client with a key may send to harm others: a corpus of past problems, and random calls.

python -m tests.soak.attacks PORT KEY SECONDS SEED: sends them from its own process, and prints how many.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

from tests.soak.asking import connect, request_of

AT_ONCE = 24
"""Concurrent clients of the attacker."""
NON_READERS = 12
"""Clients that do not read their responses; each holds a connection as long as the server allows."""
USUAL_STAY = 6.0
BODY = 3 << 20
"""Bytes of a large body, below the default limit."""
VARIANTS = 4
"""Variants of each kind of attack."""
BODIES = 10
"""Random bodies per path."""
NICENESS = 15
"""Niceness of the attacker, which stands for another machine: its work must not slow down the server."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    data: bytes
    """All bytes that the client sends."""
    stay: float = USUAL_STAY
    """Seconds until the client disconnects."""
    reads: bool = True


def corpus(key: str, random: Random) -> Iterator[Attack]:
    """Endless attacks, each kind in turn. All are built before the first is sent."""
    at_random = list(_at_random(key, random.randrange(1 << 30)))
    known = [[kind() for _ in range(VARIANTS)] for kind in _kinds(key, random)]
    print("ready", flush=True)
    while True:
        for variants in known:
            yield random.choice(variants)
            yield random.choice(at_random)


def _kinds(key: str, random: Random) -> list[Callable[[], Attack]]:
    def call(name: str, path: str, body: dict[str, Any], *, stay: float = USUAL_STAY, reads: bool = True) -> Attack:
        return Attack(name, request_of(body, path, key), stay, reads)

    def words(count: int) -> str:
        return " ".join(random.choice(("river", "stone", "<", "</s>", "\u6c34", "zq")) for _ in range(count))

    def stops() -> list[str]:
        return [f"{random.random()}" * 12 for _ in range(16)]

    chat, completions, tokenize = "/v1/chat/completions", "/v1/completions", "/tokenize"
    return [
        lambda: call("many samples with stops", completions, {"prompt": "a", "n": 100, "stop": stops()}, stay=0.4),
        lambda: call("stops beyond the limit", completions, {"prompt": "a", "stop": ["x" * 4096] * 64}),
        lambda: call("long prompts", completions, {"prompt": words(100_000), "max_tokens": 1}),
        lambda: call(
            "a prompt as long as fits",
            completions,
            {"prompt": words(1500), "truncate_prompt_tokens": -1, "max_tokens": 1, "prompt_logprobs": 5},
        ),
        lambda: call(
            "long prompts that go on",
            completions,
            {"prompt": words(1500), "truncate_prompt_tokens": 1500, "max_tokens": 8, "ignore_eos": True},
        ),
        lambda: call("pinned prefixes", "/v1/messages", _pinned(words(1200))),
        lambda: call(
            "long answers",
            completions,
            {"prompt": words(20), "n": 32, "max_tokens": 400, "ignore_eos": True, "stream": True},
        ),
        lambda: call(
            "a high priority",
            completions,
            {"prompt": words(200), "n": 8, "max_tokens": 100, "ignore_eos": True, "priority": -1000},
        ),
        lambda: call("a large text to tokenize", tokenize, {"prompt": words(BODY // 5), "return_token_strs": True}),
        lambda: call("a text of one character", tokenize, {"prompt": "<" * BODY}),
        lambda: call(
            "many allowed tokens",
            completions,
            {"prompt": "a", "allowed_token_ids": list(range(200)) * 2000, "max_tokens": 1},
        ),
        lambda: call(
            "a heavy grammar",
            completions,
            {"prompt": "a", "structured_outputs": {"regex": _regex(random)}, "max_tokens": 4},
            stay=0.3,
        ),
        lambda: call(
            "a heavy schema",
            chat,
            {
                "messages": [{"role": "user", "content": "a"}],
                "max_tokens": 4,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _schema(random)}},
            },
            stay=0.3,
        ),
        lambda: call("many embeddings", "/v1/embeddings", {"input": [words(30)] * 200}),
        lambda: call(
            "many messages",
            chat,
            {"messages": [{"role": "user", "content": words(3)} for _ in range(4000)], "max_tokens": 1},
        ),
        lambda: call(
            "an unread response",
            tokenize,
            {"prompt": words(BODY // 6), "return_token_strs": True},
            stay=60.0,
            reads=False,
        ),
        lambda: call(
            "an unread stream",
            completions,
            {"prompt": words(20), "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 5},
            stay=60.0,
            reads=False,
        ),
        lambda: call(
            "leaves before the first token",
            completions,
            {"prompt": words(300), "max_tokens": 50, "stream": True},
            stay=random.random() * 0.05,
        ),
        lambda: _batch(key, words),
        lambda: Attack("a silent connection", b"", stay=60.0),
        lambda: Attack("half a head", b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nx-", stay=60.0),
        lambda: Attack("half a body", request_of({"prompt": "a" * 1000}, completions, key)[:-500], stay=60.0),
        lambda: Attack("no HTTP", os.urandom(200)),
        lambda: Attack("a bad form", _form(key, "x" * random.choice((60, 30_000)), b"no form at all")),
    ]


def _pinned(text: str) -> dict[str, Any]:
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    return {"model": "any", "max_tokens": 2, "system": system, "messages": [{"role": "user", "content": "a"}]}


def _regex(random: Random) -> str:
    parts = [f"(a{{1,{random.randint(20, 60)}}}|b{random.randint(0, 999)}[c-x]{{2,40}})*" for _ in range(12)]
    return "".join(parts) + str(random.random())


def _schema(random: Random) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            f"p{random.randrange(10**6)}": {"type": "string", "pattern": _regex(random)[:60], "maxLength": 200}
            for _ in range(40)
        },
    }


def _form(key: str, boundary: str, content: bytes) -> bytes:
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: multipart/form-data; boundary={boundary}\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _batch(key: str, words: Callable[[int], str]) -> Attack:
    """A file of hostile lines; only `tenants` creates a batch from one."""
    body = {"prompt": words(2000), "truncate_prompt_tokens": 10, "max_tokens": 1, "stop": ["x" * 100] * 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    lines = "\n".join(json.dumps(line | {"custom_id": str(number)}) for number in range(20))
    parts = (
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        f"{lines}\r\n--b--\r\n"
    )
    return Attack("a file of hostile lines", _form(key, "b", parts.encode()))


def _at_random(key: str, number: int) -> Iterator[Attack]:
    """Bodies that hypothesis generates from the OpenAPI document, valid or with one part spoiled."""
    from bankfull.serve.api.openapi import POSTED
    from tests.serve.api.test_openapi_cases import DOCUMENT, spoiled, values_of

    def bodies(schema: dict[str, Any]) -> list[Any]:
        made: list[Any] = []
        collect = given(spoiled(values_of(schema)))(lambda body: made.append(body))
        settings(max_examples=BODIES, database=None, suppress_health_check=list(HealthCheck))(seed(number)(collect))()
        return made

    for path in sorted(POSTED):
        schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for body in bodies(schema):
            yield Attack(f"at random: {path}", request_of(body, path, key))


async def attack(port: int, key: str, seconds: float, number: int) -> Counter[str]:
    """Send the corpus from many clients at once, and count the calls by kind."""
    sent: Counter[str] = Counter()
    attacks = corpus(key, Random(number))
    first: Attack | None = next(attacks)
    end = time.monotonic() + seconds
    idle = asyncio.Semaphore(NON_READERS)

    async def client() -> None:
        nonlocal first
        while time.monotonic() < end:
            one, first = first or next(attacks), None
            if one.stay > USUAL_STAY and idle.locked():
                continue
            sent[one.name] += 1
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                if one.stay > USUAL_STAY:
                    async with idle:
                        await _send(port, one, end)
                else:
                    await _send(port, one, end)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return sent


async def _send(port: int, one: Attack, end: float) -> None:
    reader, writer = await connect(port)
    try:
        async with asyncio.timeout(max(0.01, min(one.stay, end - time.monotonic()))):
            writer.write(one.data)
            await writer.drain()
            while one.reads and await reader.read(1 << 16):
                pass
            if not one.reads:
                await asyncio.sleep(one.stay)
    finally:
        writer.transport.abort()


if __name__ == "__main__":
    os.nice(NICENESS)
    port, key, seconds, number = sys.argv[1:]
    print(json.dumps(asyncio.run(attack(int(port), key, float(seconds), int(number)))))
