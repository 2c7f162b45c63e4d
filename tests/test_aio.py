"""The asyncio engine: the same loop and the same answers, for many callers at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from bankfull import LLM, AsyncEngine, SamplingParams
from bankfull.errors import RequestError
from bankfull.outputs import Delta
from bankfull.sample.params import StructuredOutput
from tests.kit import late_devices
from tests.tiny import speaking_folder

PARAMS = SamplingParams(temperature=1.0, seed=11, max_tokens=10, ignore_eos=True)


@pytest.fixture(params=["cpu", "late"])
def engine(request: pytest.FixtureRequest) -> Iterator[AsyncEngine]:
    with late_devices() if request.param == "late" else nullcontext():
        made = AsyncEngine(LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4))
        yield made
        made.close()


async def collect(engine: AsyncEngine, prompt: object, params: SamplingParams = PARAMS, **how: object) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt, params, **how)]  # type: ignore[arg-type]


def left_over(engine: AsyncEngine) -> int:
    front = engine.llm.loaded.frontend
    return len(front.pending) + front.engine.scheduler.unfinished + front.engine.scheduler.state.census()[0].held


async def until_idle(engine: AsyncEngine) -> None:
    for _ in range(200):
        if not left_over(engine):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests are left behind")


def test_concurrent_answers_equal_offline_ones(engine: AsyncEngine) -> None:
    prompts = [f"The river {i}" for i in range(8)]
    offline = LLM(str(speaking_folder()), dtype="float32", memory="8MiB").generate(prompts, PARAMS)

    async def run() -> list[list[Delta]]:
        answers = await asyncio.gather(*(collect(engine, p) for p in prompts))
        await until_idle(engine)
        return answers

    for deltas, expected in zip(asyncio.run(run()), offline, strict=True):
        assert "".join(d.text for d in deltas) == expected.outputs[0].text
        assert deltas[-1].finish_reason == expected.outputs[0].finish_reason


def test_leaving_an_iterator_aborts_its_request(engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = engine.generate("The river", SamplingParams(seed=1, ignore_eos=True))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until_idle(engine)

    asyncio.run(run())


def test_abort_ends_the_iterator_with_its_reason(engine: AsyncEngine) -> None:
    async def run() -> list[Delta]:
        got = []
        async for delta in engine.generate("The river", SamplingParams(seed=1, ignore_eos=True), request_id="mine"):
            got.append(delta)
            if len(got) == 2:
                await engine.abort("mine")
        await until_idle(engine)
        return got

    assert asyncio.run(run())[-1].finish_reason == "abort"


def test_a_bad_request_raises_and_the_others_go_on(engine: AsyncEngine) -> None:
    async def run() -> tuple[object, list[Delta]]:
        bad, good = await asyncio.gather(collect(engine, ""), collect(engine, "The river"), return_exceptions=True)
        await until_idle(engine)
        assert not isinstance(good, BaseException)
        return bad, good

    bad, good = asyncio.run(run())
    assert isinstance(bad, RequestError) and good[-1].finish_reason == "length"


def test_samples_of_a_request_arrive_under_their_index(engine: AsyncEngine) -> None:
    params = SamplingParams(n=3, seed=2, temperature=1.5, max_tokens=6, ignore_eos=True)
    deltas = asyncio.run(collect(engine, "The river", params))
    assert {d.index for d in deltas} == {0, 1, 2}
    assert sum(d.finish_reason is not None for d in deltas) == 3


def test_grammars_are_compiled_off_the_loops_and_hold(engine: AsyncEngine) -> None:
    params = SamplingParams(seed=3, structured=StructuredOutput(regex="[ab]{3,5}"))
    deltas = asyncio.run(collect(engine, "The river", params))
    assert re.fullmatch("[ab]{3,5}", "".join(d.text for d in deltas))
    with pytest.raises(RequestError, match="regex"):
        asyncio.run(collect(engine, "The river", SamplingParams(structured=StructuredOutput(regex="("))))


def test_closing_tells_those_who_still_wait(engine: AsyncEngine) -> None:
    async def run() -> None:
        stream = engine.generate("The river", SamplingParams(seed=1, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RuntimeError, match="closed"):
            async for _ in stream:
                pass

    asyncio.run(run())
