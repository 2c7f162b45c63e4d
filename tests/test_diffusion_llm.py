"""Diffusion models from text to text: detected from their configuration, served without options; what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bankfull.errors import ConfigError, RequestError
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams, StructuredOutput
from tests.models.diffusion import make_speaking
from tests.tiny import speaking_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_speaking(tmp_path_factory.mktemp("sdar"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_model_len=128)


def test_a_diffusion_model_is_served_without_options(llm: LLM) -> None:
    engine = llm.loaded.frontend.engine
    assert engine.scheduler.canvas is not None and engine.no_drafts
    done = llm.generate(["The river runs", "The engine"], GREEDY)
    assert [len(one.outputs[0].token_ids) for one in done] == [13, 13]
    assert all(one.outputs[0].finish_reason == "length" for one in done)
    mask = llm.loaded.model.vocab - 1
    assert not any(mask in one.outputs[0].token_ids for one in done)


def test_a_stream_comes_in_blocks_and_the_prefix_cache_serves_the_prompt(llm: LLM) -> None:
    prompt = list(range(5, 41))
    whole = llm.generate(prompt, GREEDY)[0]
    sizes = [len(delta.token_ids) for delta in llm.stream(prompt, GREEDY)]
    assert sizes == [4, 8, 1]  # 36 tokens end within a block; the limit ends within another
    again = llm.generate(prompt, GREEDY)[0]
    assert again.metrics.cached_tokens == 32 and again.outputs[0].token_ids == whole.outputs[0].token_ids


def test_samples_of_one_prompt_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=3, temperature=1.5, max_tokens=10, ignore_eos=True, top_k=40)
    first, second = (llm.generate("The river", params)[0] for _ in range(2))
    drawn = [tuple(one.token_ids) for one in first.outputs]
    assert len(set(drawn)) == 3 and drawn == [tuple(one.token_ids) for one in second.outputs]


def test_one_token_per_step_takes_a_step_for_each_token(folder: Path) -> None:
    slow = LLM(str(folder), max_model_len=128, diffusion="threshold=1")
    fast = LLM(str(folder), max_model_len=128, diffusion="threshold=0")
    for one, steps in ((slow, 16), (fast, 2)):
        one.generate(list(range(5, 37)), SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        assert one.loaded.frontend.engine.totals.steps == steps


REFUSED: list[dict[str, Any]] = [
    {"logprobs": 1},
    {"prompt_logprobs": 1},
    {"structured": StructuredOutput(regex="[ab]+")},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"bad_words": ["river"]},
    {"min_tokens": 2},
]


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: next(iter(asked)))
def test_what_needs_tokens_in_their_order_is_refused_by_name(llm: LLM, asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        llm.generate("The river", SamplingParams(max_tokens=4, **asked))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"speculative": "suffix"}, "not for a diffusion model"),
        ({"diffusion": "block=3"}, "divide"),
        ({"diffusion": "cache=block"}, "sees blocks"),
        ({"diffusion": "x"}, "no option"),
        ({"step_tokens": 4}, "less than the 8 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), max_model_len=128, **how)


def test_embeddings_and_causal_models_are_refused(llm: LLM) -> None:
    embed: Callable[..., Any] = llm.embed
    with pytest.raises(RequestError, match="embedding"):
        embed("The river")
    with pytest.raises(ConfigError, match="needs a diffusion model"):
        LLM(str(speaking_folder()), diffusion="threshold=0.9")


def test_pages_hold_whole_blocks_or_there_is_no_prefix_cache(folder: Path) -> None:
    assert LLM(str(folder), max_model_len=128, page_tokens=4).loaded.layout.block_tokens == 8
    odd = LLM(str(folder), max_model_len=128, page_tokens=12)
    assert not odd.loaded.frontend.engine.scheduler.state.prefix_cache
