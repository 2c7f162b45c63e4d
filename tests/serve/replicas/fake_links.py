"""Links without an engine: a test moves them step by step, ends them at any point, and checks what reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from bankfull.errors import BankfullError
from bankfull.fleet.routing import routing_policy
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.backend import STOPPED, Busy, EngineDied, Unavailable
from bankfull.serve.engine.wire import Facts, Load, PrefixChanges, RequestDone
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.submit import Submit

FACTS = Facts("tiny", 512, 1000, 8, 100, 16, 64, "float32", "cpu")


def token_at(prompt: Sequence[int], seed: int | None, sample: int, position: int) -> int:
    """The token that every engine generates at this position."""
    return Random(f"{list(prompt)} {seed} {sample} {position}").randrange(1000)


def tokens_of(prompt: Sequence[int], params: SamplingParams, sample: int = 0) -> list[int]:
    """The whole answer."""
    assert params.max_tokens is not None
    return [token_at(prompt, params.seed, sample, at) for at in range(params.max_tokens + sample)]


@dataclass
class FakeStream:
    """One request in a fake engine. Sample i generates i tokens more than `max_tokens`."""

    link: FakeLink
    submit: Submit
    queue: asyncio.Queue[list[Delta | RequestDone] | BankfullError] = field(default_factory=asyncio.Queue)
    over: bool = False
    left: bool = False
    worked_on: bool = True
    on_run: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        submit, samples = self.submit, range(self.submit.params.n)
        self.at = [len(tokens) for tokens in submit.generated] or [0] * len(samples)
        self.open = set(samples) - set(submit.finished)
        self.pools = submit.pool is not None
        self.whole = [tokens_of(submit.prompt, submit.params, sample) for sample in samples if not self.pools]
        for sample, tokens in enumerate(submit.generated):
            assert tokens == self.whole[sample][: len(tokens)], "not the tokens so far"

    def step(self) -> None:
        items: list[Delta | RequestDone] = []
        if not self.pools:
            for sample in sorted(self.open):
                token = self.whole[sample][self.at[sample]]
                self.at[sample] += 1
                ends = self.at[sample] == len(self.whole[sample])
                items.append(Delta(1, sample, f"<{token}>", [token], finish_reason="length" if ends else None))
                if ends:
                    self.open.discard(sample)
        if self.pools or not self.open:
            embedding = [1.0] if self.pools else None
            items.append(RequestDone(1, 0.0, 0.0, 0.0, 0, sum(self.at), None, embedding))
            self.over = True
            self.link.streams.remove(self)
        self.queue.put_nowait(items)

    def fail(self, error: BankfullError) -> None:
        if not self.over:
            self.over = True
            self.queue.put_nowait(error)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        if self.over and self.queue.empty():
            raise StopAsyncIteration
        try:
            item = await self.queue.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, BankfullError):
            raise item
        return item

    async def aclose(self) -> None:
        if not self.over:
            self.over = self.left = True
            self.link.streams.remove(self)


@dataclass
class FakeLink:
    facts: Facts | None = field(default_factory=lambda: FACTS)
    ready: bool = True
    most: int = 1000
    """Requests that it admits."""
    load: Load | None = None
    says: str = "It is being loaded."
    phase: str = "ready"
    failure: str | None = None
    restarts: int = 0
    failed_loads: int = 0
    optional: dict[str, str] = field(default_factory=dict)
    on_change: Callable[[], None] | None = None
    on_prefixes: Callable[[PrefixChanges], None] | None = None
    streams: list[FakeStream] = field(default_factory=list)
    sent: list[FakeStream] = field(default_factory=list)
    retry_after: float = 1.0
    resets: int = 0
    closed: bool = False
    works: bool = True
    """Whether it works on a request at once; otherwise the request waits in its queue until a step."""

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        if not self.ready:
            raise Unavailable(self.says)
        if len(self.streams) + samples > self.most:
            raise Busy("It is full.", self.retry_after)

    def generate(self, submit: Submit) -> FakeStream:
        if not submit.admitted:
            self.expect(1)
        elif not self.ready:
            raise Unavailable(self.says)
        # The stream goes on to write in the lists that it has sent.
        generated = [list(tokens) for tokens in submit.generated]
        stream = FakeStream(self, replace(submit, generated=generated, finished=list(submit.finished)))
        stream.worked_on = self.works
        self.streams.append(stream)
        self.sent.append(stream)
        return stream

    async def reset_cache(self) -> int:
        self.resets += 1
        return 5

    async def start(self) -> None:
        pass

    def try_again(self) -> None:
        pass

    async def drain(self, grace: float) -> None:
        await asyncio.sleep(0)
        self.ready = False
        self._end(Unavailable(STOPPED))

    async def close(self) -> None:
        self.closed = True

    def step(self) -> None:
        for stream in list(self.streams):
            stream.step()

    def kill(self) -> None:
        self.ready = False
        self.load = None
        self._end(EngineDied("The engine process has died while the request was running."))
        self._changed()

    def revive(self) -> None:
        self.ready = True
        self.restarts += 1
        self._changed()

    def _end(self, error: BankfullError) -> None:
        ended, self.streams = self.streams, []
        for stream in ended:
            stream.fail(error)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()


def replica_set(*links: FakeLink, patience: float = 5.0) -> ReplicaSet:
    return ReplicaSet(
        {f"r{i}": link for i, link in enumerate(links)}, routing_policy("least-loaded"), patience=patience
    )


@dataclass
class Received:
    """All that a stream has passed on."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    done: list[RequestDone] = field(default_factory=list)

    def take(self, items: Sequence[Delta | RequestDone]) -> None:
        assert items, "an empty step"
        for item in items:
            if isinstance(item, RequestDone):
                self.done.append(item)
            else:
                assert item.index not in self.finished and not self.done, "something came after the end"
                assert item.text == "".join(f"<{token}>" for token in item.token_ids)
                self.tokens.setdefault(item.index, []).extend(item.token_ids)
                if item.finish_reason is not None:
                    self.finished.append(item.index)

    def assert_whole(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Every token once, and one end."""
        assert self.tokens == {i: tokens_of(prompt, params, i) for i in range(params.n)}
        assert sorted(self.finished) == list(range(params.n)) and len(self.done) == 1
        assert self.done[0].output_tokens == sum(map(len, self.tokens.values()))


async def read(stream: Any, received: Received | None = None) -> Received:
    received = Received() if received is None else received
    async for items in stream:
        received.take(items)
    return received
