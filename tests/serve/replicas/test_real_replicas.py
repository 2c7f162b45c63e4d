"""Two real engine processes with a tiny model: one is killed, and its streams go on with the tokens of an undisturbed
run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

import pytest

from bankfull import SamplingParams
from bankfull.fleet.prefixes import PromptKeys
from bankfull.fleet.routing import routing_policy
from bankfull.outputs import Delta
from bankfull.sample.params import StructuredOutput
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.engine.backend import EngineDied, Unavailable
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.wire import Begun, RequestDone, StepMessage
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.resume import MOST_BARREN
from bankfull.submit import Submit
from tests.serve.engine_kit import OPTIONS, until
from tests.tiny import speaking_folder

PROMPT = list(range(40, 60))
Items = list[Delta | RequestDone]


def make_link() -> Link:
    return Link(str(speaking_folder()), OPTIONS, threads=1, tells_prefixes=True)


class Mute:
    """Between a link and its engines. A test decides after which message an engine is silent: on a busy machine it may
    write all of an answer before a signal reaches it."""

    def __init__(self, link: Link) -> None:
        self._link, self._pass_on = link, link._receive
        self._silent: set[int | None] = set()
        self.silent_after: tuple[int, Callable[[], None]] | None = None
        """Tokens of answers until the engine is silent, and the call that follows."""
        link._receive = self._receive  # type: ignore[method-assign]

    def silence(self) -> None:
        """Nothing more is received from the present engine."""
        self._silent.add(self._link.engine_pid)

    def _receive(self, message: Any) -> None:
        if self._link.engine_pid in self._silent:
            return
        self._pass_on(message)
        if self.silent_after is not None and isinstance(message, StepMessage):
            left = self.silent_after[0] - sum(len(delta.token_ids) for delta in message.deltas)
            call = self.silent_after[1]
            self.silent_after = (left, call) if left > 0 else None
            if left <= 0:
                self.silence()
                call()


class Replicas:
    """The set, its links, and the event loop on which all of it runs."""

    def __init__(self) -> None:
        self.links = {"a": make_link(), "b": make_link()}
        self.mutes = {name: Mute(link) for name, link in self.links.items()}
        self.set = ReplicaSet(self.links, routing_policy("least-loaded"), patience=60.0)
        self.runner = asyncio.Runner()

    def run(self, what: Callable[[Replicas], Awaitable[None]], timeout: float = 120.0) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(what(self), timeout)

        self.runner.run(bounded())

    async def both_ready(self) -> None:
        await until(lambda: all(link.ready for link in self.links.values()), 120)

    def kill(self, name: str) -> None:
        """From now on nothing of its engine is received."""
        self.mutes[name].silence()
        pid = self.links[name].engine_pid
        assert pid
        os.kill(pid, signal.SIGKILL)

    def silent_after(self, tokens: int, call: Callable[[str], None]) -> None:
        """Of the only request: nothing of its engine is received after these tokens. `call` gets the replica's name."""
        name = self.where()
        self.mutes[name].silent_after = tokens, lambda: call(name)

    async def replace(self, name: str) -> None:
        """A replica again that was removed."""
        self.links[name] = make_link()
        self.mutes[name] = Mute(self.links[name])
        await self.set.add(name, self.links[name])

    def resumed(self) -> int:
        return sum(view.resumed for view in self.set.views())

    def where(self) -> str:
        """The replica of the only request."""
        [name] = [view.name for view in self.set.views() if view.requests]
        return name


@contextmanager
def running(made: Replicas) -> Iterator[Replicas]:
    async def start(made: Replicas) -> None:
        await made.set.start()
        await made.both_ready()

    try:
        made.run(start, timeout=240.0)
        yield made
    finally:
        made.runner.run(made.set.close())
        made.runner.close()


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with running(Replicas()) as made:
        yield made


async def collect(stream: AsyncIterator[Items]) -> Items:
    return [item async for items in stream for item in items]


async def collect_with_kill(made: Replicas, params: SamplingParams, tokens: int = 5, **how: Any) -> Items:
    """The engine dies after a few tokens of each sample."""
    stream = made.set.generate(Submit(PROMPT, params, **how))
    made.silent_after(tokens * params.n, made.kill)
    return await collect(stream)


def told(items: Items) -> dict[int, tuple[list[int], str, list[Any], str | None]]:
    """Of each sample: tokens, text, log-probabilities of the chosen tokens, and the reason of its end."""
    found: dict[int, tuple[list[int], str, list[Any], str | None]] = {}
    for item in items:
        if isinstance(item, Delta):
            tokens, text, scores, finish = found.get(item.index, ([], "", [], None))
            assert finish is None, "something came after the end"
            fresh = [next(iter(line)) for line in item.logprobs or ()]
            found[item.index] = tokens + item.token_ids, text + item.text, scores + fresh, item.finish_reason
    assert isinstance(items[-1], RequestDone) and sum(isinstance(item, RequestDone) for item in items) == 1
    assert items[-1].output_tokens == sum(len(tokens) for tokens, *_ in found.values())
    return found


