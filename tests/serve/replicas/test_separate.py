"""Real engine processes with a tiny model, prefill and decode apart: clients see the tokens of one engine, whatever
ends in between."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import ModelError
from bankfull.fleet.routing import routing_policy
from bankfull.outputs import Delta
from bankfull.sample.params import StructuredOutput
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.process import EngineFactory, EngineProcess
from bankfull.serve.engine.wire import ExchangeEnds, RequestDone, RoomGranted
from bankfull.serve.replicas import transit
from bankfull.serve.replicas.local import Separation, local_separate
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.state.exchange import open_exchange
from bankfull.submit import Submit
from tests.serve.engine_kit import idle, until
from tests.tiny import speaking_folder

OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4, "rows": 4, "step_tokens": 32}
PAGE_BYTES = 1024
PAGES = 48
"""Places of each exchange: more than one of the prompts below needs, fewer than two."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Items = list[Delta | RequestDone]


def prompt_of(number: int, length: int = 130) -> list[int]:
    """Prompts without a common page."""
    drawn = Random(number)
    return [drawn.randrange(3, 300) for _ in range(length)]


class Separated:
    """The set, its links, and the event loop on which all of it runs."""

    def __init__(self, prefill: int = 1, decode: int = 2, link: str = "memory") -> None:
        self.set = self._made(prefill, decode, link)
        self.runner = asyncio.Runner()

    @staticmethod
    def _made(prefill: int, decode: int, link: str = "memory") -> SeparateSet:
        make = partial(Link, options=OPTIONS, tells_prefixes=True)

        def make_link(
            open_engine: EngineFactory = EngineProcess,
            threads: int | None = None,
            *,
            model: str = str(speaking_folder()),
            exchange: ExchangeEnds | None = None,
        ) -> Link:
            # One thread: tests run beside each other.
            return make(model, open_engine=open_engine, threads=1, exchange=exchange)

        made = local_separate(Separation(prefill, decode, PAGES * PAGE_BYTES, link), "least-loaded")(make_link)
        assert isinstance(made, SeparateSet)
        made.patience = 60.0
        return made

    def run(self, what: Callable[[Separated], Awaitable[Any]], timeout: float = 120.0) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(what(self), timeout)

        return self.runner.run(bounded())

    def link(self, name: str) -> Link:
        found = self.set._links[name]
        assert isinstance(found, Link)
        return found

    @property
    def links(self) -> list[Link]:
        return [self.link(name) for name in self.set._links]

    async def all_ready(self) -> None:
        await until(lambda: all(link.ready for link in self.links), 120)

    def kill(self, name: str) -> None:
        pid = self.link(name).engine_pid
        assert pid
        os.kill(pid, signal.SIGKILL)

    async def answer(self, prompt: list[int], params: SamplingParams = GREEDY, **how: Any) -> Items:
        return await collect(self.set.generate(Submit(prompt, params, **how)))

    async def all_idle(self) -> None:
        await until(lambda: all(idle(link) for link in self.links))

    async def assert_free(self, number: int) -> None:
        """Both ends are free: a prompt that needs nearly all of an exchange is shipped as a whole to every engine."""
        await self.all_idle()
        for own, name in enumerate(("decode-0", "decode-1")):
            with self.only(name):
                before = self.set.counts.pages, self.set.counts.late
                long = prompt_of(number + own, 4 * (PAGES - 1) + 1)
                await self.answer(long, SamplingParams(temperature=0.0, max_tokens=3))
                assert (self.set.counts.pages, self.set.counts.late) == (before[0] + PAGES - 1, before[1])

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """All requests go to this decode engine."""
        others = [other for other in self.set._replicas.values() if other.name != name]
        for other in others:
            other.leaving = True
        self.set._notify()
        yield
        for other in others:
            other.leaving = False
        self.set._notify()


@contextmanager
def running(made: Separated) -> Iterator[Separated]:
    try:
        made.run(lambda made: made.set.start())
        made.run(lambda made: made.set.wait_all_ready(), timeout=240.0)
        yield made
    finally:
        made.run(lambda made: made.set.close())
        made.runner.close()


