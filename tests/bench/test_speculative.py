"""The benchmark of speculative decoding: its prompts, its loops, and a whole run on a tiny model."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull import LLM, SamplingParams
from bankfull.bench.prompt_sets import LEAST_REPEATED, SETS, before_loop, prompt_set
from bankfull.bench.speculative import SpeculativeBench
from bankfull.errors import ConfigError
from bankfull.ops import native
from tests.tiny import speaking_folder

needs_kernels = pytest.mark.skipif(native.status() is not None, reason="the native kernels are missing")


def test_the_prompts_are_there_and_distinct() -> None:
    every = [prompt for name in SETS for prompt in prompt_set(name)]
    assert len(every) == len(set(every)) == 30 and all(every)
    with pytest.raises(ConfigError, match="'poems' is unknown; use chat, code-edit"):
        prompt_set("poems")


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.integers(1, 20), st.integers(0, 60))
def test_an_answer_is_cut_where_it_begins_to_repeat(text: list[int], period: int, more: int) -> None:
    assert before_loop(text) == len(text), "nothing repeats"
    part = list(range(-period, 0))
    repeated = max(2 * period, LEAST_REPEATED) + more
    looped = text + [part[i % period] for i in range(period + repeated)]
    assert before_loop(looped) == len(text) + period
    assert before_loop(looped[: len(text) + period + max(2 * period, LEAST_REPEATED) - 1]) == len(
        looped[: len(text) + period + max(2 * period, LEAST_REPEATED) - 1]
    )


@needs_kernels
def test_both_engines_answer_the_same_and_drafts_save_steps() -> None:
    plain = LLM(str(speaking_folder()), dtype="float32")
    llm = LLM(str(speaking_folder()), dtype="float32", speculative="suffix,adaptive=false,least=1")
    params = SamplingParams(temperature=0, max_tokens=40, detokenize=False, ignore_eos=True)
    bench = SpeculativeBench(plain, concurrency=4, reps=2, params=params, limit=None)
    passes = []
    report = bench.run("suffix", llm, "chat", lambda: passes.append(1))
    assert len(passes) == 4 and len(report.plain) == len(report.drafted) == 2
    assert report.differing == 0
    assert report.tokens == report.plain[0].count == report.drafted[1].count
    assert report.tokens_per_step >= 1 and report.drafted[0].steps <= report.plain[0].steps
    assert all(share is None or 0 <= share <= 1 for share in report.acceptance)
    found = report.as_json()
    assert found["share_of_limit"] is None and found["gain"] == pytest.approx(report.rate / report.plain_rate)
    json.dumps(found)
