"""Why was it slow? Accounts that add up, and advice that is true when it is followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams
from bankfull.cli.app import run_command
from bankfull.limits.explain.advice import MORE_STREAMS, Adviser, adviser_of
from bankfull.limits.explain.explain import Explanation, explain
from bankfull.limits.explain.recorder import DECODE, PREEMPTED, PREFILL, RECOMPUTE, RequestRecorder, Story
from bankfull.limits.explain.run_story import run_followed
from bankfull.limits.explain.show import facts
from bankfull.limits.explain.slow_part import SlowPart
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.step_limit import StepLimit, step_limit_on
from tests.kit import late_devices
from tests.tiny import speaking_folder

PEAKS = dict.fromkeys(("float32", "bfloat16", "int8"), 1e15)
MEMORY_BOUND = Ceilings(1e9, 1e9, PEAKS, 1, "slow memory", "now", 1, 0, 0)


@lru_cache
def folder() -> Path:
    """The speaking model's tokenizer over a wider one, whose weights outweigh all else."""
    import atexit
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="bankfull-explained-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    shutil.copytree(speaking_folder(), made, dirs_exist_ok=True)
    config = transformers.LlamaConfig.from_pretrained(made)
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 512, 32
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made


def fresh(**options: Any) -> LLM:
    """One token per step, which these tests count; `test_explain_speculation` has steps with drafts."""
    return LLM(str(folder()), **{"dtype": "float32", "memory": "8MiB", "speculative": "off", **options})


def watched(llm: LLM) -> tuple[RequestRecorder, StepLimit, Adviser]:
    """Whether kernels are near the limit hangs on the machine that the test runs on: no advice here follows from it."""
    limit = step_limit_on(llm, MEMORY_BOUND)
    return (
        RequestRecorder(llm.loaded.frontend.engine, limit),
        limit,
        replace(adviser_of(llm, limit), kernels=None),
    )


def prompts(count: int, length: int = 20) -> list[list[int]]:
    return [[(7 * number + 3 * place) % 300 for place in range(length)] for number in range(count)]


