"""Draft tokens that the host finds, through the whole engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.config import RunConfig
from bankfull.decode.drafting import Drafting
from bankfull.errors import ConfigError, ModelError, RequestError
from bankfull.ops import native
from bankfull.speculation import SPECULATIVE, SpeculativeChoice
from bankfull.types import StepPlan, StepResult
from bankfull.weights.bundled import SHAPE, bundled
from bankfull.weights.medusa import write_heads
from tests.decode.test_medusa import random_heads
from tests.tiny import speaking_folder

needs_kernels = pytest.mark.skipif(native.status() is not None, reason="the native kernels are missing")
PROMPT = list(range(40, 60)) * 3
"""Repeats itself, so that there is something to look up."""


def tiny(speculative: str, **options: Any) -> LLM:
    return LLM(str(speaking_folder()), device="cpu", dtype="float32", speculative=speculative, **options)


@pytest.mark.few(2)
@needs_kernels
@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("speculative", ("ngram,adaptive=false", "suffix,adaptive=false,least=1", "suffix", "auto"))
def test_any_lookup_gives_the_tokens_of_plain_decoding(speculative: str, depth: int) -> None:
    asked = [
        SamplingParams(temperature=temperature, seed=7, max_tokens=60, ignore_eos=True, n=n, logprobs=2, **more)
        for temperature, n, more in (
            (0.0, 1, {}),
            (0.0, 1, {"speculative": False}),
            (0.7, 2, {}),
            (0.7, 1, {"speculative": 1, "reference": "a text that may be repeated"}),
            (1.0, 1, {"repetition_penalty": 1.2, "stop": ["zzzz"]}),
        )
    ]
    prompts = [PROMPT[i:] for i in range(len(asked))]
    plain = tiny("off", depth=depth).generate(prompts, asked)
    llm = tiny(speculative, depth=depth)
    found = llm.generate(prompts, asked)
    for expected, got in zip(plain, found, strict=True):
        assert [one.token_ids for one in got.outputs] == [one.token_ids for one in expected.outputs]
        assert [one.text for one in got.outputs] == [one.text for one in expected.outputs]
        assert [len(one.logprobs or []) for one in got.outputs] == [60] * len(expected.outputs)
    engine = llm.loaded.engine
    assert engine.drafting is not None and not engine.drafting._tracked, "an index outlived its sequence"
    assert not engine.drafting._expected
    if "false" in speculative:
        assert sum(engine.totals.drafted) > 0


def test_a_second_model_and_heads_are_chosen_by_name(tmp_path: Path) -> None:
    config = json.loads((speaking_folder() / "config.json").read_text())
    write_heads(random_heads(1, heads=2, hidden=config["hidden_size"], vocab=config["vocab_size"]), tmp_path)
    params = [SamplingParams(temperature=t, seed=5, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
    expected = [one.outputs[0].token_ids for one in tiny("off").generate([PROMPT, PROMPT[5:]], params)]
    for choice in (f"draft:{speaking_folder()},depth=3,adaptive=false", f"medusa:{tmp_path},nodes=6,adaptive=false"):
        llm = tiny(choice)
        found = llm.generate([PROMPT, PROMPT[5:]], params)
        assert [one.outputs[0].token_ids for one in found] == expected
        assert sum(llm.loaded.engine.totals.drafted) > 0
    with pytest.raises(ModelError, match="not a directory of Medusa heads"):
        tiny(f"medusa:{tmp_path / 'none'}")


@needs_kernels
def test_a_request_may_limit_or_refuse_drafts() -> None:
    for limit, most in ((False, 0), (0, 0), ("off", 0), (2, 2), (True, 8), ("auto", 8), ("ngram", 8)):
        llm = tiny("ngram,adaptive=false")
        widths: list[int] = []
        llm.loaded.engine.on_launch.append(lambda plan, widths=widths: widths.extend(w.drafts for w in plan.work))
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculative=limit))
        assert max(widths) == most


@needs_kernels
def test_a_request_may_name_only_what_runs() -> None:
    for runs, others in (("ngram", ("suffix", "chain")), ("auto", ("ngram", "eagle")), ("off", ("suffix", "chain"))):
        llm = tiny(runs)
        own = SpeculativeChoice.parse(runs).ways(lookup=runs != "off")
        for name in ("off", "auto", *own):
            llm.generate([PROMPT], SamplingParams(max_tokens=2, speculative=name))
        for other in others:
            with pytest.raises(RequestError) as refused:
                llm.generate([PROMPT], SamplingParams(max_tokens=2, speculative=other))
            said = str(refused.value)
            assert said.startswith(f"speculative is {other!r}, but the ways of drafting that run here are ")
            assert all(repr(name) in said for name in ("off", "auto", *own)) and said.endswith(".") and len(said) < 300


@needs_kernels
def test_each_request_of_a_chain_drafts_only_as_it_asked_for() -> None:
    """Requests beside each other in a batch: by lookup alone, never by lookup, by both, and not at all."""
    prompts = [[*PROMPT, number] for number in range(4)]
    common = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = [one.outputs[0].token_ids for one in tiny("off").generate(prompts, common)]
    llm = tiny(f"chain:draft:{speaking_folder()},depth=3,adaptive=false")
    engine = llm.loaded.engine
    seen: dict[str, set[tuple[bool, bool]]] = {"suffix": set(), "draft": set(), "chain": set(), "off": set()}
    names = dict(enumerate(seen))

    def watch(plan: StepPlan, result: StepResult) -> None:
        guessed = {guess.row for guess in plan.guesses}
        for work in plan.work:
            seen[names[rows[work.row]]].add((work.drafts > 0, work.row in guessed))

    rows: dict[int, int] = {}
    engine.on_launch.append(lambda plan: rows.update({one.row: prompts.index(list(one.tokens)) for one in plan.enter}))
    engine.on_settle.append(watch)
    found = llm.generate(prompts, [replace(common, speculative=name) for name in seen])
    assert [one.outputs[0].token_ids for one in found] == expected
    assert seen["off"] == {(False, False)}
    assert seen["suffix"] == {(False, False), (True, True)}
    assert seen["draft"] == {(False, False), (True, False)}
    assert seen["chain"] >= {(True, True), (True, False)}


@needs_kernels
def test_a_reference_is_looked_up() -> None:
    """The answer itself as the reference: nearly all of it is drafted."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True)
    prompt = [7, 9, 11]
    plain = tiny("off").generate([prompt], params)[0].outputs[0]
    steps = {}
    for reference in (None, plain.text):
        llm = tiny("suffix,adaptive=false,least=1")
        got = llm.generate([prompt], replace(params, reference=reference))[0].outputs[0]
        assert got.token_ids == plain.token_ids
        steps[reference] = llm.loaded.engine.totals.steps
    assert steps[plain.text] < steps[None]
    with pytest.raises(RequestError, match=r"The reference has .* tokens, but may have"):
        tiny("suffix").generate([prompt], replace(params, reference="word " * 9000))


