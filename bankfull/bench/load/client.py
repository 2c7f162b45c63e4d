"""The open-loop client: every conversation begins at its scheduled time, whatever happened to earlier ones.

Latency counts from when a turn was due, not from when it was sent. A server that stalls is charged for all requests
that waited meanwhile, and so is this client if it is late itself (see `Outcome.late`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from bankfull.bench.load.clock import PreciseLoop, run_precisely
from bankfull.bench.load.connection import ConnectionPool, Exchange
from bankfull.bench.load.events import error_summary, parse_stream
from bankfull.bench.load.server import ServerUnderTest
from bankfull.bench.load.stalls import Stall
from bankfull.bench.load.workloads import Conversation, ConversationTurn, Prompt
from bankfull.errors import ConfigError

LEAD = 0.1
"""Seconds between the end of preparation and the first scheduled request."""
TICK = 0.25
HELD_BYTES = 512 << 20
"""Bytes of responses kept for parsing after the run; responses beyond that are parsed at once."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Advance = Callable[[int, str], None]
LoopMain = Callable[[], Coroutine[Any, Any, None]]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How requests are sent, beyond the contents of each turn."""

    api: str = "completions"
    ignore_eos: bool = True
    """Generate exactly the workload's number of output tokens."""
    extra: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further fields of every request body."""
    pause: float = 0.0
    """Seconds between a response and the next turn of its conversation."""
    max_concurrency: int | None = None
    """Concurrent requests at most; None: unbounded."""
    timeout: float = 600.0
    """Seconds from when a turn was due to when it is aborted."""

    def __post_init__(self) -> None:
        if self.api not in PATHS:
            raise ConfigError(f"The API {self.api!r} is unknown; use {' or '.join(PATHS)}.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency} must be at least 1.")
        if self.pause < 0 or self.timeout <= 0:
            raise ConfigError(
                f"pause={self.pause} must not be negative, and timeout={self.timeout} must be above 0 seconds."
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one request; times are in seconds from the start of the run."""

    due: float
    sent: float | None
    times: tuple[float, ...]
    """Arrival times of the events that carried tokens."""
    ended: float
    """Time of the last token, or of the failure."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    turn: int = 0
    text: str = ""
    finish: str | None = None
    error: str | None = None
    stamped: bool = False
    """Whether token times are kernel timestamps. Otherwise they are when the client read the bytes."""

    @property
    def late(self) -> float | None:
        """Delay from due to sent: waiting for a connection, or the client itself."""
        return None if self.sent is None else self.sent - self.due

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or not self.times:
            return None
        return (self.ended - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: gaps between consecutive events with tokens."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def figures(self) -> dict[str, float | None]:
        """Figures by the names of objectives; `itl` is the longest gap."""
        return {"ttft": self.ttft, "tpot": self.tpot, "itl": max(self.gaps, default=None), "e2e": self.e2e}


@dataclass(slots=True)
class _Dialogue:
    """A conversation in progress."""

    turns: tuple[ConversationTurn, ...]
    said: list[tuple[Prompt, str]] = field(default_factory=list)
    at: int = 0

    @property
    def over(self) -> bool:
        return self.at >= len(self.turns)


class LoadClient:
    """Runs one load. `run` executes a coroutine on an event loop; tests pass a loop with another clock."""

    def __init__(
        self, server: ServerUnderTest, request_options: RequestOptions, run: Callable[[LoopMain], None] = run_precisely
    ) -> None:
        self._server, self._request_options, self._run_within = server, request_options, run
        place = server.address
        head = [
            f"POST {place.prefix}{PATHS[request_options.api]} HTTP/1.1",
            f"host: {place.host}:{place.port}",
            "accept: text/event-stream",
            *(f"{name}: {value}" for name, value in server.all_headers().items()),
        ]
        if any("\r" in line or "\n" in line for line in head):
            raise ConfigError("A request header contains a line break; check the API key and the headers.")
        self._head = "\r\n".join(head).encode("latin-1", "replace")
        self._found: list[tuple[_Dialogue, int, Exchange]] = []
        self._outcomes: list[Outcome] = []
        self.stalls: list[Stall] = []
        """Stalls of the last run, from its start; empty if the loop has another clock."""
        self._held = 0
        self._open: set[Exchange] = set()
        self._left = 0
        self.begun = 0.0
        """Start of the run in the loop's time; all other times count from it."""

    def run(
        self, conversations: Sequence[Conversation], offsets: Sequence[float], advance: Advance | None = None
    ) -> list[Outcome]:
        """Outcomes in order of completion. `offsets`: start of each conversation. `advance`: callback with the number
        of completed requests."""
        if len(conversations) != len(offsets):
            raise ConfigError(f"{len(conversations)} conversations need as many offsets, not {len(offsets)}.")
        self._run_within(lambda: self._run(conversations, offsets, advance))
        for dialogue, at, exchange in self._found:
            self._outcomes.append(self._outcome(dialogue, at, exchange))
        self._found.clear()
        return self._outcomes

    async def _run(
        self, conversations: Sequence[Conversation], offsets: Sequence[float], advance: Advance | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._pool = ConnectionPool(self._server.address, self._request_options.max_concurrency)
        dialogues = [_Dialogue(conversation.turns) for conversation in conversations]
        # First requests are serialized before the run, so that sending is a single call.
        requests = [self._request(dialogue) for dialogue in dialogues]
        self._left = sum(len(dialogue.turns) for dialogue in dialogues)
        self._all_done = loop.create_future()
        await self._pool.warm_up()
        self.begun = loop.time() + LEAD
        for dialogue, request, offset in zip(dialogues, requests, offsets, strict=True):
            loop.call_at(self.begun + offset, self._start, dialogue, request, self.begun + offset)
        total = self._left
        try:
            while self._left:
                await asyncio.wait([self._all_done], timeout=TICK)
                self._drop_late(loop.time())
                if advance is not None:
                    advance(total - self._left, f"{len(self._open)} in flight")
        finally:
            await self._pool.close()
            if isinstance(loop, PreciseLoop):
                begun = self.begun
                self.stalls = [Stall(s.begin - begun, s.end - begun, s.own) for s in loop.stalls if s.end > begun]

    def _start(self, dialogue: _Dialogue, request: bytes, due: float) -> None:
        exchange = Exchange(request, due, lambda ended: self._ended(dialogue, ended))
        self._open.add(exchange)
        self._pool.send(exchange)

    def _ended(self, dialogue: _Dialogue, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self._pool.ended()
        at, dialogue.at = dialogue.at, dialogue.at + 1
        self._held += sum(len(data) for _, data in exchange.parts)
        more = not dialogue.over
        if more or self._held > HELD_BYTES:
            outcome = self._outcome(dialogue, at, exchange)
            self._outcomes.append(outcome)
            self._held -= sum(len(data) for _, data in exchange.parts)
            if more and outcome.error is None:
                self._go_on(dialogue, at, outcome)
            elif more:
                self._left -= len(dialogue.turns) - dialogue.at  # turns after a failed one are skipped
        else:
            self._found.append((dialogue, at, exchange))
        self._left -= 1
        if not self._left and not self._all_done.done():
            self._all_done.set_result(None)

    def _go_on(self, dialogue: _Dialogue, at: int, outcome: Outcome) -> None:
        dialogue.said.append((dialogue.turns[at].prompt, outcome.text))
        due = self.begun + outcome.ended + self._request_options.pause
        asyncio.get_running_loop().call_at(due, self._start, dialogue, self._request(dialogue), due)

    def _drop_late(self, now: float) -> None:
        for exchange in [e for e in self._open if now - e.due > self._request_options.timeout]:
            self._pool.drop(exchange, f"timed out after {self._request_options.timeout:g} s")

    def _outcome(self, dialogue: _Dialogue, at: int, exchange: Exchange) -> Outcome:
        answer = parse_stream(exchange.parts)
        error = exchange.error or answer.error
        if exchange.status not in (0, 200):
            error = error_summary(exchange.status, b"".join(data for _, data in exchange.parts))
        turn = dialogue.turns[at]
        assert exchange.ended is not None
        ended = exchange.ended if answer.last is None or error is not None else answer.last
        return Outcome(
            exchange.due - self.begun,
            None if exchange.sent is None else exchange.sent - self.begun,
            tuple(time - self.begun for time in answer.times),
            ended - self.begun,
            answer.input_tokens if answer.input_tokens is not None else turn.tokens or 0,
            answer.output_tokens if answer.output_tokens is not None else len(answer.times),
            answer.cached_tokens,
            at,
            answer.text,
            answer.finish,
            error,
            exchange.stamped and error is None,
        )

    def _request(self, dialogue: _Dialogue) -> bytes:
        turn = dialogue.turns[dialogue.at]
        body: dict[str, Any] = {"model": self._server.model}
        if self._request_options.api == "chat":
            said = [
                message
                for ask, answer in dialogue.said
                for message in ({"role": "user", "content": ask}, {"role": "assistant", "content": answer})
            ]
            body["messages"] = [*said, {"role": "user", "content": _as_text(turn.prompt)}]
        elif dialogue.said:
            before = "\n\n".join(f"{_as_text(ask)}{answer}" for ask, answer in dialogue.said)
            body["prompt"] = f"{before}\n\n{_as_text(turn.prompt)}"
        else:
            body["prompt"] = turn.prompt
        body |= {"max_tokens": turn.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self._request_options.ignore_eos:
            body["ignore_eos"] = True
        data = _encode(body | dict(self._request_options.extra))
        return b"%b\r\ncontent-length: %d\r\n\r\n%b" % (self._head, len(data), data)


def _as_text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ConfigError("Chats and conversations of several turns need text prompts; use --prompts text.")
    return prompt


def ask_once(
    server: ServerUnderTest,
    request_options: RequestOptions,
    conversation: Conversation,
    advance: Advance | None = None,
    count: int = 1,
) -> Outcome:
    """One request before the run, or `count` equal ones where the server waits for a batch. It warms the server up and
    reports a broken server in one sentence. `advance`: told what is waited for."""

    def wait(done: int, note: str) -> None:
        if advance is not None:
            advance(0, "waiting for the answer to a test request")

    options = replace(request_options, max_concurrency=None)
    outcomes = LoadClient(server, options).run([conversation] * count, [0.0] * count, wait)
    for outcome in outcomes:
        if outcome.error is not None:
            raise ConfigError(f"The test request to {server.address.url} failed: {outcome.error.rstrip('.')}.")
    return outcomes[0]
