"""The engine behind a socket: the same answers, and nothing is held for those who have left."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import ModelError, RequestError
from bankfull.outputs import Delta
from bankfull.sample.params import StructuredOutput
from bankfull.serve.engine.admission import BATCH_PRIORITY
from bankfull.serve.engine.backend import DeadlineExceeded, Unavailable
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.prompt_lines import unpack_lines
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT, Service, collect, idle, service, text_of, until
from tests.tiny import speaking_folder

SEEDED = SamplingParams(temperature=1.0, seed=11, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def serving() -> Iterator[Service]:
    with service() as made:
        yield made


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(str(speaking_folder()), **OPTIONS)


def test_answers_equal_offline_ones(serving: Service, offline: LLM) -> None:
    prompts = [PROMPT[:i] for i in range(5, 13)]

    async def ask(link: Link) -> list[list[Delta | RequestDone]]:
        return await asyncio.gather(*(collect(link, p, SEEDED) for p in prompts))

    for items, expected in zip(serving.run(ask), offline.generate(prompts, SEEDED), strict=True):
        pieces, done = [i for i in items if isinstance(i, Delta)], items[-1]
        assert text_of(items) == expected.outputs[0].text
        assert [t for p in pieces for t in p.token_ids] == expected.outputs[0].token_ids
        assert pieces[-1].finish_reason == "length"
        assert isinstance(done, RequestDone) and done.output_tokens == 12 and done.ttft is not None
        lines = [line for p in pieces for line in p.logprobs or []]
        for token, line, other in zip(
            expected.outputs[0].token_ids, lines, expected.outputs[0].logprobs or [], strict=True
        ):
            assert next(iter(line)) == token, "the chosen token comes first"
            assert line == {i: (entry.logprob, entry.token) for i, entry in other.items()}


def test_samples_prompt_logprobs_and_embeddings_come_through(serving: Service, offline: LLM) -> None:
    params = SamplingParams(n=3, seed=2, max_tokens=4, ignore_eos=True, prompt_logprobs=1)
    items = serving.run(lambda link: collect(link, PROMPT, params))
    expected = offline.generate(PROMPT, params)[0]
    assert [text_of(items, i) for i in range(3)] == [output.text for output in expected.outputs]
    assert isinstance(items[-1], RequestDone)
    named = expected.prompt_logprobs
    lines = unpack_lines(items[-1].prompt_logprobs, PROMPT, offline.loaded.frontend.tokenizer)
    assert named is not None and lines is not None and lines[0] is None and named[0] is None
    for token, line, whole in zip(PROMPT[1:], lines[1:], named[1:], strict=True):
        assert line is not None and whole is not None and next(iter(line)) == token
        assert line == {other: (pytest.approx(one.logprob), one.token) for other, one in whole.items()}
    for pool in ("last", "mean"):
        done = serving.run(lambda link, pool=pool: collect(link, PROMPT, SamplingParams(), pool=pool))[-1]
        assert isinstance(done, RequestDone)
        assert done.embedding == pytest.approx(offline.embed(PROMPT, pooling=pool)[0].embedding, abs=1e-5)


def test_a_grammar_holds_and_a_bad_one_is_the_requests_own_fault(serving: Service) -> None:
    params = SamplingParams(seed=3, structured=StructuredOutput(regex="[ab]{3,5}"))
    assert re.fullmatch("[ab]{3,5}", text_of(serving.run(lambda link: collect(link, PROMPT, params))))
    for bad in (SamplingParams(structured=StructuredOutput(regex="(")), SamplingParams(max_tokens=5000)):
        with pytest.raises(RequestError):
            serving.run(lambda link, bad=bad: collect(link, PROMPT, bad))
    with pytest.raises(RequestError, match="not an id"):
        serving.run(lambda link: collect(link, [10**9], SEEDED))
    with pytest.raises(RequestError, match="passed on"):
        serving.run(lambda link: collect(link, PROMPT, SEEDED, salt="\ud800"))


@pytest.mark.parametrize("how", ["aclose", "cancel", "forget"])
def test_leaving_frees_the_pages(serving: Service, how: str) -> None:
    async def leave(link: Link) -> None:
        stream = link.generate(Submit(PROMPT, ENDLESS))
        await anext(stream)
        assert link.load is not None and link.load.pages_used > 0
        if how == "aclose":
            await stream.aclose()  # type: ignore[attr-defined]
        elif how == "forget":
            del stream
        else:

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            task.cancel()
        await until(lambda: idle(link))
        assert link.admission.samples == link.admission.tokens == 0

    serving.run(leave)


def test_whoever_leaves_while_a_grammar_is_compiled_never_runs(serving: Service) -> None:
    async def leave(link: Link) -> None:
        slow = SamplingParams(structured=StructuredOutput(regex="(a|b|ab){1,40}c"), max_tokens=50)
        for _ in range(20):
            await link.generate(Submit(PROMPT, slow)).aclose()  # type: ignore[attr-defined]
        await collect(link, PROMPT, SEEDED)
        await until(lambda: idle(link))

    serving.run(leave)


def test_a_deadline_ends_a_request(serving: Service) -> None:
    async def wait(link: Link) -> None:
        with pytest.raises(DeadlineExceeded):
            await collect(link, PROMPT, ENDLESS, deadline=time.monotonic() + 0.002)
        with pytest.raises(DeadlineExceeded):
            link.generate(Submit(PROMPT, ENDLESS, deadline=time.monotonic()))
        await until(lambda: idle(link))

    serving.run(wait)


def test_the_prefix_cache_is_used_and_can_be_reset(serving: Service) -> None:
    async def reset(link: Link) -> tuple[int, int]:
        await collect(link, PROMPT, SEEDED)
        before = (await collect(link, PROMPT, SEEDED))[-1]
        assert isinstance(before, RequestDone) and before.cached_tokens > 0
        freed = await link.reset_cache()
        after = (await collect(link, PROMPT, SEEDED))[-1]
        assert isinstance(after, RequestDone)
        return freed, after.cached_tokens

    freed, cached = serving.run(reset)
    assert freed > 0 and cached == 0


def test_the_load_is_told(serving: Service) -> None:
    load = serving.link.load
    assert load is not None and load.steps > 0 and 0 < load.decode_busy < load.busy and load.prefix_queries > 0
    facts = serving.link.facts
    assert facts is not None and facts.vocab > 0 and facts.pages == load.pages_total and facts.dtype == "float32"


def test_draining_lets_online_requests_finish_and_drops_batch_work() -> None:
    async def drain(link: Link) -> None:
        online = asyncio.create_task(collect(link, PROMPT, SEEDED))
        batch = asyncio.create_task(collect(link, PROMPT, ENDLESS, priority=BATCH_PRIORITY))
        await asyncio.sleep(0)
        draining = asyncio.create_task(link.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            link.generate(Submit(PROMPT, SEEDED))
        assert not link.ready
        with pytest.raises(Unavailable):
            await batch
        assert len(text_of(await online)) > 0
        await draining

    with service() as made:
        made.run(drain, timeout=20.0)


def test_what_can_never_be_loaded_is_given_up_with_the_engines_own_words() -> None:
    async def start() -> None:
        link = Link(str(speaking_folder()), {"dtype": "float3"})
        await link.start()
        try:
            with pytest.raises(ModelError, match="float3"):
                await asyncio.wait_for(link.wait_ready(), 60)
            with pytest.raises(Unavailable, match="log") as told:
                link.generate(Submit(PROMPT, SEEDED))
            assert "float3" not in str(told.value), "the engine's words are for whoever runs the server"
        finally:
            await link.close()

    asyncio.run(start())


def test_the_api_process_never_imports_torch() -> None:
    code = "import sys, bankfull.serve.engine.link; print({'torch', 'numpy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
