"""A model's texts: what is read without torch, defaults, limits, and threads that leave the event loop alone."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from bankfull.sample.params import SamplingParams
from bankfull.serve import texts as module
from bankfull.serve.backend import Busy
from bankfull.serve.chat import Ask, Chat
from bankfull.serve.errors import ContextOverflow, Refusal
from bankfull.serve.texts import fit
from bankfull.text.guard import LONG_TEXT
from tests.serve.scripted import Scripted, scripted_texts, scripted_tokenizer


@pytest.mark.parametrize(
    ("length", "max_tokens", "truncate", "kept"),
    [
        (99, None, None, 99), (100, None, None, None), (90, 10, None, 90), (91, 10, None, None), (100, 0, None, 100),
        (500, 10, -1, 90), (500, None, -1, 99), (500, 10, 7, 7), (500, 10, 95, 90), (5, 10, 7, 5), (1, 100, None, None),
    ],
)  # fmt: skip
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
        work = asyncio.ensure_future(texts.run(texts.encode, "the river " * 200_000, None))
        while not work.done():
            await asyncio.sleep(0.001)
            beats += 1
        assert len(await work) == 2_000_000
        return beats

    assert asyncio.run(run()) >= 10, "with the interpreter held there would be one or two"


@pytest.mark.parametrize(
    ("messages", "options", "short"),
    [
        (["Hello"], {}, True), (["Hello"] * 16, {"enable_thinking": False}, True), (["Hello"] * 17, {}, False),
        (["x" * 1025], {}, False), (["Hello"], {"rounds": 3}, False),
    ],
)  # fmt: skip
def test_a_short_conversation_reaches_no_thread(
    messages: list[str], options: dict[str, Any], short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(Scripted([]), scripted_texts())
    threads = 0

    async def run(work: Any, *given: Any, **named: Any) -> Any:
        nonlocal threads
        threads += 1
        return work(*given, **named)

    monkeypatch.setattr(chat.texts, "run", run)
    asked = [{"role": "user", "content": text} for text in messages]
    assert asyncio.run(chat.prompt(Ask(messages=asked, params=SamplingParams(), template_options=options)))
    assert threads == (not short)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    asyncio.run(chat.prompt(Ask(messages=asked, params=SamplingParams(), tools=tools)))
    assert threads == 1 + (not short), "tools may be of any size"


def test_what_takes_long_for_few_words_goes_to_a_thread_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DETOURS", 2)
    texts = scripted_texts()
    clock = 0.0
    here = threading.get_ident()

    def work(seconds: float) -> bool:
        nonlocal clock
        clock += seconds
        return threading.get_ident() == here

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock)
    seconds = [0.001, 0.001, 1.0, 0.001, 0.001, 0.001]
    at_once = [asyncio.run(texts.run_short(True, work, each)) for each in seconds]
    assert at_once == [True, True, True, False, False, True]


def test_what_waits_for_a_thread_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PREPARING", 2)
    texts = scripted_texts()

    async def run() -> list[Any]:
        works = [texts.run(texts.encode, "x" * 100_000, None) for _ in range(3)]
        return await asyncio.gather(*works, return_exceptions=True)

    results = asyncio.run(run())
    assert [isinstance(result, Busy) for result in results] == [False, False, True]
    assert asyncio.run(texts.run(texts.encode, "x", None)), "there is room again"


def test_a_text_that_cannot_fit_is_refused_before_it_is_read() -> None:
    texts = scripted_texts()
    longest = len("<|endoftext|>")
    with pytest.raises(ContextOverflow):
        texts.encode("x" * (10 * longest + 1), 10)
    assert len(texts.encode("x" * 10 * longest, 10)) == 10 * longest
    with pytest.raises(Refusal, match="at most"):
        texts.encode("x" * 8_000_001, None)
