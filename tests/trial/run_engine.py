"""Runs a case on an engine in this process: through the front end, step by step, with hands on what happens between
steps. Free pages and slots are poisoned after each."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import bankfull.assembly
import bankfull.loading
from bankfull.decode.drafting import Drafting
from bankfull.errors import BankfullError, RequestError
from bankfull.frontend import Frontend
from bankfull.live_weights import stage_weights
from bankfull.loading import Loaded
from bankfull.runtime.memory import Sizes
from bankfull.sample.params import SamplingParams, StructuredOutput
from tests.kit import add_lower_tiers, device_of, poison
from tests.trial.case import Ask
from tests.trial.models import others_of
from tests.trial.outcome import Got, Outcome, Refused
from tests.trial.plain import Expected
from tests.trial.setup import Setup

MOST_STEPS = 3000
ROUTING = ("priority", "salt", "tenant")
NOT_SAMPLING = ("cuts", "arrive", "abort", "later", "stream", "tools", *ROUTING)
"""Settings of a request that are no sampling parameters."""


def params_of(ask: Ask) -> SamplingParams:
    given = {name: value for name, value in ask.settings.items() if name not in NOT_SAMPLING}
    given.setdefault("temperature", 0.0)
    if "structured" in given:
        given["structured"] = StructuredOutput(**given["structured"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return SamplingParams(**given)


@contextmanager
def loading(setup: Setup, truths: Sequence[Sequence[int]]) -> Iterator[Callable[[], Loaded]]:
    """What loads the engine of a case: the loader that every user has. What the case changes around it is undone."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        run, sched, state = _configs(setup, stack)
        if setup.tight:
            patch.setattr(bankfull.assembly, "plan_memory", partial(_hardly_enough, bankfull.assembly.plan_memory))
        if not setup.captured:
            runner = bankfull.assembly.DeviceRunner
            patch.setattr(bankfull.assembly, "DeviceRunner", lambda *a, **k: runner(*a, **{**k, "kit": None}))
        if setup.tiers:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bankfull-trial-tiers-")))
            patch.setattr(
                bankfull.assembly,
                "add_tiers",
                lambda manager, runner, *_: add_lower_tiers(setup.tiers, manager, runner, folder),
            )
        if setup.lookup is not None:
            patch.setattr(bankfull.assembly, "host_drafting", partial(_looking_up, setup.lookup, truths))
        made: list[Loaded] = []

        def load() -> Loaded:
            """A further call makes another engine: a replica."""
            device = device_of(int(setup.late), setup.case.seed + len(made))
            strategy = None if setup.strategy is None else setup.strategy(truths)
            folder = str(setup.model.folder)
            how = {"device": device, "strategy": strategy}
            made.append(bankfull.loading.load(folder, run, sched, state, setup.longest, **how))  # type: ignore[arg-type]
            return made[-1]

        try:
            yield load
        finally:
            for one in made:
                if one.engine.runner.mover is not None:
                    one.engine.runner.mover.close()


def _looking_up(make: Callable[[Any], Any], truths: Any, choice: Any, device: Any, layout: Any, depth: int) -> Drafting:
    lookup = make(truths)
    return Drafting(lookup, lookup.most, depth, None)


def _configs(setup: Setup, stack: ExitStack) -> Any:
    if "kv_disk" in setup.state:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bankfull-trial-disk-"))
        setup.state["kv_disk"] = f"{setup.state['kv_disk'].partition(':')[0]}:{Path(folder)}"
    try:
        return setup.configs()
    except BankfullError as error:
        raise Refused(str(error)) from error