CASES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
    "sampled": SamplingParams(seed=5, max_tokens=150, ignore_eos=True, top_p=0.95, logprobs=2),
    "samples": SamplingParams(seed=6, max_tokens=100, ignore_eos=True, n=3),
    "penalties": SamplingParams(
        seed=7, max_tokens=150, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=30
    ),
    "grammar": SamplingParams(seed=8, max_tokens=150, structured=StructuredOutput(regex="[ab]{80}[cd]{60}")),
    "prompt logprobs": SamplingParams(seed=9, max_tokens=150, ignore_eos=True, prompt_logprobs=1),
}


@pytest.mark.parametrize(
    "case", [case if case in ("samples", "grammar") else pytest.param(case, marks=pytest.mark.full) for case in CASES]
)
def test_a_killed_engine_costs_a_stream_no_token(replicas: Replicas, case: str) -> None:
    params = CASES[case]

    async def check(made: Replicas) -> None:
        await made.both_ready()
        usual = await collect(made.set.generate(Submit(PROMPT, params)))
        before = made.resumed()
        items = await collect_with_kill(made, params)
        assert told(items) == told(usual)
        assert made.resumed() == before + 1
        if params.prompt_logprobs is not None:
            assert isinstance(items[-1], RequestDone) and isinstance(usual[-1], RequestDone)
            assert items[-1].prompt_logprobs == usual[-1].prompt_logprobs is not None

    replicas.run(check)


@pytest.mark.full
def test_a_request_without_a_seed_goes_on_as_it_began(replicas: Replicas) -> None:
    """The front draws its seed: the second engine must not draw another one."""

    async def check(made: Replicas) -> None:
        await made.both_ready()
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        seeds: list[int | None] = []
        for link in made.links.values():
            _record_seeds(link, seeds)
        try:
            items = await collect_with_kill(made, params)
        finally:
            for link in made.links.values():
                del link.generate  # type: ignore[method-assign]
        assert len(seeds) == 2 and seeds[0] is not None and seeds[0] == seeds[1]
        await made.both_ready()
        again = await collect(made.set.generate(Submit(PROMPT, params.seeded(seeds[0]))))
        assert told(items) == told(again)

    replicas.run(check)


def _record_seeds(link: Link, seeds: list[int | None]) -> None:
    generate = link.generate

    def recording(prompt: list[int], params: SamplingParams, **how: Any) -> AsyncIterator[Items]:
        seeds.append(params.seed)
        return generate(prompt, params, **how)

    link.generate = recording  # type: ignore[method-assign, assignment]


@pytest.mark.full
def test_an_embedding_and_batch_work_survive_too(replicas: Replicas) -> None:
    async def check(made: Replicas) -> None:
        await made.both_ready()
        params = SamplingParams(max_tokens=1)
        usual = await collect(made.set.generate(Submit(PROMPT, params, pool="mean")))
        before = made.resumed()
        stream = made.set.generate(Submit(PROMPT, params, pool="mean"))
        made.kill(made.where())
        found = await collect(stream)
        assert found[-1].embedding == usual[-1].embedding is not None  # type: ignore[union-attr]
        await made.both_ready()
        batch = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        usual = await collect(made.set.generate(Submit(PROMPT, batch, priority=BATCH_PRIORITY)))
        items = await collect_with_kill(made, batch, 1, priority=BATCH_PRIORITY)
        assert told(items) == told(usual) and made.resumed() == before + 2

    replicas.run(check)


def test_a_drained_replica_hands_its_streams_over(replicas: Replicas) -> None:
    params = SamplingParams(seed=2, max_tokens=150, ignore_eos=True)

    async def check(made: Replicas) -> None:
        await made.both_ready()
        usual = await collect(made.set.generate(Submit(PROMPT, params)))
        removing: list[asyncio.Task[None]] = []
        stream = made.set.generate(Submit(PROMPT, params))
        name = made.where()
        made.silent_after(1, lambda name: removing.append(asyncio.ensure_future(made.set.remove(name, grace=0.0))))
        assert told(await collect(stream)) == told(usual)
        await removing[0]
        assert [view.name for view in made.set.views()] == [other for other in made.links if other != name]
        await made.replace(name)
        await made.both_ready()

    replicas.run(check)


