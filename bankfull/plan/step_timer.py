"""Times real steps of chosen shapes on a whole engine, with its scheduler, kernels and sampling.

A long context need not be computed: pages are published in the prefix cache under the hash of a prompt, and a request
with that prompt starts after them. Their content does not affect the time, as long as each is distinct memory.
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
from bankfull.limits.meter.step import StepShape
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.state.prefix import Chain
from bankfull.state.sequence_state import Match
from bankfull.types import Request, StepPlan

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


class ShapeTooLarge(ConfigError):
    """The pools are too small for the shape."""


class StepTimer:
    """Runs steps on an idle engine with a prefix cache, and uses all of its state."""

    def __init__(self, engine: Engine, vocab: int, seed: int = 0) -> None:
        if not engine.scheduler.state.prefix_cache:
            raise ConfigError("Timing steps at a long context needs the prefix cache; do not disable it.")
        self._engine, self._vocab = engine, vocab
        self._random = Random(seed)
        self._numbers = 0
        self._touch()

    def _touch(self) -> None:
        """Write all state memory: unwritten memory is one shared zero page, whatever its size."""
        storage = self._engine.runner.storage

        def write() -> None:
            for tensor in (storage.frames, *storage.slots):
                tensor.zero_()

        self._engine.runner.device.launch(write).wait()

    def decode(self, sequences: int, context: int, turns: int) -> tuple[StepShape, float]:
        """The middle one of the decode steps, and the median seconds."""
        # The first step admits the sequences and the last one releases them: neither is counted.
        steps = self._run(sequences, max(context - turns // 2, 2), 1, turns + 2)[1:-1]
        steps = [(shape, seconds) for shape, seconds in steps if shape.counts == (1,) * sequences]
        if len(steps) < turns:
            raise ShapeTooLarge(f"{sequences} sequences do not run in one step here.")
        return steps[len(steps) // 2][0], median(seconds for _, seconds in steps)

    def prefill(self, sequences: int, tokens: int, past: int, turns: int) -> tuple[StepShape, float]:
        """A step that computes the last `tokens` of each prompt after `past` cached tokens, rounded down to a page
        border: the prefix cache finds whole pages only. The chunks of a recurrent model end where its state is kept, so
        the step may be slightly smaller."""
        runs = []
        past -= past % self._border
        least = tokens - (0 if self._engine.scheduler.state.snapshots is None else self._border)
        for _ in range(turns):
            largest = max(self._run(sequences, past + tokens, tokens, 1), key=lambda timed: timed[0].tokens)
            if len(largest[0].counts) != sequences or largest[0].tokens < sequences * least:
                raise ShapeTooLarge(f"{sequences} x {tokens} tokens do not run in one step here.")
            runs.append(largest)
        return runs[0][0], median(seconds for _, seconds in runs)

    def _run(self, sequences: int, prompt: int, fresh: int, outputs: int) -> list[tuple[StepShape, float]]:
        """Run requests whose last `fresh` prompt tokens, extended to a page border, are not cached."""
        engine = self._engine
        engine.scheduler.state.forget()
        for _ in range(sequences):
            tokens = tuple(self._random.choices(range(self._vocab), k=prompt))
            self._plant(tokens, prompt - fresh)
            name = ("timed", self._numbers)
            self._numbers += 1
            request = Request(name, tokens, prompt + outputs, payload=Job(GREEDY, 0))
            engine.add(request)
        with self._shapes() as shapes:
            ends = [perf_counter()]
            while engine.busy:
                engine.step()
                ends.append(perf_counter())
        # At depth 1 a step settles in the call after its launch, so the last call launches none.
        spans = [after - before for before, after in pairwise(ends)]
        extra = len(spans) - len(shapes)
        spans = [sum(spans[: 1 + extra]), *spans[1 + extra :]] if extra else spans
        engine.started.clear()
        return list(zip(shapes, spans, strict=True))

    @property
    def _border(self) -> int:
        """Tokens of the longest page; prefixes are found in multiples of it."""
        layout = self._engine.scheduler.state.layout
        return max((group.page_tokens for group in layout.paged), default=layout.block_tokens)

    def _plant(self, tokens: tuple[int, ...], length: int) -> None:
        """Publish pages for the first `length` tokens as if they had been computed."""
        state = self._engine.scheduler.state
        length = length // self._border * self._border
        if not length:
            return
        sequence = state.open(Chain(b"", state.layout.block_tokens), Match(0))
        if state.reserve(sequence, length) is None:
            state.release(sequence)
            raise ShapeTooLarge("The memory for state does not hold that many tokens.")
        state.commit(sequence, state.launched, 0)
        state.publish(sequence, tokens, length, length + 1)  # as a prompt's last border, where state is kept
        state.release(sequence)

    @contextmanager
    def _shapes(self) -> Iterator[list[StepShape]]:
        seen: list[StepShape] = []

        def note(plan: StepPlan) -> None:
            if plan.work:
                seen.append(StepShape.of(plan.work))

        self._engine.on_launch.append(note)
        try:
            yield seen
        finally:
            self._engine.on_launch.remove(note)