def adds_up(story: Story, found: Explanation) -> None:
    assert sum(part.seconds for part in found.parts) == pytest.approx(story.seconds, rel=1e-6, abs=1e-6)
    for part in found.parts:
        if part.detail is not None:
            assert sum(astuple(part.detail)) == pytest.approx(part.seconds, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("step_tokens", [512, 16])
def test_the_parts_of_a_request_add_up_to_its_time(streams: int, step_tokens: int) -> None:
    llm = fresh(step_tokens=step_tokens)
    recorder, limit, adviser = watched(llm)
    story, run = run_followed(llm, recorder, prompts(streams), 10)
    found = explain(story, limit, adviser)
    adds_up(story, found)
    adds_up(run, explain(run, limit, adviser))
    parts = {part.part: part for part in found.parts}
    assert parts[PREFILL].tokens == 20 and parts[DECODE].tokens == 9
    assert parts[PREFILL].steps == -(-20 // step_tokens)
    assert run.part(PREFILL).tokens + run.part(DECODE).tokens == streams * 29
    assert found.prompt_tokens == 20 and found.cached_tokens == found.preemptions == 0
    detail = parts[DECODE].detail
    assert detail is not None and detail.own_limit is not None and detail.batch_mates is not None
    assert detail.own_limit > 0 and (detail.batch_mates > 0) == (streams > 1)


def test_nothing_is_timed_without_a_followed_request() -> None:
    llm = fresh()
    engine = llm.loaded.frontend.engine
    recorder, _, _ = watched(llm)
    assert not engine.on_settle and not engine.runner.observers
    run_followed(llm, recorder, prompts(2), 3)
    assert not engine.on_settle and not engine.runner.observers
    with pytest.raises(Exception, match="context"):
        run_followed(llm, recorder, [*prompts(1), [1] * 300], 3)
    assert not engine.on_settle and not engine.runner.observers and not llm.loaded.frontend.pending


def test_following_replaces_nothing_on_a_live_engine() -> None:
    llm = fresh()
    engine = llm.loaded.frontend.engine
    device, head = engine.runner.device, engine.runner.model.head
    seen = []
    engine.on_launch.append(
        lambda plan: seen.append(
            (engine.runner.device is device, engine.runner.model.head is head, len(engine.runner.observers))
        )
    )
    recorder, _, _ = watched(llm)
    run_followed(llm, recorder, prompts(2), 3)
    assert set(seen) == {(True, True, 1)}


def test_a_late_device_changes_nothing_but_the_time() -> None:
    with late_devices():
        llm = fresh(device="auto")
        assert llm.loaded.frontend.engine.depth == 1
        recorder, limit, adviser = watched(llm)
        story, _ = run_followed(llm, recorder, prompts(3), 10)
    adds_up(story, explain(story, limit, adviser))
    assert story.part(PREFILL).tokens == 20 and story.part(DECODE).tokens >= 9


def test_a_cached_prefix_is_told_with_what_it_spared() -> None:
    llm = fresh(page_tokens=4)
    recorder, limit, _ = watched(llm)
    run_followed(llm, recorder, prompts(1), 3)
    story, _ = run_followed(llm, recorder, prompts(1), 3)
    found = explain(story, limit)
    assert found.cached_tokens == 16 and found.cached_saved_seconds is not None and found.cached_saved_seconds > 0
    assert "16 of 20 prompt tokens were cached" in facts(found)


def follow(llm: LLM, recorder: RequestRecorder, between: Callable[[int], None], count: int = 10) -> Story:
    """One request; `between` is called behind each step."""
    front = llm.loaded.frontend
    request = front.submit(prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    pending = front.pending[request]
    recorder.follow(request, pending.arrived)
    steps = 0
    while not pending.result.finished:
        front.step()
        steps += 1
        between(steps)
    return recorder.finish(request, pending.arrived + (pending.result.metrics.finished or 0.0))


def test_prompts_of_others_are_told_apart_from_batch_mates() -> None:
    llm = fresh()
    recorder, limit, _ = watched(llm)
    others = iter(prompts(3, 60)[1:])

    def between(step: int) -> None:
        if step in (3, 5):
            llm.loaded.frontend.submit(next(others), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))

    found = explain(follow(llm, recorder, between), limit)
    decode = next(part for part in found.parts if part.part == DECODE)
    assert decode.detail is not None
    assert (decode.detail.other_prompts or 0) > 0 and (decode.detail.batch_mates or 0) > 0


def test_a_preempted_request_counts_recomputed_tokens() -> None:
    llm = fresh(prefix_cache=False)
    recorder, limit, adviser = watched(llm)
    scheduler = llm.loaded.frontend.engine.scheduler

    def between(step: int) -> None:
        if step == 4:
            scheduler._preempt(scheduler._running[0])

    story = follow(llm, recorder, between)
    found = explain(story, limit, adviser)
    adds_up(story, found)
    room = next(adviser._room(story))
    assert room.seconds_saved == pytest.approx(story.part(RECOMPUTE).seconds) and room.options == {"kv_dtype": "int8"}
    held = [fresh(**options).loaded.frontend.engine.scheduler.state.pages.size for options in ({}, room.options)]
    assert held[1] > 2 * held[0], "the same memory holds no more pages"
    assert recorder.run is not None and (recorder.run.preemptions, recorder.run.recomputed) == (1, 23)
    assert (found.preemptions, found.recomputed_tokens) == (1, 23)
    assert RECOMPUTE in {part.part for part in found.parts} and PREEMPTED not in {part.part for part in found.parts}


def test_without_ceilings_there_is_time_but_no_limit() -> None:
    llm = fresh()
    story, _ = run_followed(llm, RequestRecorder(llm.loaded.frontend.engine, None), prompts(2), 4)
    found = explain(story)
    assert {part.percent_of_limit for part in found.parts} == {None} and not found.advice
    assert "took" in found.summary and "limit" not in found.summary
    assert sum(part.seconds for part in found.parts) == pytest.approx(story.seconds)


# -- following the advice


def step_limit(llm: LLM, streams: int, count: int, *names: str) -> float:
    """Seconds of the average step at the limit, by the meter, when `llm` runs that many requests."""
    recorder, _, _ = watched(llm)
    story, _ = run_followed(llm, recorder, prompts(streams), count)
    found = [story.part(name) for name in names]
    return sum(part.limit or 0.0 for part in found) / sum(part.steps for part in found)


def test_fewer_bytes_for_weights_save_what_was_promised() -> None:
    llm = fresh(activations="float")
    recorder, limit, adviser = watched(llm)
    story, _ = run_followed(llm, recorder, prompts(1), 40)
    advice = next(a for a in explain(story, limit, adviser).advice if "weights" in a.change)
    assert advice.options["quantize"] == "int4" and advice.seconds_saved > 0
    assert advice.limit_after < advice.limit_before
    followed = fresh(activations="float", **advice.options)
    before, after = (step_limit(model, 1, 40, PREFILL, DECODE) for model in (fresh(activations="float"), followed))
    assert after < before
    assert after / before == pytest.approx(advice.limit_after / advice.limit_before, rel=0.02)


def test_more_streams_cost_each_a_little_and_give_all_together_more() -> None:
    llm = fresh()
    recorder, limit, adviser = watched(llm)
    story, _ = run_followed(llm, recorder, prompts(2), 20)
    advice = next(a for a in explain(story, limit, adviser).advice if a.change == "more streams")
    assert advice.throughput_gain > 0 and advice.limit_after > advice.limit_before
    more = step_limit(fresh(), 2 + MORE_STREAMS, 20, DECODE)
    assert more == pytest.approx(advice.limit_after, rel=0.02)
    assert (2 + MORE_STREAMS) / more > 2 / advice.limit_before


def test_smaller_chunks_shorten_the_steps_that_decode_beside_prompts() -> None:
    def decode_limit(llm: LLM) -> tuple[float, Any]:
        recorder, _, adviser = watched(llm)

        def between(step: int) -> None:
            if step == 2:
                prompt = prompts(2, 150)[1]
                llm.loaded.frontend.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))

        story = follow(llm, recorder, between, 4)
        part = story.part(DECODE)
        assert part.limit is not None
        return part.limit / part.steps, next((a for a in adviser._chunks(story)), None)

    before, advice = decode_limit(fresh(step_tokens=64))
    assert advice is not None and advice.options == {"step_tokens": "32"} and advice.limit_after < advice.limit_before
    after, _ = decode_limit(fresh(step_tokens=32))
    assert after < before