def test_the_set_knows_which_real_engine_holds_a_prefix(replicas: Replicas) -> None:
    """The keys that a real engine reports reach its replica's digest, and leave it when the engine ends."""
    params = SamplingParams(seed=2, max_tokens=4, ignore_eos=True)
    prompt = list(range(100, 180))

    async def check(made: Replicas) -> None:
        await made.both_ready()
        await made.set.reset_cache()
        stream = made.set.generate(Submit(prompt, params))
        name = made.where()
        await collect(stream)
        keys = PromptKeys(prompt, "", OPTIONS["page_tokens"])

        def held(one: str, keys: PromptKeys) -> int:
            return made.set._index.cached_tokens(keys).at(made.set._replicas[one].slot)

        await until(lambda: held(name, keys) >= 76)
        [other] = made.links.keys() - {name}
        assert held(other, keys) == 0
        other_salt = PromptKeys(prompt, "another key", OPTIONS["page_tokens"])
        assert held(name, other_salt) == 0
        made.kill(name)
        await until(lambda: not made.links[name].ready)
        assert held(name, keys) == 0

    replicas.run(check)


def _kills_when_begun(made: Replicas, name: str, prompt: list[int]) -> None:
    """The engine of this replica dies as soon as it begins to compute this prompt."""
    link = made.links[name]
    generate, receive = link.generate, link._receive
    killers: set[int] = set()

    def watched(asked: list[int], params: SamplingParams, **how: Any) -> Any:
        stream = generate(asked, params, **how)
        if asked == prompt:
            killers.add(stream.id)
        return stream

    def received(message: Any) -> None:
        receive(message)
        if isinstance(message, Begun) and killers.intersection(message.ids) and link.engine_pid:
            made.kill(name)

    link.generate, link._receive = watched, received  # type: ignore[method-assign, assignment]


@pytest.mark.full
def test_only_the_request_that_kills_its_engines_is_given_up() -> None:
    killer = list(range(200, 230))
    params = SamplingParams(seed=3, max_tokens=40, ignore_eos=True)
    others = [list(range(number, number + 10)) for number in range(12)]

    async def check(made: Replicas) -> None:
        usual = [told(await collect(made.set.generate(Submit(prompt, params)))) for prompt in others]
        before = made.set.restarts
        doomed = asyncio.ensure_future(collect(made.set.generate(Submit(killer, SamplingParams(max_tokens=100)))))
        found = await asyncio.gather(*(collect(made.set.generate(Submit(prompt, params))) for prompt in others))
        assert [told(items) for items in found] == usual
        with pytest.raises(EngineDied, match="it is not tried again"):
            await doomed
        await made.both_ready()
        assert made.set.restarts - before == MOST_BARREN
        assert told(await collect(made.set.generate(Submit(others[0], params)))) == usual[0]

    made = Replicas()
    for name in made.links:
        _kills_when_begun(made, name, killer)
    with running(made):
        made.run(check, timeout=240.0)


STEPS_BEFORE_A_KILL = 150
"""Steps of an engine before it is killed: about as many as the queue of the storm needs to reach its end."""


@asynccontextmanager
async def kills(made: Replicas, random: Random, pause: float) -> AsyncIterator[list[str]]:
    """Kill one engine after the other, as long as it is entered. Each has run some steps before, so that streams are
    resumed on a machine of any speed."""
    killed: list[str] = []

    def busy() -> list[str]:
        loads = {name: link.load for name, link in made.links.items() if link.ready}
        return [name for name, load in loads.items() if load is not None and load.steps >= STEPS_BEFORE_A_KILL]

    async def kill() -> None:
        while True:
            await until(lambda: bool(busy()))
            await asyncio.sleep(pause * (0.2 + random.random()))
            if ready := busy():
                killed.append(random.choice(ready))
                made.kill(killed[-1])

    task = asyncio.ensure_future(kill())
    try:
        yield killed
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.full
def test_a_storm_of_kills_loses_and_doubles_nothing(replicas: Replicas) -> None:
    random = Random(11)
    requests = [
        (
            [random.randrange(300) for _ in range(random.randint(1, 40))],
            SamplingParams(seed=number, max_tokens=random.randint(20, 60), ignore_eos=True, n=random.choice([1, 1, 2])),
        )
        for number in range(24)
    ]

    async def client(made: Replicas, prompt: list[int], params: SamplingParams) -> Items:
        while True:
            try:
                return await collect(made.set.generate(Submit(prompt, params)))
            except Unavailable:  # refused before it began
                await asyncio.sleep(0.02)

    async def check(made: Replicas) -> None:
        await made.both_ready()
        usual = [told(await client(made, *request)) for request in requests]
        before = made.resumed()
        async with kills(made, random, 0.5) as killed:
            found: list[Any] = []
            for _ in range(200):
                found += await asyncio.gather(*(client(made, *request) for request in requests))
                if len(killed) >= 4 and made.resumed() > before:
                    break
        assert len(killed) >= 4
        for number, items in enumerate(found):
            assert told(items) == usual[number % len(requests)]
        assert made.resumed() > before
        await until(lambda: all(view.requests == 0 for view in made.set.views()))

    replicas.run(check, timeout=180.0)
