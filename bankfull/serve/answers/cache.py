"""The response cache: an exact repetition of a deterministic call gets the answer of the first one.

A call is deterministic if it names temperature 0 or a seed itself; embeddings always are. An entry is bound to the API
key, the endpoint, every parameter that the answer depends on, the model's weights and the engine's settings. Nothing is
shared between keys. A stream is kept as its events, and replayed as events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bankfull.build_digest import build_digest
from bankfull.config import parse_bytes
from bankfull.errors import ConfigError
from bankfull.serve.answers.store import AnswerStore, MemoryAnswers, SqliteAnswers, StoredAnswer
from bankfull.serve.api.calls import Api, Caller
from bankfull.serve.api.errors import Problem
from bankfull.serve.api.sse import EventStream
from bankfull.serve.engine.wire import Facts
from bankfull.serve.telemetry.exposition import ScalarMetric

HEADER = b"x-response-cache"
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
EMBEDDING = frozenset({"/v1/embeddings"})
WITHOUT_EFFECT = ("user", "metadata", "timeout", "priority", "safety_identifier", "service_tier")
"""Parameters that do not change an answer."""
MOST_SHARE = 4
"""An answer may take this part of the cache, so that one cannot evict all others."""

Headers = Iterable[tuple[bytes, bytes]]
ReplyHeaders = list[tuple[bytes, bytes]]


def open_store(given: str) -> AnswerStore:
    """The store that `SIZE[:PATH]` names: in memory, or in an SQLite file."""
    size, colon, path = given.partition(":")
    limit = parse_bytes("--response-cache", size.strip()) or 0
    if not colon:
        return MemoryAnswers(limit)
    if not path.strip():
        raise ConfigError(
            f"--response-cache {given!r} has no path behind the colon; name a file, or leave out the colon."
        )
    return SqliteAnswers(limit, Path(path.strip()).expanduser())


class ResponseCache:
    def __init__(
        self,
        store: AnswerStore,
        facts: Callable[[], Facts | None],
        settings: Mapping[str, Any],
        owner: Callable[[Caller], str] = lambda caller: caller.key or "",
    ) -> None:
        """`facts` of the engine, once it is loaded; `settings`: all else that an answer depends on, as JSON values;
        `owner` of a call: nobody else gets its answer."""
        self._store, self._facts, self._owner = store, facts, owner
        self._settings = msgspec.json.encode([build_digest(), dict(settings)], order="deterministic")
        self._outcomes = {"hit": 0, "miss": 0, "bypass": 0}

    async def answer(
        self, api: Api, path: str, body: bytes, caller: Caller, headers: Headers
    ) -> tuple[bytes | EventStream, ReplyHeaders]:
        """The answer of the API, or an earlier one; and headers that tell which. Errors are raised, and not kept."""
        if path not in GENERATING and path not in EMBEDDING:
            return await api.answer(body, caller), []
        wanted = _directives(headers)
        key = None if "no-store" in wanted else self._key(path, body, caller)
        if key is None:
            self._outcomes["bypass"] += 1
            return await api.answer(body, caller), []
        earlier = None if "no-cache" in wanted else await self._store.get(key)
        if earlier is not None:
            self._outcomes["hit"] += 1
            return Replay(earlier.parts) if earlier.streamed else b"".join(earlier.parts), [(HEADER, b"hit")]
        self._outcomes["miss"] += 1
        answer = await api.answer(body, caller)
        miss = [(HEADER, b"miss")]
        if not isinstance(answer, bytes):
            return Recording(answer, lambda parts: self._keep(key, path, body, caller, parts, True), self._most), miss
        await self._keep(key, path, body, caller, [answer], False)
        return answer, miss

    @property
    def problem(self) -> str:
        """Why nothing is kept or found now; empty while all is well."""
        return self._store.problem

    def families(self) -> list[ScalarMetric]:
        """Made anew for each response of /metrics."""
        outcomes = ScalarMetric(
            "counter", "response_cache_requests_total", "Calls by outcome; bypass: not deterministic.", ["outcome"]
        )
        for outcome, count in self._outcomes.items():
            outcomes.set(count, outcome)
        families = [outcomes]
        for kind, name, help, value in (
            ("gauge", "response_cache_bytes", "Bytes of the kept answers.", self._store.size),
            ("gauge", "response_cache_entries", "Kept answers.", self._store.entries),
            ("counter", "response_cache_evictions_total", "Answers evicted for newer ones.", self._store.evictions),
        ):
            family = ScalarMetric(kind, name, help)
            family.set(value)
            families.append(family)
        return families

    def close(self) -> None:
        self._store.close()

    @property
    def _most(self) -> int:
        return self._store.limit // MOST_SHARE

    async def _keep(
        self, key: bytes, path: str, body: bytes, caller: Caller, parts: list[bytes], streamed: bool
    ) -> None:
        # The weights may have been replaced meanwhile.
        if sum(map(len, parts)) <= self._most and self._key(path, body, caller) == key:
            await self._store.put(key, StoredAnswer(parts, streamed))

    def _key(self, path: str, body: bytes, caller: Caller) -> bytes | None:
        """None for a call whose answer is not kept."""
        facts = self._facts()
        if facts is None or b'"cache_control"' in body:  # a replay would pin nothing
            return None
        try:
            call = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if not isinstance(call, dict) or call.get("explain") or not (path in EMBEDDING or _deterministic(call)):
            return None
        options = call.get("stream_options")
        if isinstance(options, dict) and options.get("include_drafts"):
            return None
        for name in WITHOUT_EFFECT:
            call.pop(name, None)
        model = [facts.name, facts.weights, facts.dtype, facts.device, facts.max_len, facts.vocab]
        whole = [self._owner(caller), caller.salt, path, model, call]
        return hashlib.sha256(self._settings + msgspec.json.encode(whole, order="deterministic")).digest()


def _deterministic(call: dict[str, Any]) -> bool:
    heat, seed = call.get("temperature"), call.get("seed")
    return (type(heat) in (int, float) and heat == 0) or type(seed) is int


def _directives(headers: Headers) -> set[str]:
    """The directives of the request's Cache-Control: no-cache asks for a new answer, no-store also keeps it out of the
    cache."""
    values = [value.decode("latin-1").lower() for name, value in headers if name == b"cache-control"]
    return {word.strip() for value in values for word in value.split(",")}


class Recording:
    """A stream that is kept when it has ended whole."""

    def __init__(self, stream: EventStream, keep: Callable[[list[bytes]], Any], most: int) -> None:
        self._stream, self._keep, self._left = stream, keep, most
        self._parts: list[bytes] | None = []

    async def __anext__(self) -> bytes:
        try:
            part = await self._stream.__anext__()
        except StopAsyncIteration:
            parts, self._parts = self._parts, None
            if parts is not None:
                await self._keep(parts)
            raise
        self._left -= len(part)
        if self._left < 0:
            self._parts = None
        elif self._parts is not None:
            self._parts.append(part)
        return part

    async def aclose(self) -> None:
        self._parts = None
        await self._stream.aclose()

    def failure(self, problem: Problem) -> bytes:
        self._parts = None
        return self._stream.failure(problem)


class Replay:
    """The events of an earlier stream."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = iter(parts)

    async def __anext__(self) -> bytes:
        for part in self._parts:
            return part
        raise StopAsyncIteration

    async def aclose(self) -> None:
        pass

    def failure(self, problem: Problem) -> bytes:
        return b""