@pytest.fixture(scope="module", params=["memory", pytest.param("socket", marks=pytest.mark.full)])
def separated(request: pytest.FixtureRequest) -> Iterator[Separated]:
    with running(Separated(link=request.param)) as made:
        yield made


@pytest.fixture(scope="module")
def whole() -> LLM:
    """One engine."""
    return LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4)


async def collect(stream: AsyncIterator[Items]) -> Items:
    return [item async for items in stream for item in items]


def tokens_of(items: Items, index: int = 0) -> list[int]:
    return [token for item in items if isinstance(item, Delta) and item.index == index for token in item.token_ids]


def text_of(items: Items, index: int = 0) -> str:
    return "".join(item.text for item in items if isinstance(item, Delta) and item.index == index)


def done_of(items: Items) -> RequestDone:
    [done] = [item for item in items if isinstance(item, RequestDone)]
    assert done is items[-1]
    return done


def greedy(whole: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    [found] = whole.generate([list(prompt)], params)
    return list(found.outputs[0].token_ids)


VARIANTS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True),
    "samples": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, ignore_eos=True),
    "one token": SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
    "penalties": SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.5, ignore_eos=True),
    "grammar": SamplingParams(
        temperature=1.0, seed=2, max_tokens=30, structured=StructuredOutput(regex="[a-z ]{4,9}!")
    ),
    "stop": SamplingParams(temperature=1.0, seed=11, max_tokens=40, stop=["e", "o"], ignore_eos=True),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_equal_those_of_one_engine(separated: Separated, whole: LLM, variant: str) -> None:
    params, prompt = VARIANTS[variant], prompt_of(list(VARIANTS).index(variant), 62)
    [one] = whole.generate([prompt], params)
    before = separated.set.counts.transits
    items = separated.run(lambda made: made.answer(prompt, params))
    for number, sample in enumerate(one.outputs):
        assert tokens_of(items, number) == list(sample.token_ids)
        assert text_of(items, number) == sample.text
    ends = {item.index: item.finish_reason for item in items if isinstance(item, Delta) and item.finish_reason}
    assert ends == {number: sample.finish_reason for number, sample in enumerate(one.outputs)}
    assert separated.set.counts.transits == before + 1
    done = done_of(items)
    assert not done.handed and done.cached_tokens == 0
    assert done.output_tokens == sum(len(sample.token_ids) for sample in one.outputs)


def test_only_what_the_decoding_engine_lacks_is_shipped(separated: Separated, whole: LLM) -> None:
    prompt, counts = prompt_of(20, 81), separated.set.counts
    longer = [*prompt, *prompt_of(21, 24)]

    async def ask(made: Separated) -> list[int]:
        shipped = []
        with made.only("decode-1"):
            for asked in (prompt, longer, longer, [*longer, 7]):
                before = counts.nbytes
                assert tokens_of(await made.answer(asked)) == greedy(whole, asked)
                shipped.append(counts.nbytes - before)
        return shipped

    assert separated.run(ask) == [20 * PAGE_BYTES, 6 * PAGE_BYTES, 0, 0]


def test_what_has_no_prompt_to_hand_over_runs_in_the_decode_pool(separated: Separated) -> None:
    async def ask(made: Separated) -> None:
        counts, prefill = made.set.counts, made.link("prefill-0")
        await made.all_idle()
        steps = prefill.load.steps if prefill.load is not None else 0
        before = counts.transits
        done = done_of(await made.answer(prompt_of(30), GREEDY, pool="last"))
        assert done.embedding
        assert tokens_of(await made.answer([5, 6, 7])), "shorter than a page"
        scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
        assert done_of(await made.answer(prompt_of(31), scored)).prompt_logprobs
        assert counts.transits == before
        assert (prefill.load.steps if prefill.load is not None else 0) == steps, "the prefill engine has run nothing"

    separated.run(ask)


def test_an_account_tells_of_both_engines(separated: Separated) -> None:
    items = separated.run(lambda made: made.answer(prompt_of(40), GREEDY, explain=True))
    account = done_of(items).account
    assert account is not None
    parts = {part["part"]: part["tokens"] for part in account["prefill"]["parts"]}
    assert parts["prefill"] == 130
    assert account["handed_over"]["bytes"] == 32 * PAGE_BYTES
    assert account["handed_over"]["late_pages"] == 0


