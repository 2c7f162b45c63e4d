"""What speculation gave to a request, or why it was off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from bankfull.cli.app import run_command
from bankfull.decode.draft_counts import DraftCounts
from bankfull.limits.explain.advice import Adviser
from bankfull.limits.explain.explain import Explanation, explain
from bankfull.limits.explain.recorder import DECODE, PREFILL, RequestRecorder, Story, StoryPart
from bankfull.limits.explain.run_story import run_followed
from bankfull.limits.explain.show import facts
from bankfull.limits.explain.speculation_account import speculation_of
from bankfull.limits.meter.step import StepShape
from bankfull.limits.meter.step_limit import step_limit_on
from bankfull.weights.medusa import write_heads
from tests.decode.test_drafting import needs_kernels
from tests.decode.test_medusa import random_heads
from tests.limits.test_explain import MEMORY_BOUND, adds_up, fresh, prompts, watched
from tests.tiny import speaking_folder

pytestmark = needs_kernels
EVERY_DRAFT = "suffix,adaptive=false"


def explained(llm: LLM, streams: int = 1, tokens: int = 40) -> tuple[Story, Story, Explanation]:
    recorder, limit, adviser = watched(llm)
    story, run = run_followed(llm, recorder, prompts(streams), tokens)
    found = explain(story, limit, adviser)
    adds_up(story, found)
    return story, run, found


@pytest.mark.parametrize("streams", [1, 3])
def test_steps_that_yield_several_tokens_count_each_once(streams: int) -> None:
    story, run, found = explained(fresh(speculative=EVERY_DRAFT), streams)
    decode = story.part(DECODE)
    assert story.part(PREFILL).tokens == 20 and decode.tokens == 39, "all tokens but the first, which prefill samples"
    assert decode.steps < 39, "this model repeats itself"
    assert run.part(PREFILL).tokens + run.part(DECODE).tokens == streams * 59
    account = found.speculation
    assert account is not None
    assert account.turns + account.accepted == 39 and account.tokens_per_step == pytest.approx(39 / decode.steps)
    assert account.accepted == sum(decode.drafts.accepted) > 0 and account.drafted == sum(decode.drafts.drafted)
    assert account.mean_accepted == pytest.approx(account.accepted / account.verifications)
    assert account.acceptance == pytest.approx(decode.drafts.acceptance)
    assert account.drafting_share is not None and 0 < account.drafting_share < 1
    assert "tokens per step" in facts(found) and "drafting took" in facts(found)


def test_the_limit_is_that_of_the_steps_with_their_drafts() -> None:
    """Rejected drafts cost time, so a step with drafts has a higher limit; the same tokens need fewer steps."""
    plain, drafted = (explained(fresh(speculative=name))[0].part(DECODE) for name in ("off", EVERY_DRAFT))
    assert plain.limit is not None and drafted.limit is not None
    assert drafted.steps < plain.steps and drafted.limit < plain.limit, "memory bounds these steps"
    assert drafted.limit / drafted.steps > plain.limit / plain.steps
    assert plain.features is not None and drafted.features is not None
    assert drafted.features[2] == drafted.turns + sum(drafted.drafts.drafted), "verified tokens"


def test_drafts_on_the_device_are_counted_and_timed(tmp_path: Path) -> None:
    _, _, found = explained(fresh(speculative=f"draft:{speaking_folder()},depth=3,adaptive=false"))
    account = found.speculation
    assert account is not None and account.drafted > 0 and account.verifications >= account.turns - 1
    assert account.drafting_share is not None and account.drafting_share > 0.05, "three passes of a second model"
    assert account.gain is None, "there were no steps without drafts"
    assert account.expected_gain is not None and 0 < account.expected_gain < account.tokens_per_step
    assert f"about {account.expected_gain:.2f}x the speed" in account.sentence
    config = json.loads((speaking_folder() / "config.json").read_text())
    write_heads(random_heads(1, heads=2, hidden=config["hidden_size"], vocab=config["vocab_size"]), tmp_path)
    heads = LLM(
        str(speaking_folder()), dtype="float32", memory="8MiB", speculative=f"medusa:{tmp_path},nodes=6,adaptive=false"
    )
    recorder = RequestRecorder(heads.loaded.frontend.engine, None)
    story, _ = run_followed(heads, recorder, prompts(1), 10)
    account = explain(story).speculation
    assert account is not None and account.drafted > 0 and story.part(DECODE).tokens == 9


@pytest.mark.parametrize(
    ("options", "params", "reason"),
    [
        ({"speculative": "off"}, {}, "no speculation: it is off"),
        ({"speculative": EVERY_DRAFT}, {"speculative": False}, "the request turned it off"),
        ({"speculative": "suffix,least=60"}, {}, "no draft was worth verifying in 9 steps"),
    ],
)
def test_why_it_was_off(options: dict[str, str], params: dict[str, bool], reason: str) -> None:
    llm = fresh(**options)
    recorder, limit, _ = watched(llm)
    front = llm.loaded.frontend
    request = front.submit(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, **params))
    pending = front.pending[request]
    recorder.follow(request, pending.arrived, drafts=pending.request.drafts)
    while not pending.result.finished:
        front.step()
    found = explain(recorder.finish(request, pending.arrived + (pending.result.metrics.finished or 0.0)), limit)
    assert found.speculation is not None and reason in found.speculation.sentence
    assert found.speculation.drafted == 0 and found.speculation.tokens_per_step == 1


def test_the_gain_compares_with_the_steps_without_drafts() -> None:
    story = Story(0.0, ended=10.0)
    part = story.parts[DECODE] = StoryPart(DECODE, seconds=10.0, steps=10, turns=10, tokens=20)
    part.plain_steps, part.plain_seconds, part.drafting = 5, 4.0, 0.5
    part.drafts = DraftCounts([5, 5, 5], [5, 3, 2])
    found = speculation_of(story)
    assert found is not None and found.tokens_per_step == 2 and found.acceptance == [1.0, 0.6, 0.4]
    # Two tokens in a second per step, against one token in 0.8 s.
    assert found.gain == pytest.approx(1.6) and "1.60x" in found.sentence and found.drafting_share == 0.05
    assert found.mean_accepted == 2
    part.plain_steps = 3
    few = speculation_of(story)
    assert few is not None and few.gain is None


@pytest.mark.parametrize("plain_steps", [5, 0], ids=["beside its own plain steps", "beside the limit without drafts"])
def test_speculation_that_loses_is_advised_against_before_anything_else(plain_steps: int) -> None:
    """A quarter of the speed of plain decoding: turning it off saves more than anything, and more streams keep it."""
    limit = step_limit_on(fresh(), MEMORY_BOUND)
    story = Story(0.0, ended=40.0)
    part = story.parts[DECODE] = StoryPart(DECODE, seconds=40.0, steps=10, turns=10, tokens=11, inside=39.0)
    part.features, part.sequences = 10 * limit.form.features(StepShape((41,), (64,), 41)), 10
    part.plain_steps, part.plain_seconds = plain_steps, 1.0 * plain_steps
    part.drafts, part.limit, part.plain = DraftCounts([10] * 40, [1] + [0] * 39), 10.0, 2.0
    advice = Adviser(limit, (), rows=64, step_tokens=512).advise(story)
    assert advice[0].options == {"speculative": "off"} and "would save" in advice[0].sentence
    assert [one.change for one in advice] == ["no speculation"]
    part.drafts, part.tokens = DraftCounts([10] * 4, [10] * 4), 100
    assert all(one.change != "no speculation" for one in Adviser(limit, (), 64, 512).advise(story))


def test_nothing_is_told_where_nothing_was_decoded() -> None:
    story = Story(0.0, ended=1.0)
    story.parts[PREFILL] = StoryPart(PREFILL, seconds=1.0, steps=1, tokens=20, turns=1)
    assert speculation_of(story) is None


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from bankfull.limits.machine import ceilings
    from tests.limits.test_explain import MEMORY_BOUND, folder

    monkeypatch.setattr(ceilings, "of_device", lambda *args, **more: MEMORY_BOUND)
    asked = ["explain", "-m", str(folder()), "--memory", "8MiB", "--dtype", "float32", "--max-tokens", "30"]
    assert run_command([*asked, "--speculative", EVERY_DRAFT]) == 0
    assert "speculation verified" in capsys.readouterr().out
    assert run_command([*asked, "--speculative", "off"]) == 0
    assert "no speculation: it is off" in capsys.readouterr().out
