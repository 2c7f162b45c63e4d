"""Speculative decoding measured beside plain decoding, on prompts of several kinds.

Each answer is generated once without drafts. Tokens inside repetition loops are cut off, since they would flatter every
drafter. Then both engines generate the same answers in alternation, and the medians of their rates are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from bankfull.bench.prompt_sets import before_loop, prompt_set
from bankfull.errors import ConfigError
from bankfull.limits.explain.instruments import LaunchTimes
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.llm import LLM
from bankfull.sample.params import SamplingParams
from bankfull.types import StepPlan

MOST_SHOWN = 8
"""Draft positions whose acceptance is reported."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One pass over a prompt set by one engine."""

    tokens: list[list[int]]
    seconds: float
    steps: int
    """Steps of single sequences: a batch of 8 sequences counts 8."""
    drafted: list[int]
    accepted: list[int]
    drafting: float | None
    """Seconds in which the host looked for drafts, or a CPU ran the strategy; None if a GPU ran it, whose captured
    steps would change if they were timed."""
    least: float | None
    """Shortest seconds of the same steps on this machine."""

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class SetReport:
    """One way of speculative decoding on one prompt set."""

    name: str
    prompts: str
    tokens: int
    looped: float
    """Fraction of the answers' tokens that were inside loops, and left out."""
    plain: list[Answered]
    drafted: list[Answered]

    @property
    def gain(self) -> float:
        """Tokens per second, relative to plain decoding."""
        return self.rate / self.plain_rate

    @property
    def rate(self) -> float:
        return median(one.rate for one in self.drafted)

    @property
    def plain_rate(self) -> float:
        return median(one.rate for one in self.plain)

    @property
    def tokens_per_step(self) -> float:
        return sum(one.count for one in self.drafted) / max(1, sum(one.steps for one in self.drafted))

    @property
    def acceptance(self) -> list[float | None]:
        """Fraction of accepted drafts among the verified ones, by position."""
        return [
            accepted / drafted if drafted else None
            for drafted, accepted in zip(
                _summed([one.drafted for one in self.drafted]),
                _summed([one.accepted for one in self.drafted]),
                strict=True,
            )
        ]

    @property
    def drafting_share(self) -> float | None:
        if any(one.drafting is None for one in self.drafted):
            return None
        return sum(one.drafting or 0.0 for one in self.drafted) / sum(one.seconds for one in self.drafted)

    @property
    def of_limit(self) -> float | None:
        """Shortest time of the same steps, relative to the time taken."""
        if any(one.least is None for one in self.drafted):
            return None
        return sum(one.least or 0.0 for one in self.drafted) / sum(one.seconds for one in self.drafted)

    @property
    def differing(self) -> float:
        """Fraction of the tokens, from the first different one of an answer on, that plain decoding did not give."""
        ours, theirs = self.drafted[-1].tokens, self.plain[-1].tokens
        same = sum(_common(a, b) for a, b in zip(ours, theirs, strict=True))
        return 1 - same / max(1, sum(map(len, theirs)))

    def as_json(self) -> dict[str, Any]:
        rates = [one.rate for one in self.drafted]
        plain = [one.rate for one in self.plain]
        return {
            "speculative": self.name,
            "prompts": self.prompts,
            "output_tokens": self.tokens,
            "looped_share": self.looped,
            "tokens_per_s": {"median": self.rate, "lowest": min(rates), "highest": max(rates)},
            "plain_tokens_per_s": {"median": self.plain_rate, "lowest": min(plain), "highest": max(plain)},
            "gain": self.gain,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_position": self.acceptance[:MOST_SHOWN],
            "drafting_share": self.drafting_share,
            "share_of_limit": self.of_limit,
            "differing_share": self.differing,
        }


class SpeculativeBench:
    """`limit`: the machine's limit for a step of the model, if it is known."""

    def __init__(
        self, plain: LLM, *, concurrency: int, reps: int, params: SamplingParams, limit: StepLimit | None
    ) -> None:
        if plain.loaded.template is None:
            raise ConfigError("The prompts are messages, but this model has no chat template; choose a chat model.")
        self._plain, self._reps, self._params = plain, reps, params
        self._concurrency, self._limit = concurrency, limit
        self._sets: dict[str, tuple[list[list[int]], list[SamplingParams], float]] = {}

    def run(self, name: str, llm: LLM, prompts: str, advance: Callable[[], None] = lambda: None) -> SetReport:
        """Measure an engine with speculative decoding on one prompt set."""
        asked, params, looped = self._prepared(prompts)
        self._answer(llm, asked, params)  # fills the prefix cache, and lets the engine learn its step times
        plain: list[Answered] = []
        drafted: list[Answered] = []
        for repetition in range(self._reps):
            arms = [(self._plain, plain), (llm, drafted)]
            for engine, answers in arms if repetition % 2 == 0 else arms[::-1]:
                answers.append(self._answer(engine, asked, params))
                advance()
        return SetReport(name, prompts, plain[-1].count, looped, plain, drafted)

    def _prepared(self, prompts: str) -> tuple[list[list[int]], list[SamplingParams], float]:
        """Prompts as tokens, and for each the length of its answer without loops."""
        if prompts not in self._sets:
            front = self._plain.loaded.frontend
            asked = [
                front.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
                for text in prompt_set(prompts)
            ]
            whole = self._answer(self._plain, asked, [self._params] * len(asked))
            lengths = [max(1, before_loop(tokens)) for tokens in whole.tokens]
            params = [replace(self._params, max_tokens=length) for length in lengths]
            copies = -(-self._concurrency // len(asked))  # a set that is smaller than the load is asked several times
            self._sets[prompts] = asked * copies, params * copies, 1 - sum(lengths) / max(1, whole.count)
        return self._sets[prompts]

    def _answer(self, llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answered:
        engine = llm.loaded.engine
        totals, plans = engine.totals, list[StepPlan]()
        before = list(totals.drafted), list(totals.accepted), totals.drafting
        engine.on_launch.append(plans.append)
        seconds, tokens = 0.0, []
        device, observers = engine.runner.device, engine.runner.observers
        times = LaunchTimes(device) if device.kind == "cpu" and not engine.strategy.idle else None
        observers += [] if times is None else [times]
        try:
            for first in range(0, len(prompts), self._concurrency):
                some = slice(first, first + self._concurrency)
                begun = time.perf_counter()
                outputs = llm.generate(list(prompts[some]), list(params[some]))
                seconds += time.perf_counter() - begun
                tokens += [output.outputs[0].token_ids for output in outputs]
        finally:
            engine.on_launch.remove(plans.append)
            if times is not None:
                observers.remove(times)
        hidden = times is None and not engine.strategy.idle
        return Answered(
            tokens,
            seconds,
            sum(work.sample for plan in plans for work in plan.work),
            _less(totals.drafted, before[0]),
            _less(totals.accepted, before[1]),
            None if hidden else totals.drafting - before[2] + (0.0 if times is None else times.drafting),
            None if self._limit is None else sum(self._limit.of_work(plan.work) for plan in plans),
        )


def _less(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [count - (before[i] if i < len(before) else 0) for i, count in enumerate(now)]


def _summed(lines: Sequence[Sequence[int]]) -> list[int]:
    return [sum(line[i] for line in lines if i < len(line)) for i in range(max(map(len, lines), default=0))]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