@pytest.mark.parametrize("after", [0, 1, 2])
def test_cancelled_requests_free_both_ends(separated: Separated, after: int) -> None:
    """`after`: so many steps were received before the client left; none: while the prompt is computed."""

    async def leave(made: Separated) -> None:
        for number in range(6):
            stream = made.set.generate(Submit(prompt_of(50 + 10 * after + number), GREEDY))
            for _ in range(after):
                await anext(stream)
            await stream.aclose()
        await made.assert_free(200 + 10 * after)

    separated.run(leave)


def test_a_stream_that_is_dropped_frees_both_ends(separated: Separated) -> None:
    async def drop(made: Separated) -> None:
        for number in range(4):
            stream = made.set.generate(Submit(prompt_of(80 + number), GREEDY))
            if number % 2:
                await anext(stream)
            del stream
        await asyncio.sleep(0)
        await made.assert_free(240)

    separated.run(drop)


def test_a_decode_engine_that_dies_in_mid_transfer_leaves_the_stream_to_another(
    separated: Separated, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[str] = []

    def arrived(link: Link, number: int, names: list[bytes]) -> None:
        if not killed:
            [name] = [name for name, own in separated.set._links.items() if own is link]
            killed.append(name)
            separated.kill(name)
        else:
            real(link, number, names)

    real = Link.state_arrived
    monkeypatch.setattr(Link, "state_arrived", arrived)

    async def ask(made: Separated) -> None:
        await made.all_ready()
        assert tokens_of(await made.answer(prompt_of(90))) == greedy(whole, prompt_of(90))
        await made.all_ready()
        await made.assert_free(250)

    separated.run(ask)
    assert killed


def test_a_prefill_engine_that_dies_leaves_the_prompt_to_a_decode_engine(
    separated: Separated, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def ship(link: Link, number: int, *more: Any) -> None:
        if not killed:
            killed.append(number)
            separated.kill("prefill-0")
        real(link, number, *more)

    real = Link.ship_more
    monkeypatch.setattr(Link, "ship_more", ship)

    async def ask(made: Separated) -> None:
        await made.all_ready()
        undivided = made.set.counts.undivided
        first = asyncio.ensure_future(made.answer(prompt_of(91)))
        await until(lambda: not made.link("prefill-0").ready)
        # With no prefill engine at all the decode engines do everything.
        assert tokens_of(await made.answer(prompt_of(92))) == greedy(whole, prompt_of(92))
        assert tokens_of(await first) == greedy(whole, prompt_of(91))
        assert made.set.counts.undivided > undivided
        await made.all_ready()
        await made.assert_free(260)

    separated.run(ask)
    assert killed


def test_requests_that_find_no_room_compute_their_prompt_again(
    separated: Separated, whole: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transit, "QUIET_SECONDS", 0.2)

    async def ask(made: Separated) -> None:
        await made.all_ready()
        counts = made.set.counts
        late = counts.late
        engines = [made.link("decode-0"), made.link("decode-1")]
        held = [engine.expect_state(prompt_of(300, 150), "", "", lambda room: None) for engine in engines]
        prompts = [prompt_of(93 + number) for number in range(4)]
        answers = await asyncio.gather(*(made.answer(prompt) for prompt in prompts))
        assert [tokens_of(answer) for answer in answers] == [greedy(whole, prompt) for prompt in prompts]
        assert counts.late > late and counts.incomplete
        for engine, number in zip(engines, held, strict=True):
            engine.forget_state(number)
        await made.assert_free(270)

    separated.run(ask)


def test_long_prompts_of_one_tenant_do_not_keep_another_from_its_second_token(
    separated: Separated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine grants all that a short prompt needs at once, whatever another tenant's prompts hold or will
    need; and nothing is held for prompts that wait."""
    modest = prompt_of(630, 62)
    asked: list[list[int]] = []
    answers: list[RoomGranted] = []
    for bound in ("QUIET_SECONDS", "LONGEST_SECONDS"):  # a busy machine makes nothing late
        monkeypatch.setattr(transit, bound, 60.0)

    async def ask(made: Separated) -> None:
        await made.all_ready()
        for link in made.links:
            link.admission._most_samples = link.admission._most_tokens = 1 << 20
        decode = made.link("decode-0")
        expect_state = decode.expect_state

        def watched(prompt: list[int], *others: Any) -> int:
            asked.append(prompt)
            *others, on_room = others

            def answered(room: RoomGranted | None) -> None:
                if prompt == modest and room is not None:
                    answers.append(room)
                on_room(room)

            return expect_state(prompt, *others, answered)

        monkeypatch.setattr(decode, "expect_state", watched)
        with made.only("decode-0"):
            long = [
                asyncio.ensure_future(made.answer(prompt_of(600 + i, 4 * (PAGES - 1) + 1), tenant="greedy"))
                for i in range(24)
            ]
            await asyncio.sleep(0)
            stream = made.set.generate(Submit(modest, GREEDY, tenant="modest", explain=True))
            assert len(asked) < 24, "prompts that wait ask for nothing"
            account = done_of(await collect(stream)).account
            assert account is not None
            handed = account["handed_over"]
            assert (handed["pages"], handed["late_pages"]) == (15, 0), "its places were there"
            await asyncio.gather(*long)
        await made.assert_free(640)

    separated.run(ask)
    assert [len(room.places) for room in answers] == [15], "all its places at once"


def test_many_requests_some_of_which_leave_get_their_own_tokens(separated: Separated, whole: LLM) -> None:
    drawn = Random(5)
    shared = prompt_of(400, 40)
    prompts = [[*shared[: drawn.choice((0, 16, 40))], *prompt_of(401 + i, drawn.randrange(3, 140))] for i in range(40)]
    leaves = [drawn.choice((None, None, 0, 1, 2)) for _ in prompts]

    async def ask(made: Separated, number: int) -> list[int]:
        await asyncio.sleep(0.01 * (number % 8))
        stream = made.set.generate(Submit(prompts[number], GREEDY))
        if (steps := leaves[number]) is None:
            return tokens_of(await collect(stream))
        items: Items = []
        for _ in range(steps):
            items += await anext(stream)
        await stream.aclose()
        return tokens_of(items)

    async def all_of_them(made: Separated) -> list[list[int]]:
        await made.all_ready()
        for link in made.links:
            link.admission._most_samples = link.admission._most_tokens = 1 << 20
        found = await asyncio.gather(*(ask(made, number) for number in range(len(prompts))))
        await made.assert_free(450)
        return list(found)

    for number, tokens in enumerate(separated.run(all_of_them)):
        expected = greedy(whole, prompts[number])
        assert tokens == (expected if leaves[number] is None else expected[: len(tokens)])


def test_engines_that_keep_another_dtype_are_refused_at_the_start() -> None:
    files = [open_exchange()]

    def link(dtype: str, own: int | None) -> Link:
        opened = partial(EngineProcess, files=files)
        options = {**OPTIONS, "dtype": dtype}
        ends = ExchangeEnds(files, 1 << 20, own)
        return Link(str(speaking_folder()), options, threads=1, open_engine=opened, tells_prefixes=True, exchange=ends)

    async def start() -> None:
        made = SeparateSet(
            {"prefill-0": link("bfloat16", None)},
            {"decode-0": link("float32", 0)},
            routing_policy("least-loaded"),
            exchanges=files,
        )
        await made.start()
        try:
            await asyncio.wait_for(made.wait_ready(), 120)
        finally:
            await made.close()

    with pytest.raises(ModelError, match=r"activations (bf16|float)") as found:
        asyncio.run(start())
    said = str(found.value)
    assert said.count("bf16") == said.count("float") == 1 and "same model and options" in said


@pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's table of open files")
def test_closing_leaves_no_exchange_open() -> None:
    def exchanges() -> int:
        found = 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the folder's own file is closed by now
                found += "bankfull-exchange" in os.readlink(file)
        return found

    before = exchanges()
    made = Separated._made(1, 3)
    assert exchanges() == before + 3
    asyncio.run(made.close())
    assert exchanges() == before
