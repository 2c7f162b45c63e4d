"""A model's texts: what is read without torch, defaults, limits, and threads that leave the event loop alone."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from bankfull.sample.params import SamplingParams
from bankfull.serve.api import texts as module
from bankfull.serve.api.chat import Ask, Chat
from bankfull.serve.api.errors import ContextOverflow, Refusal
from bankfull.serve.api.texts import Slices, finished, fit
from bankfull.serve.desk import DeskJob
from bankfull.serve.engine.backend import Busy
from bankfull.serve.guard.keys import Key
from bankfull.serve.telemetry.trace import Trace, during
from bankfull.submit import Submit
from bankfull.text import windows as windows_module
from bankfull.text.guard import LONG_TEXT
from tests.serve.scripted import Scripted, scripted_texts, scripted_tokenizer


@pytest.mark.parametrize(
    ("length", "max_tokens", "truncate", "kept"),
    [
        (99, None, None, 99),
        (100, None, None, None),
        (90, 10, None, 90),
        (91, 10, None, None),
        (100, 0, None, 100),
        (500, 10, -1, 90),
        (500, None, -1, 99),
        (500, 10, 7, 7),
        (500, 10, 95, 90),
        (5, 10, 7, 5),
        (1, 100, None, None),
    ],
)
def test_a_prompt_fits_is_cut_when_asked_or_is_refused(
    length: int, max_tokens: int | None, truncate: int | None, kept: int | None
) -> None:
    ids = list(range(length))
    params = SamplingParams(max_tokens=max_tokens)
    if kept is None:
        with pytest.raises(ContextOverflow) as caught:
            fit(ids, 100, params, truncate, "prompt")
        assert caught.value.code == "context_length_exceeded"
    else:
        assert fit(ids, 100, params, truncate, "prompt") == ids[-kept:]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(Refusal, match="empty"):
        fit([], 100, SamplingParams(), None, "prompt")


def test_a_long_text_has_the_same_ids_as_its_parts() -> None:
    letters = random.Random(1).choices("ab é<|im_end|>\U0001f30a", k=LONG_TEXT)
    words, text = scripted_tokenizer(), "".join(letters)
    for special in (True, False):
        parts = [words.encode(letter, parse_special=special) for letter in letters]
        assert words.encode(text * 2, parse_special=special) == [token for part in parts * 2 for token in part]


def test_the_event_loop_goes_on_while_a_long_text_is_tokenized() -> None:
    texts = scripted_texts()

    async def run() -> int:
        beats = 0
        work = asyncio.ensure_future(texts.run(10**6, lambda: texts.encode("the river " * 200_000, 10**6, fits=False)))
        while not work.done():
            await asyncio.sleep(0.001)
            beats += 1
        assert len(await work) == 2_000_000
        return beats

    assert asyncio.run(run()) >= 10, "with the interpreter held there would be one or two"


@pytest.mark.parametrize(
    ("messages", "options", "short"),
    [
        (["Hello"], {}, True),
        (["Hello"] * 16, {"enable_thinking": False}, True),
        (["Hello"] * 17, {}, False),
        (["x" * 1025], {}, False),
        (["Hello"], {"rounds": 3}, False),
    ],
)
def test_a_short_conversation_reaches_no_thread(
    messages: list[str], options: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(Scripted([]), scripted_texts())
    threads = 0

    async def run(size: int, work: Any) -> Any:
        nonlocal threads
        threads += 1
        return finished(work())

    monkeypatch.setattr(chat.texts, "run", run)
    asked = [{"role": "user", "content": text} for text in messages]
    assert asyncio.run(
        chat.prompt(Ask(messages=asked, submit=Submit([], SamplingParams()), template_options=options), fits=False)
    )
    assert threads == (not short)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    asyncio.run(chat.prompt(Ask(messages=asked, submit=Submit([], SamplingParams()), tools=tools), fits=False))
    assert threads == 1 + (not short), "tools may be of any size"


def test_what_takes_long_for_few_words_goes_to_a_thread_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DETOURS", 2)
    texts = scripted_texts()
    clock = 0.0
    here = threading.get_ident()

    def work(seconds: float) -> Slices[bool]:
        nonlocal clock
        clock += seconds
        yield 1
        return threading.get_ident() == here

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock)
    seconds = [0.001, 0.001, 1.0, 0.001, 0.001, 0.001]
    at_once = [asyncio.run(texts.run_short(True, 1, lambda each=each: work(each))) for each in seconds]  # type: ignore[misc]
    assert at_once == [True, True, True, False, False, True]


def test_many_short_texts_in_one_turn_of_the_loop_go_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = scripted_texts()
    clock = 0.0
    here = threading.get_ident()

    def work() -> Slices[bool]:
        nonlocal clock
        clock += 0.002
        yield 1
        return threading.get_ident() == here

    async def run() -> list[bool]:
        return [await texts.run_short(True, 1, work) for _ in range(8)]

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock)
    # The fourth one waits for a thread; meanwhile the loop has turned.
    assert asyncio.run(run()) == [True, True, True, False] * 2


def test_what_waits_for_a_thread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_PER_KEY", 250_000)
    texts = scripted_texts()
    long = "x" * 100_000

    async def run() -> list[Any]:
        works = [texts.run(len(long), lambda: texts.encode(long, 10**6)) for _ in range(3)]
        return await asyncio.gather(*works, return_exceptions=True)

    results = asyncio.run(run())
    assert [isinstance(result, Busy) for result in results] == [False, False, True]
    assert asyncio.run(texts.run(1, lambda: texts.encode("x", 10))), "there is room again"


def test_a_text_that_cannot_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = scripted_texts()
    longest = len("<|endoftext|>")
    read: list[str] = []
    encode = texts.tokenizer.encode_spelled
    monkeypatch.setattr(
        texts.tokenizer, "encode_spelled", lambda text, marker: (read.append(text), encode(text, marker))[1]
    )
    for fits in (True, False):
        with pytest.raises(ContextOverflow):
            finished(texts.encode("x" * (10 * longest + 1), 10, fits=fits))
    with pytest.raises(ContextOverflow):
        finished(texts.encode_chat([{"role": "user", "content": "x" * (10 * longest + 1)}], 10))
    assert not read
    assert len(finished(texts.encode("x" * 10 * longest, 10, fits=False))) == 10 * longest
    with pytest.raises(Refusal, match="at most"):
        finished(texts.encode("x" * 8_000_001, 10**6))


def test_a_text_that_has_too_many_tokens_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (windows_module, module):
        monkeypatch.setattr(place, "WINDOW", 100)
    texts = scripted_texts()
    slices = texts.encode("the river " * 130, 110)
    assert next(slices) <= 110
    with pytest.raises(ContextOverflow, match="and more"):
        next(slices)


@pytest.mark.parametrize("keep", [1, 7, 60, 5000])
def test_a_text_that_is_cut_is_read_from_its_end_and_no_further_than_needed(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (windows_module, module):
        monkeypatch.setattr(place, "WINDOW", 40)
    texts = scripted_texts()
    text = "a river of words " * 200
    whole = texts.tokenizer.encode(text)
    slices, read = texts.encode(text, 512, keep=keep), 0
    try:
        while True:
            read += next(slices)
    except StopIteration as end:
        ids = end.value
    assert ids[-keep:] == whole[-keep:]
    assert read <= min(len(text), keep + 2 * 40 + 20)


def test_a_text_that_cannot_be_cut_is_refused_where_it_could_not_fit_either() -> None:
    texts = scripted_texts()
    with pytest.raises(ContextOverflow, match="no space between two words"):
        finished(texts.encode("<" * 4_000_000, 512, keep=512))
    assert len(finished(texts.encode("<" * 4_000_000, 1 << 20, keep=512))) >= 512


def test_work_of_a_client_that_left_is_dropped_wherever_it_is() -> None:
    texts = scripted_texts()
    begun: list[str] = []
    held, hold = threading.Event(), threading.Event()

    def slow(name: str) -> Slices[None]:
        begun.append(name)
        for _ in range(1000):
            yield 1
            held.set()
            hold.wait(10)
            begun.append(name)

    async def run() -> None:
        first = asyncio.ensure_future(texts.run(1 << 20, lambda: slow("first")))
        second = asyncio.ensure_future(texts.run(1 << 20, lambda: slow("second")))
        # Until then, the desk could drop the first and begin the second before that is cancelled, too.
        while not held.is_set():
            await asyncio.sleep(0.001)
        for task in (first, second):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        hold.set()
        await texts.run(1 << 20, lambda: None)
        assert texts.desk.waiting <= 1

    asyncio.run(run())
    assert "second" not in begun, "it waited, and nobody wanted it any more"
    assert len(begun) <= 3, "it was under way, and nobody wanted the rest"


def test_lines_of_batches_wait_their_turn_and_are_charged_to_their_key() -> None:
    texts = scripted_texts()
    jobs: list[tuple[str, bool, int]] = []
    put = texts.desk.put

    def noted(job: DeskJob) -> None:
        jobs.append((job.owner, job.batch, texts.desk.waiting))
        put(job)

    texts.desk.put = noted  # type: ignore[method-assign]
    key = Key("alice", "")

    async def line(number: int) -> None:
        with during(Trace("", "POST", "/v1/completions", 0.0, key=key, batch=True)):
            await texts.run(1000, lambda: texts.encode(f"line {number}", 100))

    async def run() -> None:
        await asyncio.gather(*map(line, range(12)))
        with during(Trace("", "POST", "/v1/completions", 0.0, key=key)):
            await texts.run(1000, lambda: texts.encode("online", 100))

    asyncio.run(run())
    assert [job[:2] for job in jobs] == [("alice", True)] * 12 + [("alice", False)]
    assert max(waiting for _, _, waiting in jobs) < module.BATCH_AT_ONCE
