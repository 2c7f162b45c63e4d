"""Clients over HTTP while processes of the replicas are killed: every answer must be that of an undisturbed run.

Requests are drawn from a pool of distinct ones, whose answers are collected first. The clients then ask for them again
and again while a task kills engines and gateways at random moments. All draws come from one seed; the moments depend on
the speed of the machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from tests.soak.asking import connect, request_of
from tests.soak.figures import Figure, percentile

LETTERS = range(3, 97)
"""Token ids of the tiny model that are one printable character each, in the order of the character codes."""
LOGPROB_TOLERANCE = 1e-3
"""Rounding of float32 in batches of different sizes."""
REFUSED = (429, 503)
"""Statuses of a request that was refused before it began: the client tries again."""
RETRY_SECONDS = 0.1
LONGEST_ANSWER = 300.0


class Stormed(Protocol):
    """A server with replicas, and its processes."""

    url: str

    def engines(self) -> list[int]: ...

    def gateways(self) -> list[int]: ...

    def replicas(self) -> list[dict[str, Any]]: ...


# -- requests


def requests_of(random: Random, count: int) -> list[dict[str, Any]]:
    """Distinct requests of all kinds, in turn."""
    kinds = (_greedy, _sampled, _samples, _penalties, _grammar, _stop_strings, _unseeded)
    return [kinds[number % len(kinds)](random) for number in range(count)]


def _common(random: Random) -> dict[str, Any]:
    prompt = [random.randrange(3, 300) for _ in range(random.randint(1, 40))]
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": random.randint(20, 60),
        "seed": random.getrandbits(31),
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _greedy(random: Random) -> dict[str, Any]:
    return _common(random) | {"temperature": 0.0}


def _sampled(random: Random) -> dict[str, Any]:
    return _common(random) | {"temperature": 0.9, "top_p": 0.95, "logprobs": 2}


def _samples(random: Random) -> dict[str, Any]:
    return _common(random) | {"n": 3, "max_tokens": random.randint(10, 30)}


def _penalties(random: Random) -> dict[str, Any]:
    return _common(random) | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 10}


def _grammar(random: Random) -> dict[str, Any]:
    regex = f"[a-f]{{{random.randint(10, 25)}}}-[0-9]{{{random.randint(10, 25)}}}"
    return _common(random) | {"structured_outputs": {"regex": regex}, "max_tokens": 80, "ignore_eos": False}


def _stop_strings(random: Random) -> dict[str, Any]:
    return _common(random) | {"stop": [random.choice("etaoin"), random.choice("shrdlu") + "e"], "max_tokens": 80}


def _unseeded(random: Random) -> dict[str, Any]:
    """Its answer differs each time: it is checked by computing its log-probabilities again from its tokens."""
    call = _common(random) | {"allowed_token_ids": list(LETTERS)}
    del call["seed"]
    return call


# -- answers


@dataclass
class SampleAnswer:
    tokens: list[str] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None

    def equals(self, other: SampleAnswer) -> bool:
        same = (self.tokens, self.text, self.finish) == (other.tokens, other.text, other.finish)
        return same and close(self.logprobs, other.logprobs)


def close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= LOGPROB_TOLERANCE * max(1.0, abs(a)) for a, b in zip(one, other, strict=True)
    )


@dataclass
class StreamAnswer:
    problem: str = ""
    samples: dict[int, SampleAnswer] = field(default_factory=dict)
    counted: int = -1
    """Tokens of the answer, as the server has counted them."""
    begun: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """Times of all parts of the stream."""

    def equals(self, usual: StreamAnswer) -> bool:
        same = not self.problem and self.counted == usual.counted and self.samples.keys() == usual.samples.keys()
        return same and all(sample.equals(usual.samples[number]) for number, sample in self.samples.items())

    @property
    def complete(self) -> bool:
        """Whether every sample has ended once, and the server has counted its tokens as they came."""
        tokens = sum(len(sample.tokens) for sample in self.samples.values())
        return not self.problem and tokens == self.counted and all(s.finish for s in self.samples.values())

    def gap_at(self, moment: float) -> tuple[float, float] | None:
        """The times of the two parts between which the moment lies; None if the stream did not run then."""
        times = [self.begun, *self.arrivals]
        at = bisect_right(times, moment)
        return (times[at - 1], times[at]) if 0 < at < len(times) else None


def parsed(body: bytes) -> StreamAnswer:
    answer = StreamAnswer()
    for line in body.split(b"\n"):
        start = line.find(b"data: {")
        if start < 0:
            continue
        event = json.loads(line[start + 6 :])
        if "error" in event:
            answer.problem = str(event["error"])
            return answer
        if event.get("usage"):
            answer.counted = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            sample = answer.samples.setdefault(choice["index"], SampleAnswer())
            if sample.finish is not None:
                answer.problem = "something came after the end of a sample"
            sample.text += choice["text"]
            lines = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
            sample.tokens += lines["tokens"]
            sample.logprobs += lines["token_logprobs"]
            sample.finish = choice.get("finish_reason") or sample.finish
    if b"data: [DONE]" not in body:
        answer.problem = answer.problem or f"the stream has no end: ...{body[-200:]!r}"
    return answer


async def streamed(port: int, call: dict[str, Any]) -> StreamAnswer:
    """One request; asked again while it is refused before it began."""
    while True:
        begun = time.monotonic()
        arrivals: list[float] = []
        body = b""
        reader, writer = await connect(port)
        try:
            writer.write(request_of(call))
            async with asyncio.timeout(LONGEST_ANSWER):
                while part := await reader.read(1 << 20):
                    arrivals.append(time.monotonic())
                    body += part
        except (TimeoutError, OSError) as error:
            return StreamAnswer(f"{error!r} after {body[-200:]!r}")
        finally:
            writer.close()
        status = int(body[9:12]) if body.startswith(b"HTTP/1.1 ") else 0
        if status in REFUSED:
            await asyncio.sleep(RETRY_SECONDS)
            continue
        answer = parsed(body) if status == 200 else StreamAnswer(f"status {status}: {body[-300:]!r}")
        answer.begun, answer.arrivals = begun, arrivals
        return answer


async def whole_reply(port: int, call: dict[str, Any]) -> dict[str, Any]:
    reader, writer = await connect(port)
    try:
        writer.write(request_of(call))
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    assert head.startswith(b"HTTP/1.1 200"), (head, body)
    reply: dict[str, Any] = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])
    return reply


async def rescored(port: int, call: dict[str, Any], answer: StreamAnswer) -> bool:
    """Whether the log-probabilities of the answer are those of its own tokens: a lost or doubled one would change all
    that follow."""
    first = ord("!")
    tokens = [LETTERS[ord(token) - first] for token in answer.samples[0].tokens]
    again = {"model": "tiny", "prompt": call["prompt"] + tokens, "max_tokens": 1, "echo": True, "logprobs": 0}
    choice = (await whole_reply(port, again))["choices"][0]
    found = choice["logprobs"]["token_logprobs"][len(call["prompt"]) : len(call["prompt"]) + len(tokens)]
    return len(tokens) == call["max_tokens"] and close(answer.samples[0].logprobs, found)


def difference(call: dict[str, Any], answer: StreamAnswer, usual: StreamAnswer) -> str:
    """One line for the report."""
    kind = ", ".join(sorted(call.keys() - _common(Random(0)).keys())) or "no seed"
    if answer.problem:
        return f"[{kind}] {answer.problem}"
    if not answer.complete:
        return f"[{kind}] counted {answer.counted} tokens, got {answer.samples}"
    if "seed" not in call:
        return f"[{kind}] the log-probabilities are not those of the tokens {answer.samples}"
    for number, sample in usual.samples.items():
        got = answer.samples.get(number)
        if got is None:
            return f"[{kind}] sample {number} is missing"
        if not got.equals(sample):
            pairs = zip(got.tokens, sample.tokens, strict=False)
            at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
            return (
                f"[{kind}] sample {number}: {len(got.tokens)} tokens and {got.finish}, not {len(sample.tokens)} and "
                f"{sample.finish}; first other token at {at}; text {got.text!r}, not {sample.text!r}; "
                f"log-probabilities {got.logprobs}, not {sample.logprobs}"
            )
    return f"[{kind}] counted {answer.counted} tokens, not {usual.counted}"


# -- kills


@dataclass
class Kill:
    moment: float
    what: str
    left: int
    """Replicas that were ready when it was killed, without its own."""


class Killer:
    """Kills a process whenever two replicas are ready, and now and then all engines at once."""

    def __init__(self, server: Stormed, random: Random, pause: float, *, all_at_once: int) -> None:
        """`pause`: the mean time between two kills, in seconds. `all_at_once`: kills after which all engines are killed
        at once; 0: they never are."""
        self._server, self._random, self._pause, self._all = server, random, pause, all_at_once
        self.kills: list[Kill] = []

    async def run(self, most: int) -> None:
        while len(self.kills) < most:
            await asyncio.sleep(self._pause * 2 * self._random.random())
            ready = await asyncio.to_thread(self._ready)
            if ready >= 2:
                await asyncio.to_thread(self._kill, ready)

    def _ready(self) -> int:
        return sum(replica["state"] == "ready" for replica in self._server.replicas())

    def _kill(self, ready: int) -> None:
        engines, gateways = self._server.engines(), self._server.gateways()
        if self._all and len(self.kills) % self._all == self._all - 1:
            for pid in engines:
                self._end(pid, "engine", 0)
        elif gateways and self._random.random() < 0.3:
            self._end(self._random.choice(gateways), "gateway", ready - 1)
        elif engines:
            self._end(self._random.choice(engines), "engine", ready - 1)

    def _end(self, pid: int, what: str, left: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.kills.append(Kill(time.monotonic(), what, left))


# -- the trial


@dataclass
class Storm:
    requests: int
    kills: list[Kill]
    resumed: int
    different: list[str]
    """The answers that differ, each with its request."""
    answers: list[StreamAnswer]
    seconds: float

    def pauses(self, *, left: bool) -> list[float]:
        """The longest pause of a stream for each kill: of the streams for which another replica was left all the time,
        or of those for which none was."""
        none = [kill.moment for kill in self.kills if not kill.left]
        found = []
        for kill in self.kills:
            gaps = [gap for answer in self.answers if (gap := answer.gap_at(kill.moment)) is not None]
            lengths = [end - start for start, end in gaps if any(start <= at <= end for at in none) != left]
            if lengths:
                found.append(max(lengths))
        return found

    def figures(self) -> list[Figure]:
        some, none = self.pauses(left=True), self.pauses(left=False)
        kinds = [kill.what for kill in self.kills]
        return [
            Figure("storm: requests", self.requests),
            Figure("storm: killed engines", kinds.count("engine")),
            Figure("storm: killed gateways", kinds.count("gateway")),
            Figure("storm: resumed requests", self.resumed, least=1),
            Figure("storm: lost or different answers", len(self.different), most=0),
            Figure("storm: longest pause of a stream after a kill, median", percentile(some, 0.5), "s"),
            Figure("storm: the same, p99 of the kills", percentile(some, 0.99), "s"),
            Figure("storm: the same, worst", max(some, default=0.0), "s"),
            Figure("storm: worst pause with all engines killed at once", max(none, default=0.0), "s"),
            Figure("storm: duration", self.seconds, "s"),
        ]


async def storm(
    server: Stormed,
    *,
    requests: int,
    kills: int,
    distinct: int,
    seed: int,
    at_once: int = 16,
    pause: float = 0.5,
    all_at_once: int = 0,
) -> Storm:
    """At least so many requests and kills."""
    random, port = Random(seed), int(server.url.rpartition(":")[2])
    calls = requests_of(random, distinct)
    usual = [await streamed(port, call) for call in calls]
    for call, answer in zip(calls, usual, strict=True):
        assert answer.complete, (call, answer)
        if "seed" not in call:
            assert await rescored(port, call, answer), "the undisturbed answer itself"
    before = sum(replica["resumed"] for replica in server.replicas())
    killer = Killer(server, Random(seed + 1), pause, all_at_once=all_at_once)
    killing = asyncio.ensure_future(killer.run(kills))
    asked: list[int] = []
    answers: list[tuple[int, StreamAnswer]] = []
    begun = time.monotonic()

    async def client() -> None:
        while len(asked) < requests or not killing.done():
            number = random.randrange(distinct)
            asked.append(number)
            answers.append((number, await streamed(port, calls[number])))

    try:
        await asyncio.gather(killing, *(client() for _ in range(at_once)))
    finally:
        killing.cancel()
    seconds = time.monotonic() - begun
    different = []
    for number, answer in answers:
        call = calls[number]
        same = answer.complete and (
            answer.equals(usual[number]) if "seed" in call else await rescored(port, call, answer)
        )
        if not same:
            different.append(difference(call, answer, usual[number]))
    resumed = sum(replica["resumed"] for replica in server.replicas()) - before
    return Storm(len(answers), killer.kills, resumed, different, [answer for _, answer in answers], seconds)
