"""Aborts, preemption, a pool that is too small, and two thousand requests of all kinds: the host never waits for the
device but for its results, every request ends, and no page stays behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from bankfull.errors import RequestError
from bankfull.sample.params import SamplingParams
from bankfull.state.spec import layout_of
from tests.gpu.place import CUDA, no_waiting, require_device
from tests.kit import Bench
from tests.tiny import VOCAB, model_of

require_device()

from tests.gpu.engines import Echo, bench_of, random_prompts  # noqa: E402
from tests.test_exact import NEW, prompts, truth  # noqa: E402

SHAPES = ("llama", "gemma", "mamba", "mamba2", "s4", "hybrid")
REQUESTS = 2000 if CUDA else 200
WISHES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(top_p=0.8, min_p=0.02, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.5, presence_penalty=0.3, logit_bias={5: 2.0}, banned_token_ids=[7]),
]


def drive(
    bench: Bench,
    between: Callable[[int], None] | None = None,
    *,
    more: Callable[[], bool] = lambda: False,
    most: int = 200_000,
) -> int:
    """Steps under the rule that nothing waits; `between` them things may happen. How many it took."""
    for step in range(most):
        if between is not None:
            between(step)
        if not bench.engine.busy and not more():
            bench.settled()
            return step
        with no_waiting():
            outputs = bench.engine.step()
        bench.take(outputs)
        bench.manager.check()
    raise AssertionError(f"not finished after {most} steps")


def warm(bench: Bench) -> None:
    """Compile what a first step compiles: that may wait."""
    for i, params in enumerate(WISHES):
        bench.add(("warm", i), [1, 2, 3], 4, params=params)
    bench.run()
    bench.poison()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", ("plain", "drafts"))
def test_no_step_waits_for_the_device(shape: str, strategy: str) -> None:
    bench = bench_of(shape, rows=4, strategy=Echo() if strategy == "drafts" else None)
    warm(bench)
    asked = prompts()
    for i, prompt in enumerate(asked):
        bench.add(i, prompt, NEW)
    drive(bench)
    for i, prompt in enumerate(asked):
        assert bench.tokens[i, 0] == list(truth(shape, tuple(prompt)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stage", ("waiting", "prompt", "decoding"))
def test_an_aborted_request_leaves_nothing_behind_and_disturbs_nobody(shape: str, stage: str) -> None:
    bench = bench_of(shape, rows=2, step_tokens=8, page=4)
    warm(bench)
    asked = prompts()[:3]
    for i, prompt in enumerate(asked):
        bench.add(i, prompt, NEW)
    victim, aborted = (2 if stage == "waiting" else 0), []

    def between(step: int) -> None:
        due = {"waiting": step == 1, "prompt": step == 2, "decoding": len(bench.tokens[victim, 0]) >= 5}[stage]
        if due and not aborted:
            aborted.append(step)
            bench.take(bench.engine.abort(victim))

    drive(bench, between)
    assert aborted and bench.finish[victim, 0] == "abort"
    for i, prompt in enumerate(asked):
        if i != victim:
            assert bench.tokens[i, 0] == list(truth(shape, tuple(prompt)))


def beginnings(shape: str, count: int) -> list[list[int]]:
    """Prompts of one token, which all get in and then grow together, and behind which the model does not hesitate."""
    found = []
    for token in range(VOCAB):
        with suppress(AssertionError):
            truth(shape, (token,))
            found.append([token])
        if len(found) == count:
            return found
    raise AssertionError(f"{shape} hesitates behind every token")


@pytest.mark.parametrize("shape", ("llama", "gemma"))
def test_a_pool_that_is_too_small_for_all_serves_them_all_the_same(shape: str) -> None:
    """Sequences are thrown out and come back; a request that can never fit is refused in one sentence."""
    asked = beginnings(shape, 5)
    longest = max(len(prompt) for prompt in prompts()) + NEW
    layout = layout_of(model_of(shape, torch.float32, "auto").states(), 4)
    frames = layout.frames_for(longest, 8) // 2 + 4
    bench = bench_of(shape, rows=4, step_tokens=8, frames=frames, page=4, prefix_cache=False)
    for i, prompt in enumerate(asked):
        bench.add(i, prompt, NEW)
    with pytest.raises(RequestError, match=r"pages of state, but the pool has \d+"):
        bench.add("huge", [1] * 120, 7)
    drive(bench)
    assert bench.engine.scheduler.preemptions > 0, "nobody was thrown out: the pool is not small"
    for i, prompt in enumerate(asked):
        assert bench.tokens[i, 0] == list(truth(shape, tuple(prompt)))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_random_day_leaves_no_page_behind(shape: str) -> None:
    draw = random.Random(11)
    frames = 70 if shape == "gemma" else 100  # most of its layers keep a window only
    bench = bench_of(shape, torch.float32, rows=24, step_tokens=96, frames=frames, page=4, max_len=96)
    warm(bench)
    known = prompts()
    added = aborted = 0
    exact: list[tuple[int, int]] = []
    """Requests whose answer is known, and which of the known prompts they asked."""

    def arrive() -> None:
        nonlocal added
        params, prompt, new = draw.choice(WISHES), random_prompts(1, seed=added)[0], draw.randint(1, 24)
        samples = draw.choice((1, 1, 1, 3))
        if added % 20 == 0:
            which = draw.randrange(len(known))
            prompt, new, params = known[which], NEW, WISHES[0]
            exact.append((added, which))
        stop = [draw.randrange(VOCAB)] if added % 20 and draw.random() < 0.3 else []
        bench.add(added, prompt, new, n=samples, params=params, seed=draw.getrandbits(40), stop=stop)
        added += 1

    def between(step: int) -> None:
        nonlocal aborted
        waiting = bench.engine.scheduler.waiting
        for _ in range(draw.randint(0, 3) if waiting < 40 else 0):
            if added < REQUESTS:
                arrive()
        if added and draw.random() < 0.05:
            victim = draw.randrange(added)
            if victim % 20:
                ended = bench.engine.abort(victim)
                bench.take(ended)
                aborted += bool(ended)

    drive(bench, between, more=lambda: added < REQUESTS)
    assert added == REQUESTS and aborted > 0
    assert shape in ("mamba", "mamba2", "s4") or bench.engine.scheduler.preemptions > 0
    assert set(bench.finish) == set(bench.tokens), "a request never ended"
    for request, which in exact:
        for child in range(3):
            if (request, child) in bench.tokens:
                assert bench.tokens[request, child] == list(truth(shape, tuple(known[which])))
