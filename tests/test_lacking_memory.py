"""An allocation that fails inside a step ends the request that caused it, and nobody else: whatever was being launched,
the others get the tokens of a plain loop, and no page or slot is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bankfull import LLM
from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import RequestError
from bankfull.runtime.device import Cpu
from bankfull.sample.params import SamplingParams
from bankfull.types import Output, StepPlan, Work
from tests.kit import GREEDY, Bench, device_of
from tests.test_exact import NEW, STRATEGIES, prompts, truth
from tests.tiny import VOCAB, kit_of, model_of, speaking_folder

ERRORS: list[Callable[[], Exception]] = [
    MemoryError,
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
    lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
]
LONG = [(5 * i + 3) % VOCAB for i in range(60)]
Fails = Callable[[StepPlan, set[object]], bool]


class Failing:
    """Raises at one place of every step that `fails`, after its work was done: as much is overwritten as can be."""

    def __init__(self, bench: Bench, point: str, fails: Fails, error: Callable[[], Exception] = MemoryError) -> None:
        self._bench, self._fails, self._error = bench, fails, error
        self.failures = 0
        self._plans: list[StepPlan] = []
        runner, engine = bench.runner, bench.engine
        owners: dict[int, set[object]] = {}
        forward = runner.forward

        def noted(plan: StepPlan) -> Any:
            self._plans.append(plan)
            owners[plan.step] = {engine._owner[work.row][0] for work in plan.work}
            return forward(plan)

        runner.forward = noted  # type: ignore[method-assign]

        def newest() -> tuple[StepPlan, set[object]]:
            plan = self._plans[-1]
            return plan, owners[plan.step]

        def after(work: Callable[..., Any], which: Callable[..., tuple[StepPlan, set[object]]]) -> Callable[..., Any]:
            def fails_then(*given: Any, **named: Any) -> Any:
                done = work(*given, **named)
                if self._fails(*which(*given)):
                    self.failures += 1
                    raise self._error()
                return done

            return fails_then

        def latest(*given: Any) -> tuple[StepPlan, set[object]]:
            return newest()

        def settled(plan: StepPlan, *rest: Any) -> tuple[StepPlan, set[object]]:
            return plan, owners.get(plan.step, set())

        places: dict[str, tuple[object, str, Callable[..., tuple[StepPlan, set[object]]]]] = {
            "rows": (runner.rows, "apply", latest),
            "forward": (runner, "_run", latest),
            "finish": (runner, "_choose", latest),
            "commit": (runner, "_commit", latest),
            "proposal": (runner.strategy, "propose", latest),
            "extras": (runner, "_prompt_extras", latest),
            "masks": (engine._grammars, "masks", latest),
            "copies": (runner.storage, "transfer", latest),
            "result": (runner, "result", settled),
        }
        place, name, which = places[point]
        setattr(place, name, after(getattr(place, name), which))


def made(shape: str, depth: int, *, cache: bool = True, late: bool = False, **more: Any) -> Bench:
    """At depth 1, work that is launched fails at its launch, as it does on a GPU: `late` is for what fails later."""
    device = device_of(depth, 1) if late else Cpu()
    sched = SchedConfig(**{"rows": 4, "step_tokens": 16, "policy": "priority", **more.pop("sched", {})})
    return Bench(
        model_of(shape, torch.float64),
        device,
        depth,
        sched,
        StateConfig(page_tokens=4, prefix_cache=cache, snapshot_every=2),
        **more,
    )


def add_others(bench: Bench, shape: str, **how: Any) -> dict[object, list[int]]:
    expected = {}
    for i, prompt in enumerate(prompts()[:3]):
        bench.add(i, prompt, NEW, tenant="ab"[i % 2], **how)
        expected[i] = list(truth(shape, tuple(prompt)))
    return expected


def assert_only_fails(bench: Bench, expected: dict[object, list[int]], cause: object, said: list[Output]) -> None:
    for name, tokens in expected.items():
        assert bench.tokens[name, 0] == tokens and bench.finish[name, 0] == "length", name
    assert bench.finish[cause, 0] == "error"
    [error] = {output.error for output in said}
    assert error is not None and error.startswith("The engine has too little memory for this request")
    bench.settled()
    bench.close()


def errors_of(bench: Bench) -> list[Output]:
    said: list[Output] = []
    take = bench.take

    def noting(outputs: list[Output]) -> None:
        said.extend(output for output in outputs if output.error is not None)
        take(outputs)

    bench.take = noting  # type: ignore[method-assign]
    return said


POINTS = ("rows", "forward", "finish", "commit", "result")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shape", ["llama", "gemma", "hybrid"])
@pytest.mark.parametrize("point", POINTS)
def test_the_request_whose_steps_lack_memory_ends_and_the_others_continue(point: str, shape: str, depth: int) -> None:
    error = ERRORS[(POINTS.index(point) + depth + len(shape)) % len(ERRORS)]
    bench = made(shape, depth, late=point == "result")
    said = errors_of(bench)
    expected = add_others(bench, shape)
    for _ in range(3):
        bench.step()
    bench.add("big", LONG, NEW)
    failing = Failing(bench, point, lambda plan, requests: "big" in requests, error)
    bench.run()
    assert 1 <= failing.failures <= 10, "it is found soon"
    assert_only_fails(bench, expected, "big", said)
    assert not bench.tokens["big", 0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_what_is_too_much_together_runs_in_smaller_steps(point: str, cache: bool, depth: int) -> None:
    bench = made("llama", depth, cache=cache, late=point == "result")
    said = errors_of(bench)
    expected = add_others(bench, "llama")
    bench.add("big", LONG, NEW)
    expected["big"] = list(truth("llama", tuple(LONG)))
    failing = Failing(bench, point, lambda plan, requests: plan.tokens > 8 and len(requests) > 1)
    bench.run()
    assert failing.failures and not said
    assert {name: bench.tokens[name, 0] for name in expected} == expected
    bench.settled()


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_whose_copies_lack_memory_are_computed_or_end(depth: int) -> None:
    bench = made("llama", depth)
    expected = add_others(bench, "llama")
    bench.add("big", LONG[:14], NEW, n=3)
    failing = Failing(bench, "copies", lambda plan, requests: any(t.in_step for t in plan.transfers))
    bench.run()
    assert failing.failures and {name: bench.tokens[name, 0] for name in expected} == expected
    alone = made("llama", depth)
    alone.add("big", LONG[:14], NEW)
    alone.run()
    for child in range(3):
        tokens = bench.tokens["big", child]
        assert tokens == alone.tokens["big", 0][: len(tokens)]
        assert bench.finish["big", child] == ("length" if len(tokens) == NEW else "error")
    bench.settled()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("what", ["prompt logprobs", "mean", "last"])
def test_logprobs_and_embeddings_that_lack_memory_end_alone(what: str, depth: int) -> None:
    bench = made("llama", depth)
    said = errors_of(bench)
    expected = add_others(bench, "llama")
    scored = what == "prompt logprobs"
    params = SamplingParams(temperature=0.0, prompt_logprobs=2) if scored else GREEDY
    bench.add("big", LONG, NEW, params=params, reuse=False, scored=scored)
    if not scored:
        object.__setattr__(bench.engine.scheduler._by_request["big"][0].request.payload, "pool", what)
    failing = Failing(bench, "extras", lambda plan, requests: "big" in requests)
    bench.run()
    assert failing.failures
    assert_only_fails(bench, expected, "big", said)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_mask_that_lacks_memory_ends_its_request(depth: int) -> None:
    bench = made("llama", depth)
    said = errors_of(bench)
    expected = add_others(bench, "llama")
    bench.add("big", LONG[:9], NEW)
    failing = Failing(bench, "masks", lambda plan, requests: "big" in requests)
    bench.run()
    assert failing.failures
    assert_only_fails(bench, expected, "big", said)


def some_of_them(drawn: random.Random) -> Fails:
    return lambda plan, requests: len(requests) > 1 and drawn.random() < 0.4


COMBINED = [("llama", name) for name in ("plain", "drafts", "lookup", "trees", "draft", "medusa")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "strategy"), [*COMBINED, ("hybrid", "plain"), ("hybrid", "drafts")])
@pytest.mark.parametrize("depth", [0, 1])
def test_failures_at_random_change_no_token(strategy: str, depth: int, shape: str) -> None:
    """Beside drafts, forks, tiers, preemption and captured steps. A step of one request never fails, so all end."""
    failures = 0
    for seed, point in enumerate((*POINTS, "proposal")):
        if point == "proposal" and strategy == "plain":
            continue
        asked = prompts()[:4]
        expected = [list(truth(shape, tuple(prompt))) for prompt in asked]
        truths = [[*prompt, *tokens] for prompt, tokens in zip(asked, expected, strict=True)]
        bench = made(
            shape,
            depth,
            cache=bool(seed % 2),
            late=point == "result",
            strategy=STRATEGIES[strategy](truths, seed),
            kit=kit_of(shape, torch.float64, "torch") if seed % 3 else None,
            tiers="host" if seed % 2 else "",
        )
        failing = Failing(bench, point, some_of_them(random.Random(seed)))
        for i, prompt in enumerate(asked):
            bench.add(i, prompt, NEW, n=1 + i % 2)
        bench.run(preempt=random.Random(seed))
        for i, tokens in enumerate(expected):
            for child in range(1 + i % 2):
                assert bench.tokens[i, child] == tokens, (point, i, child)
        failures += failing.failures
        bench.close()
    assert failures > 2


def test_another_error_still_ends_the_engine() -> None:
    bench = made("llama", 0)
    add_others(bench, "llama")
    Failing(bench, "forward", lambda plan, requests: True, lambda: RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        bench.run()


def test_a_request_that_repeats_fails_each_time_and_the_engine_lives() -> None:
    bench = made("llama", 0)
    said = errors_of(bench)
    Failing(bench, "forward", lambda plan, requests: any("big" in str(name) for name in requests))
    for turn in range(5):
        bench.add(f"big {turn}", LONG, NEW)
        bench.run()
    assert len(said) == 5
    bench.add("small", prompts()[0], NEW)
    bench.run()
    assert bench.tokens["small", 0] == list(truth("llama", tuple(prompts()[0])))


def test_an_embedding_that_begins_anew_is_that_of_a_whole_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(speaking_folder()), dtype="float32", memory="1MiB", step_tokens=25)
    asked = [[3 + i % 200 for i in range(60)], [7 + 3 * i % 150 for i in range(41)]]
    whole = [llm.embed([prompt], pooling="mean")[0] for prompt in asked]
    extras, failed = llm.loaded.engine.runner._prompt_extras, list[int]()

    def some_fail(batch: Any, hidden: Any, work: list[Work], landed: Any) -> None:
        extras(batch, hidden, work, landed)
        if len(work) > 1 and not failed:
            failed.append(len(work))
            raise MemoryError

    monkeypatch.setattr(llm.loaded.engine.runner, "_prompt_extras", some_fail)
    for found, expected in zip(llm.embed(asked, pooling="mean"), whole, strict=True):
        torch.testing.assert_close(torch.tensor(found.embedding), torch.tensor(expected.embedding))
    assert failed


def test_an_embedding_that_lacks_memory_is_refused_by_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(speaking_folder()), dtype="float32", memory="1MiB")

    def fails(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(llm.loaded.engine.runner, "_prompt_extras", fails)
    with pytest.raises(RequestError, match="too little memory for this request"):
        llm.embed([[3, 4, 5]])
    monkeypatch.undo()
    assert len(llm.embed([[3, 4, 5]])) == 1
