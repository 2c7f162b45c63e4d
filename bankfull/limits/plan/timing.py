"""Real steps of chosen shapes, timed on a whole engine: its scheduler, its kernels, its choice of tokens.

A context need not be computed to be long: pages are published in the prefix cache under the names of a prompt, and a
request for that prompt begins where they end. What they hold does not matter for the time, only that it is memory of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from statistics import median
from time import perf_counter

from bankfull.engine import Engine
from bankfull.errors import ConfigError
from bankfull.limits.step import StepShape
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.state.manager import Match
from bankfull.state.prefix import Chain
from bankfull.types import Request, StepPlan

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


class NoRoom(ConfigError):
    """The pools are too small for the shape."""


class StepTimer:
    """An idle engine with a prefix cache, whose whole state it uses."""

    def __init__(self, engine: Engine, vocab: int, seed: int = 0) -> None:
        if not engine.scheduler.state.prefix_cache:
            raise ConfigError("Steps at a long context are timed with the prefix cache; do not switch it off.")
        self._engine, self._vocab = engine, vocab
        self._random = Random(seed)
        self._numbers = 0
        self._touch()

    def _touch(self) -> None:
        """Memory that was never written is one page of zeros, however much of it is read."""
        storage = self._engine.runner.storage
        self._engine.runner.device.launch(lambda: storage.frames.zero_()).wait()

    def decode(self, sequences: int, context: int, turns: int) -> tuple[StepShape, float]:
        """The middle one of the steps that give each sequence a token, and its seconds."""
        # The first step enters rows, the last one lets them go: neither is counted.
        steps = self._run(sequences, max(context - turns // 2, 2), 1, turns + 2)[1:-1]
        steps = [(shape, seconds) for shape, seconds in steps if set(shape.counts) == {1}]
        if len(steps) < turns or len(steps[0][0].counts) != sequences:
            raise NoRoom(f"{sequences} sequences of {context} tokens do not run in one step here.")
        return steps[len(steps) // 2][0], median(seconds for _, seconds in steps)

    def prefill(self, sequences: int, tokens: int, past: int, turns: int) -> tuple[StepShape, float]:
        """A step that computes the last `tokens` of each sequence's prompt behind `past` that are there."""
        found = []
        for _ in range(turns):
            steps = self._run(sequences, past + tokens, tokens, 1)
            if len(steps) != 1:
                raise NoRoom(f"{sequences} x {tokens} tokens behind {past} do not run in one step here.")
            found.append(steps[0])
        return found[0][0], median(seconds for _, seconds in found)

    def _run(self, sequences: int, prompt: int, fresh: int, outputs: int) -> list[tuple[StepShape, float]]:
        """Requests whose last `fresh` prompt tokens (or a few more, to a page's border) are not there yet."""
        engine = self._engine
        engine.scheduler.state.forget()
        for _ in range(sequences):
            tokens = tuple(self._random.choices(range(self._vocab), k=prompt))
            self._plant(tokens, prompt - fresh)
            name = ("timed", self._numbers)
            self._numbers += 1
            request = Request(name, tokens, prompt + outputs, payload=Job(name, GREEDY, 0))
            engine.add(request)
        with self._shapes() as shapes:
            ends = [perf_counter()]
            while engine.busy:
                engine.step()
                ends.append(perf_counter())
        # At depth 1 a step is settled by the call after the one that launched it: the last call launches none.
        spans = [after - before for before, after in pairwise(ends)]
        extra = len(spans) - len(shapes)
        spans = [sum(spans[: 1 + extra]), *spans[1 + extra :]] if extra else spans
        engine.started.clear()
        return list(zip(shapes, spans, strict=True))

    def _plant(self, tokens: tuple[int, ...], length: int) -> None:
        """Publish pages for the first `length` tokens as if they had been computed."""
        state = self._engine.scheduler.state
        border = max((group.page_tokens for group in state.layout.paged), default=state.layout.block_tokens)
        length = length // border * border
        if not length:
            return
        sequence = state.open(Chain(b"", state.layout.block_tokens), Match(0))
        if state.reserve(sequence, length) is None:
            state.release(sequence)
            raise NoRoom(f"The pools have no room for {length} more tokens of context.")
        state.commit(sequence, state.launched, 0)
        state.publish(sequence, tokens, length, length)
        state.release(sequence)

    @contextmanager
    def _shapes(self) -> Iterator[list[StepShape]]:
        seen: list[StepShape] = []

        def note(plan: StepPlan) -> None:
            if plan.work:
                seen.append(StepShape.of(plan.work))

        self._engine.watchers.append(note)
        try:
            yield seen
        finally:
            self._engine.watchers.remove(note)