@needs_kernels
def test_adaptive_drafts_only_where_they_pay() -> None:
    """A step that takes as long as its tokens one by one leaves nothing to gain."""
    for each, drafts in ((0.0, True), (1.0, False)):
        llm = tiny("suffix")
        engine = llm.loaded.engine
        drafting = engine.drafting
        assert isinstance(drafting, Drafting)
        observe = drafting.costs.observe
        drafting.costs.observe = lambda tokens, _, each=each, observe=observe: observe(  # type: ignore[method-assign]
            tokens, 1.0 + each * (tokens - 1)
        )
        for tokens in range(1, 20):
            drafting.costs.observe(tokens, 0.0)
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert (sum(engine.totals.drafted) > 0) == drafts


def test_options_are_read_from_one_text() -> None:
    usual = {"width": 12, "least": 2, "adaptive": True}
    assert SpeculativeChoice.parse("suffix").options == usual
    found = SpeculativeChoice.parse(" ngram , width=3, least = 1,most=2,adaptive=false")
    assert found.options == {"width": 3, "least": 1, "most": 2, "adaptive": False}


def test_lookup_is_the_default_and_the_environment_may_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BANKFULL_SPECULATIVE")
    assert RunConfig().speculative == "auto"
    llm = LLM(str(speaking_folder()), dtype="float32")
    assert (llm.loaded.engine.drafting is not None) == (native.status() is None)
    monkeypatch.setenv("BANKFULL_SPECULATIVE", "jacobi,width=2")
    assert RunConfig().speculative == "jacobi,width=2"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("guess", f"is unknown; use {', '.join(SPECULATIVE)}."),
        ("suffix:smollm2", "takes no model; leave out 'smollm2'."),
        ("draft", "needs a model: draft:PATH."),
        ("medusa,nodes=4", "has trained heads for SmolLM2-135M-Instruct only, and 'bankfull-speaking"),
        ("suffix,most=4", "has no option 'most'; its options are width, least, adaptive."),
        ("mtp:somewhere", "takes no model; leave out 'somewhere'."),
        ("mtp,depth=2", "has no option 'depth'; its options are width, adaptive."),
        ("chain", "must name what drafts where lookup finds nothing: chain:medusa:PATH."),
        ("chain:suffix", "must name what drafts where lookup finds nothing: chain:medusa:PATH."),
        ("off,width=2", "has no option 'width'; it has none."),
        ("suffix,width=0", "width must be a whole number from 1 to 63, not '0'."),
        ("suffix,width=x", "width must be a whole number from 1 to 63, not 'x'."),
        ("ngram,adaptive=1", "adaptive must be true or false, not '1'."),
        ("draft:x,rule=best", "rule must be same or rejection or typical, not 'best'."),
        ("medusa:x,rule=rejection", "rule must be same or typical, not 'rejection'; heads do not sample their drafts."),
        ("suffix,rule=typical", "has no option 'rule'"),
        (
            "chain:draft:x,rule=rejection",
            "rule=rejection needs sampled drafts, and those of a lookup are not; drop it.",
        ),
        ("ngram,least=5,most=2", "most must not be less than least"),
    ],
)
def test_a_wrong_choice_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        LLM(str(speaking_folder()), speculative=text)
    assert str(caught.value).count("\n") == 0