def test_a_change_that_saves_nothing_is_not_advised() -> None:
    llm = fresh(quantize="int4", kv_dtype="int8", activations="float")
    recorder, limit, adviser = watched(llm)
    story, _ = run_followed(llm, recorder, prompts(1), 10)
    assert {a.change for a in explain(story, limit, adviser).advice} <= {"more streams"}


# -- kernels far below the limit


def followed() -> tuple[Story, StepLimit, Adviser]:
    """A request whose kernels were timed one by one."""
    llm = fresh()
    limit = step_limit_on(llm, MEMORY_BOUND)
    story, _ = run_followed(llm, RequestRecorder(llm.loaded.frontend.engine, limit), prompts(1), 20)
    return story, limit, adviser_of(llm, limit)


def at(story: Story, limit: StepLimit, adviser: Adviser, reached: Callable[[str], float]) -> Explanation:
    """As if each kernel had reached so much of its limit, and nothing else had taken time."""
    assert adviser.kernels is not None
    for part in story.parts.values():
        assert part.features is not None
        reach = limit.ceilings.read_at(limit.form.cost_of(part.features / part.steps).read)
        for label in part.kernels:
            least = adviser.kernels.costs.summed(label, part.features).seconds(limit.rates, reach)
            part.kernels[label] = least / reached(adviser.kernels.name_of(label))
        part.inside = part.seconds = sum(part.kernels.values())
    story.ended = story.arrived + story.queue + sum(part.seconds for part in story.parts.values())
    return explain(story, limit, adviser)


def test_every_kernel_of_a_step_is_timed_and_has_a_name() -> None:
    story, _, adviser = followed()
    assert adviser.kernels is not None
    for part in story.parts.values():
        names = {adviser.kernels.name_of(label) for label in part.kernels}
        assert {"the linear layers of the MLP", "the linear layers around attention", "attention", "the head"} <= names
        assert all(seconds > 0 for seconds in part.kernels.values())


def test_the_kernels_that_lose_most_are_named_instead_of_more_streams() -> None:
    story, limit, adviser = followed()
    mlp = "the linear layers of the MLP"
    found = at(story, limit, adviser, lambda name: 0.1 if name == mlp else 0.9)
    assert [advice.change for advice in found.advice] == ["slow kernels"]
    share = story.part(DECODE).kernels
    of_mlp = sum(s for label, s in share.items() if adviser.kernels and adviser.kernels.name_of(label) == mlp)
    part = max(story.parts.values(), key=lambda part: part.seconds)
    assert part.name == DECODE
    told = f"{mlp} take {of_mlp / part.seconds:.0%} of decode at 10% of their limit; these kernels ("
    assert told in found.summary and "more streams" not in found.summary
    assert found.advice[0].seconds_saved == pytest.approx(0.9 * of_mlp)
    head = at(story, limit, adviser, lambda name: 0.05 if name == "the head" else 0.9)
    assert "The head takes" not in head.summary and "the head takes" in head.summary


def test_kernels_near_the_limit_are_not_blamed() -> None:
    story, limit, adviser = followed()
    found = at(story, limit, adviser, lambda name: 0.9)
    assert "slow kernels" not in {advice.change for advice in found.advice}


def test_what_torch_computes_is_told_to_have_no_kernel() -> None:
    slow = SlowPart("selective_scan", 2.0, 0.1, 0.8, True)
    told = "selective_scan takes 80% of decode at 5% of its limit, because torch computes it: there is no kernel"
    assert slow.sentence(DECODE, "neon") == f"{told} for it here"


# -- the command


def test_the_command_runs_a_request_and_reads_its_own_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["explain", "The river", "-m", str(folder()), "--memory", "8MiB", "--dtype", "float32", "--max-tokens", "4"]
    assert run_command([*asked, "--streams", "3", "--json"]) == 0
    told = capsys.readouterr().out
    found = json.loads(told)
    assert set(found) == {"request", "run"} and found["request"]["parts"]
    (tmp_path / "told.json").write_text(told)
    assert run_command(["explain", "--saved", str(tmp_path / "told.json")]) == 0
    shown = capsys.readouterr().out
    assert "prefill" in shown and "decode" in shown and found["request"]["summary"] in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--saved", "/nowhere/at/all"], "cannot be read"),
        (["--saved", "TEXT"], "holds no explanation"),
        (["--url", "ftp://x", "hello"], "http://"),
        (["--url", "http://127.0.0.1:9", "hello"], "does not answer"),
        (["--url", "http://127.0.0.1:9"], "needs a prompt"),
        (["--url", "http://x", "--saved", "y"], "one of the two"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("{}")
    assert run_command(["explain", *(str(tmp_path / "text") if a == "TEXT" else a for a in arguments)]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