def _hardly_enough(plan: Any, layout: Any, sched: Any, *rest: Any, **more: Any) -> Sizes:
    """Pages for the longest sequence and little beside it."""
    sizes: Sizes = plan(layout, sched, *rest, **more)
    least = layout.frames_for(sizes.max_len, sched.step_tokens)
    return replace(sizes, frames=min(sizes.frames, least + least // 4))


def truths_of(setup: Setup, expected: Sequence[Sequence[Expected]]) -> list[list[int]]:
    """Whole sequences of the plain loop, for guesses."""
    pairs = zip(setup.case.asks, expected, strict=True)
    return [[*ask.prompt, *one.tokens, *one.beyond] for ask, samples in pairs for one in samples]


def run(setup: Setup, expected: Sequence[Sequence[Expected]]) -> list[Outcome]:
    """`expected`: what the plain loop gives for each sample, where guesses or resumed requests need it."""
    with loading(setup, truths_of(setup, expected)) as load:
        try:
            made = load()
        except BankfullError as error:
            raise Refused(str(error)) from error
        loop = Loop(setup, made.frontend, expected, lambda: poison(made.engine), made)
        loop.run()
        return loop.outcomes


class Loop:
    def __init__(
        self,
        setup: Setup,
        front: Frontend,
        expected: Sequence[Sequence[Expected]],
        poison: Callable[[], None],
        loaded: Loaded | None = None,
    ) -> None:
        """`poison`: called after each step. `loaded`: the engine, where weights are written."""
        self.setup, self.front, self.expected, self.poison = setup, front, expected, poison
        self.outcomes = [Outcome() for _ in setup.case.asks]
        self.streamed: dict[tuple[int, int], str] = {}
        self.aborts: dict[int, int] = {}
        """Request -> the step before which it is aborted."""
        self.waiting = sorted(range(len(setup.case.asks)), key=lambda i: setup.case.asks[i].get("arrive", 0))
        self.loaded, self.later = loaded, list[int]()
        self.write_at = MOST_STEPS
        if setup.written and loaded is not None:
            self.later = [i for i in self.waiting if setup.case.asks[i].get("later")]
            self.waiting = [i for i in self.waiting if i not in self.later]
            self.write_at = random.Random(f"write {setup.case.seed}").randrange(16)

    def run(self) -> None:
        engine, scheduler = self.front.engine, self.front.engine.scheduler
        preempt = random.Random(self.setup.case.seed) if self.setup.preempts else None
        left = 8
        for step in range(MOST_STEPS):
            if step >= self.write_at or (self.later and not engine.busy and not self.waiting):
                self._write()
            while self.waiting and (self.setup.case.asks[self.waiting[0]].get("arrive", 0) <= step or not engine.busy):
                self._submit(self.waiting.pop(0), step)
            for request in [r for r, when in self.aborts.items() if when <= step]:
                del self.aborts[request]
                self._absorb(self.front.abort(request))
            scheduler.sealed = not self.waiting and not self.later
            if not engine.busy and not self.waiting and not self.later:
                break
            if preempt is not None and left and scheduler._running and preempt.random() < 0.15:
                left -= 1
                scheduler._preempt(preempt.choice(scheduler._running), for_memory=left % 2 == 0)
            self._absorb(self.front.step())
            scheduler.state.check()
            self.poison()
            if engine.busy and scheduler.stuck:
                wake = engine.wake_at()
                time.sleep(max(0.0, min(0.001, 0.001 if wake is None else wake - time.monotonic())))
        else:
            raise AssertionError(f"not finished after {MOST_STEPS} steps")
        self._collect()
        pages, slots = scheduler.state.census()
        held = (pages.held, pages.quarantined, slots.held, slots.quarantined)
        assert held == (0, 0, 0, 0), f"left behind: {pages} {slots}"
        assert not scheduler.state.moves, "transfers are left behind"

    def _write(self) -> None:
        assert self.loaded is not None
        try:
            staged = stage_weights(self.loaded, others_of(self.setup.case.model).folder)
        except BankfullError as error:
            raise Refused(str(error)) from error
        staged.write(self.setup.written == "restart")
        for number, pending in self.front.pending.items():
            if not pending.result.finished:
                ended = [sample.output.finish_reason is not None for sample in pending.samples]
                counts = [len(sample.output.token_ids) for sample in pending.samples]
                self.outcomes[number].before = [
                    1 << 30 if end else count for end, count in zip(ended, counts, strict=True)
                ]
        after, self.later, self.write_at = [*self.waiting, *self.later], [], MOST_STEPS
        self.waiting = sorted(after, key=lambda i: self.setup.case.asks[i].get("arrive", 0))
        for number in after:
            self.outcomes[number].after = True

    def _submit(self, number: int, step: int) -> None:
        ask = self.setup.case.asks[number]
        how: dict[str, Any] = {name: ask.get(name) for name in ROUTING if name in ask.settings}
        if "cuts" in ask.settings:
            how |= resumed(ask, self.expected[number])
        try:
            self.front.submit(list(ask.prompt), params_of(ask), id=number, **how)
        except RequestError as error:
            self.outcomes[number].refused = str(error)
            return
        if "abort" in ask.settings:
            self.aborts[number] = step + ask.get("abort")

    def _absorb(self, deltas: Sequence[Any]) -> None:
        for delta in deltas:
            key = (delta.request_id, delta.index)
            self.streamed[key] = self.streamed.get(key, "") + delta.text
            self.aborts.pop(delta.request_id, None) if self.front.pending[delta.request_id].result.finished else None

    def _collect(self) -> None:
        for number, outcome in enumerate(self.outcomes):
            if outcome.refused:
                continue
            result = self.front.take(number)
            outcome.cached, outcome.prompt_tokens = result.metrics.cached_tokens, len(result.prompt_token_ids)
            outcome.output_tokens = result.metrics.output_tokens
            if result.prompt_logprobs is not None and outcome.before is None:
                outcome.prompt_logprobs = [_plain(line) for line in result.prompt_logprobs]
            for one in result.outputs:
                lines = None if one.logprobs is None else [_plain(line) or {} for line in one.logprobs]
                streamed = (
                    None
                    if "cuts" in self.setup.case.asks[number].settings
                    else self.streamed.get((number, one.index), "")
                )
                outcome.samples.append(
                    Got(
                        list(one.token_ids),
                        one.text,
                        one.finish_reason,
                        one.stop_reason,
                        lines,
                        None,
                        streamed,
                        one.error,
                    )
                )


def _plain(line: Any) -> dict[int, float] | None:
    return None if line is None else {token: float(value.logprob) for token, value in line.items()}


def resumed(ask: Ask, expected: Sequence[Expected]) -> dict[str, Any]:
    """The tokens that each sample has from another engine, and the samples that have ended there."""
    counts = cuts_of(ask, expected)
    generated = [one.tokens[:count] for one, count in zip(expected, counts, strict=True)]
    done = [i for i, (one, count) in enumerate(zip(expected, counts, strict=True)) if count == len(one.tokens)]
    return {"generated": generated, "finished": [i for i in done if expected[i].finish != "error"]}


def cuts_of(ask: Ask, expected: Sequence[Expected]) -> list[int]:
    cuts = [*ask.get("cuts"), *[0] * len(expected)]
    return [min(cut, len(one.tokens)) for cut, one in zip(cuts, expected, strict=False)]