def test_heads_that_are_not_installed_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.weights.bundled.MODULE", "no_such_module")
    with pytest.raises(ConfigError, match=r"'eagle' needs the package bankfull-smollm2-heads.*pip install ./heads"):
        bundled("eagle", SHAPE, "smollm2")


@pytest.mark.parametrize("wrong", (1.5, "yes", -1))
def test_a_wrong_limit_of_a_request_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="speculative"):
        SamplingParams(speculative=wrong)
    with pytest.raises(RequestError, match="reference must be a text"):
        SamplingParams(reference=3)  # type: ignore[arg-type]


@needs_kernels
def test_a_chain_looks_up_first_and_drafts_where_nothing_is_found() -> None:
    params = [SamplingParams(temperature=t, seed=5, max_tokens=40, ignore_eos=True) for t in (0.0, 0.8)]
    prompts = [PROMPT, list(range(70, 90))]
    expected = [one.outputs[0].token_ids for one in tiny("off").generate(prompts, params)]
    llm = tiny(f"chain:draft:{speaking_folder()},depth=3,adaptive=false")
    guessed, drafted = 0, 0

    def count(plan: StepPlan, result: StepResult) -> None:
        nonlocal guessed, drafted
        looked_up = {guess.row for guess in plan.guesses}
        guessed += len(looked_up)
        drafted += sum(bool(w.drafts) for w in plan.work if w.row not in looked_up)

    llm.loaded.engine.on_settle.append(count)
    assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == expected
    assert guessed > 0 and drafted > 0
