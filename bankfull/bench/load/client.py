"""The open-loop client: every conversation begins at its own time, whatever became of those before.

A turn's time counts from when it was due, not from when it could be sent: a server that stalls is charged for all that
waited meanwhile, and so is this client where it is late itself (`Outcome.late` tells).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bankfull.bench.load.clock import PreciseLoop, run_precisely
from bankfull.bench.load.connection import Exchange, Pool
from bankfull.bench.load.events import read_answer, told_error
from bankfull.bench.load.server import Server
from bankfull.bench.load.stalls import Stall
from bankfull.bench.load.workloads import Conversation, Prompt, Turn
from bankfull.errors import ConfigError

LEAD = 0.1
"""Seconds between the last preparation and the beginning."""
TICK = 0.25
HELD_BYTES = 512 << 20
"""Of answers that are kept to be read after the run; what exceeds it is read at once."""
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

Advance = Callable[[int, str], None]
Work = Callable[[], Coroutine[Any, Any, None]]
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Asking:
    """How a server is asked, beyond what each turn says."""

    api: str = "completions"
    ignore_eos: bool = True
    """Answers are then as long as the workload wants."""
    extra: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further fields of every body."""
    pause: float = 0.0
    """Seconds that a conversation rests between an answer and the next question."""
    most: int | None = None
    """Requests at once; None: as many as come."""
    timeout: float = 600.0
    """Seconds from when a turn was due."""

    def __post_init__(self) -> None:
        if self.api not in PATHS:
            raise ConfigError(f"There is no API {self.api!r}; use {' or '.join(PATHS)}.")
        if self.most is not None and self.most < 1:
            raise ConfigError(f"max_concurrency={self.most} must be at least 1.")
        if self.pause < 0 or self.timeout <= 0:
            raise ConfigError("A pause must not be negative, and a timeout must be above 0.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request; times in seconds from the beginning of the run."""

    due: float
    sent: float | None
    times: tuple[float, ...]
    """Of the events that carried tokens."""
    ended: float
    """The last token, or the failure."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    turn: int = 0
    text: str = ""
    finish: str | None = None
    error: str | None = None
    stamped: bool = False
    """Whether the kernel noted when tokens came. Else it is when the client got round to reading them."""

    @property
    def late(self) -> float | None:
        """How long after it was due the request was sent: waiting for a connection, or for the client itself."""
        return None if self.sent is None else self.sent - self.due

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def tpot(self) -> float | None:
        """Per token after the first; None where there is none."""
        if self.output_tokens < 2 or not self.times:
            return None
        return (self.ended - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one event with tokens and the next."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def figures(self) -> dict[str, float | None]:
        """By the names of objectives; the gap is the longest."""
        return {"ttft": self.ttft, "tpot": self.tpot, "itl": max(self.gaps, default=None), "e2e": self.e2e}


@dataclass(slots=True)
class _Talk:
    """A conversation on its way."""

    turns: tuple[Turn, ...]
    said: list[tuple[Prompt, str]] = field(default_factory=list)
    at: int = 0

    @property
    def over(self) -> bool:
        return self.at >= len(self.turns)


class Client:
    """For one run. `run` gives it an event loop; another one may have another clock."""

    def __init__(self, server: Server, asking: Asking, run: Callable[[Work], None] = run_precisely) -> None:
        self._server, self._asking, self._run_within = server, asking, run
        place = server.address
        head = [
            f"POST {place.prefix}{PATHS[asking.api]} HTTP/1.1",
            f"host: {place.host}:{place.port}",
            "accept: text/event-stream",
            *(f"{name}: {value}" for name, value in server.all_headers().items()),
        ]
        if any("\r" in line or "\n" in line for line in head):
            raise ConfigError("A header of a request cannot hold a line break.")
        self._head = "\r\n".join(head).encode("latin-1", "replace")
        self._found: list[tuple[_Talk, int, Exchange]] = []
        self._outcomes: list[Outcome] = []
        self.stalls: list[Stall] = []
        """Of the last run, from its beginning; empty where the loop has another clock."""
        self._held = 0
        self._open: set[Exchange] = set()
        self._left = 0
        self.begun = 0.0
        """In the loop's time; a run's other times count from it."""

    def run(
        self, conversations: Sequence[Conversation], offsets: Sequence[float], advance: Advance | None = None
    ) -> list[Outcome]:
        """In the order in which they ended. `offsets` say when each conversation begins; `advance` is told how many
        requests have ended."""
        if len(conversations) != len(offsets):
            raise ConfigError(f"{len(conversations)} conversations need as many offsets, not {len(offsets)}.")
        self._run_within(lambda: self._run(conversations, offsets, advance))
        for talk, at, exchange in self._found:
            self._outcomes.append(self._outcome(talk, at, exchange))
        self._found.clear()
        return self._outcomes

    async def _run(
        self, conversations: Sequence[Conversation], offsets: Sequence[float], advance: Advance | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self._pool = Pool(self._server.address, self._asking.most)
        talks = [_Talk(conversation.turns) for conversation in conversations]
        # Everything that can be written before is: sending is then one call.
        requests = [self._request(talk) for talk in talks]
        self._left = sum(len(talk.turns) for talk in talks)
        self._all_done = loop.create_future()
        await self._pool.warm_up()
        self.begun = loop.time() + LEAD
        for talk, request, offset in zip(talks, requests, offsets, strict=True):
            loop.call_at(self.begun + offset, self._start, talk, request, self.begun + offset)
        total = self._left
        try:
            while self._left:
                await asyncio.wait([self._all_done], timeout=TICK)
                self._drop_late(loop.time())
                if advance is not None:
                    advance(total - self._left, f"{len(self._open)} on their way")
        finally:
            await self._pool.close()
            if isinstance(loop, PreciseLoop):
                begun = self.begun
                self.stalls = [Stall(s.begin - begun, s.end - begun, s.own) for s in loop.stalls if s.end > begun]

    def _start(self, talk: _Talk, request: bytes, due: float) -> None:
        exchange = Exchange(request, due, lambda ended: self._ended(talk, ended))
        self._open.add(exchange)
        self._pool.send(exchange)

    def _ended(self, talk: _Talk, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self._pool.ended()
        at, talk.at = talk.at, talk.at + 1
        self._held += sum(len(data) for _, data in exchange.parts)
        more = not talk.over
        if more or self._held > HELD_BYTES:
            outcome = self._outcome(talk, at, exchange)
            self._outcomes.append(outcome)
            self._held -= sum(len(data) for _, data in exchange.parts)
            if more and outcome.error is None:
                self._go_on(talk, at, outcome)
            elif more:
                self._left -= len(talk.turns) - talk.at  # what would have followed a failure is not asked
        else:
            self._found.append((talk, at, exchange))
        self._left -= 1
        if not self._left and not self._all_done.done():
            self._all_done.set_result(None)

    def _go_on(self, talk: _Talk, at: int, outcome: Outcome) -> None:
        talk.said.append((talk.turns[at].prompt, outcome.text))
        due = self.begun + outcome.ended + self._asking.pause
        asyncio.get_running_loop().call_at(due, self._start, talk, self._request(talk), due)

    def _drop_late(self, now: float) -> None:
        for exchange in [e for e in self._open if now - e.due > self._asking.timeout]:
            self._pool.drop(exchange, f"no end after {self._asking.timeout:g} s")

    def _outcome(self, talk: _Talk, at: int, exchange: Exchange) -> Outcome:
        answer = read_answer(exchange.parts)
        error = exchange.error or answer.error
        if exchange.status not in (0, 200):
            error = told_error(exchange.status, b"".join(data for _, data in exchange.parts))
        turn = talk.turns[at]
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

    def _request(self, talk: _Talk) -> bytes:
        turn = talk.turns[talk.at]
        body: dict[str, Any] = {"model": self._server.model}
        if self._asking.api == "chat":
            said = [
                message
                for ask, answer in talk.said
                for message in ({"role": "user", "content": ask}, {"role": "assistant", "content": answer})
            ]
            body["messages"] = [*said, {"role": "user", "content": _as_text(turn.prompt)}]
        elif talk.said:
            before = "\n\n".join(f"{_as_text(ask)}{answer}" for ask, answer in talk.said)
            body["prompt"] = f"{before}\n\n{_as_text(turn.prompt)}"
        else:
            body["prompt"] = turn.prompt
        body |= {"max_tokens": turn.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        if self._asking.ignore_eos:
            body["ignore_eos"] = True
        data = _encode(body | dict(self._asking.extra))
        return b"%b\r\ncontent-length: %d\r\n\r\n%b" % (self._head, len(data), data)


def _as_text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise ConfigError("Chats and conversations of several turns need prompts of text; use --prompts text.")
    return prompt


def ask_once(server: Server, asking: Asking, conversation: Conversation) -> Outcome:
    """One request before anything is measured: whether it works at all, told in one sentence, and a warm server."""
    outcome = Client(server, asking).run([conversation], [0.0])[0]
    if outcome.error is not None:
        raise ConfigError(f"{server.address.url} does not answer as it should: {outcome.error.rstrip('.')}.")
    return outcome
