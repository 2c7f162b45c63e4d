"""Advice on how to make a request faster: one or two sentences derived from measurements.

Every saving is the difference of two meter runs: the request's average step as it was, and the same step with other
storage, fewer tokens or more sequences. Time inside kernels is assumed to shrink as the limit does; host time is not.
Where kernels are far from the limit that assumption fails: then the advice names the slow kernels instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bankfull.errors import BankfullError
from bankfull.limits.explain.instruments import taped_of
from bankfull.limits.explain.kernel_profile import KernelCosts
from bankfull.limits.explain.recorder import DECODE, PREEMPTED, PREFILL, RECOMPUTE, Story, StoryPart
from bankfull.limits.explain.slow_part import KernelLimits
from bankfull.limits.explain.speculation_account import speculation_of
from bankfull.limits.meter.closed_form import closed_form
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.model.variants import with_int8_pages, with_other_storage
from bankfull.llm import LLM
from bankfull.ops import native

WORTH_SAYING = 0.05
"""Minimum fraction of the whole time that a change must save."""
MORE_STREAMS = 8
"""Additional sequences that the advice considers."""
WORTH_ADDING = 0.2
"""Minimum gain of throughput for which more streams are advised."""
STEP, SCORED = 0, 1
"""Indices of the features of a step that do not belong to its sequences."""


@dataclass(frozen=True, slots=True)
class Advice:
    sentence: str
    change: str
    options: dict[str, str] = field(default_factory=dict)
    """Engine options; empty where a client or a file has to change."""
    limit_before: float = 0.0
    """Seconds of the average step at the machine's limit, by the meter."""
    limit_after: float = 0.0
    seconds_saved: float = 0.0
    """Seconds of the request."""
    throughput_gain: float = 0.0
    """Relative gain, for a change that costs one request time but serves more requests."""


@dataclass(frozen=True, slots=True)
class Alternative:
    name: str
    options: Mapping[str, str]
    step_limit: StepLimit


@dataclass(frozen=True, slots=True)
class Adviser:
    """Finds better configurations for one loaded model."""

    step_limit: StepLimit
    alternatives: Sequence[Alternative]
    rows: int
    step_tokens: int
    more_tokens: float | None = None
    """Factor of tokens that the same memory would hold in an int8 KV cache; None where it is int8 already."""
    kernels: KernelLimits | None = None
    """None where a step's kernels are not timed separately."""

    def advise(self, story: Story) -> list[Advice]:
        """Speculation that loses, or the kernels that are far below the limit, the larger one first; or else the best
        saving; then the gain of more streams, if any."""
        whole = max(story.seconds, 1e-9)
        slow = self._slow_kernels(story)
        loss = self._speculation(story)
        if loss is not None and loss.seconds_saved >= WORTH_SAYING * whole:
            # What else the steps could save was measured with drafts in them, and would change without them.
            return [loss] if slow is None else sorted((loss, slow), key=lambda advice: -advice.seconds_saved)
        savings = [] if slow else [*self._storage(story), *self._chunks(story)]
        worthwhile = [one for one in [*savings, *self._room(story)] if one.seconds_saved >= WORTH_SAYING * whole]
        worthwhile.sort(key=lambda advice: -advice.seconds_saved)
        if slow is not None:
            return [slow, *worthwhile[:1]]
        streams = self._streams(story)
        return worthwhile[:1] + ([] if streams is None else [streams])

    def _speculation(self, story: Story) -> Advice | None:
        """Speculative decoding that loses: its tokens per second beside those of steps without drafts."""
        account, part = speculation_of(story), story.parts.get(DECODE)
        if account is None or part is None:
            return None
        measured = account.gain is not None
        gain = account.gain if measured else account.expected_gain
        if gain is None or gain >= 1:
            return None
        saved = part.seconds * (1 - gain)
        return Advice(
            f"speculative decoding ran at {'' if measured else 'about '}{gain:.2f}x the speed of plain decoding: "
            f"turning it off (--speculative off) would save {saved:.2g} s",
            "no speculation",
            {"speculative": "off"},
            0.0 if part.limit is None else part.limit / part.steps,
            0.0 if part.plain is None else part.plain / part.steps,
            saved,
        )

    def _slow_kernels(self, story: Story) -> Advice | None:
        part = heaviest(story)
        if part is None or self.kernels is None:
            return None
        slow = self.kernels.slowest(part, self.step_limit)
        if slow is None:
            return None
        return Advice(
            slow.sentence(part.name, self.kernels.kernels),
            "slow kernels",
            {},
            slow.seconds / part.steps,
            slow.least / part.steps,
            slow.seconds - slow.least,
        )

    def _storage(self, story: Story) -> Iterator[Advice]:
        """Fewer bytes for weights or KV cache, over everything that was computed for the request."""
        parts = [part for part in story.parts.values() if part.features is not None]
        for other in self.alternatives:
            saved = before = after = 0.0
            for part in parts:
                old, new = self._limits(part, other.step_limit)
                saved += part.inside * (1 - new / old)
                before, after = before + old * part.steps, after + new * part.steps
            if not before or saved <= 0:
                continue
            busy = sum(part.seconds for part in parts)
            steps = sum(part.steps for part in parts)
            how = _options(other.options) or "a file of that kind"
            sentence = f"{other.name} ({how}) would save about {busy / (busy - saved):.2g}x"
            yield Advice(sentence, other.name, dict(other.options), before / steps, after / steps, seconds_saved=saved)

    def _limits(self, part: StoryPart, other: StepLimit) -> tuple[float, float]:
        mean = _mean(part)
        return self.step_limit.seconds(mean), other.seconds(mean)

    def _chunks(self, story: Story) -> Iterator[Advice]:
        """Decode waits for other requests' prompts in the same step; smaller chunks reduce that."""
        part = story.parts.get(DECODE)
        if part is None or part.features is None or part.prompt_features is None or self.step_tokens < 2:
            return
        mean, prompts = _mean(part), part.prompt_features / part.steps
        before, after = self.step_limit.seconds(mean), self.step_limit.seconds(mean - prompts / 2)
        saved = part.inside * (1 - after / before)
        half = max(1, self.step_tokens // 2)
        yield Advice(
            f"others' prompts came into its steps: half as many tokens per step (--step-tokens {half}) would save "
            f"{saved:.2g} s of its decoding",
            "smaller chunks",
            {"step_tokens": str(half)},
            before,
            after,
            saved,
        )

    def _room(self, story: Story) -> Iterator[Advice]:
        """A larger KV cache avoids preemption: the time it waited and was recomputed."""
        again = story.parts.get(RECOMPUTE)
        if not story.preemptions or self.more_tokens is None:
            return
        lost = sum(part.seconds for name, part in story.parts.items() if name in (RECOMPUTE, PREEMPTED))
        limit = 0.0 if again is None or again.limit is None else again.limit / again.steps
        yield Advice(
            f"an int8 KV cache (--kv-dtype int8) would hold {self.more_tokens:.2g} times as many tokens in the "
            f"same memory; being preempted took {lost:.2g} s",
            "room for state",
            {"kv_dtype": "int8"},
            limit,
            0.0,
            lost,
        )

    def _streams(self, story: Story) -> Advice | None:
        """The same decode step with more sequences like the average one."""
        part = story.parts.get(DECODE)
        if part is None or part.features is None or not part.sequences or part.seconds <= 0:
            return None
        mean, batch = _mean(part), part.mean_sequences
        one = mean / batch
        one[[STEP, SCORED]] = 0.0
        before, after = self.step_limit.seconds(mean), self.step_limit.seconds(mean + MORE_STREAMS * one)
        step = part.seconds / part.steps
        longer = part.inside / part.steps * (after / before - 1)
        gain = (batch + MORE_STREAMS) / batch * step / (step + longer) - 1
        if gain < WORTH_ADDING:
            return None
        rows = round(batch) + MORE_STREAMS
        options = {"rows": str(rows)} if rows > self.rows else {}
        how = f" (--rows {rows})" if options else ""
        return Advice(
            f"{MORE_STREAMS} more streams{how} would cost {longer / step:.0%} per token and add {gain:.0%} throughput",
            "more streams",
            options,
            before,
            after,
            -longer * part.steps,
            gain,
        )


def _mean(part: StoryPart) -> np.ndarray:
    assert part.features is not None
    mean: np.ndarray = part.features / part.steps
    return mean


def _options(options: Mapping[str, str]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def adviser_of(llm: LLM, step_limit: StepLimit) -> Adviser:
    """Takes a moment: each alternative runs on the meter."""
    loaded = llm.loaded
    recipe = Recipe.of_build(loaded.files, loaded.build)
    metered = recipe.metered()
    pages = with_int8_pages(recipe, metered)
    more = None if pages is None else metered.layout.token_bytes / pages.recipe.metered().layout.token_bytes
    alternatives = []
    for variant in with_other_storage(recipe, metered, loaded.device.kind):
        if variant.name == "not quantized":
            continue
        other = variant.recipe
        try:
            form = closed_form(other.metered())
            rates = step_limit.ceilings.rates(other.dtype_name)
        except BankfullError:  # an alternative without a cost is skipped
            continue
        alternatives.append(Alternative(variant.name, variant.options, StepLimit(form, step_limit.ceilings, rates)))
    config = loaded.frontend.engine.scheduler.config
    taped = taped_of(loaded.frontend.engine)
    kernels = None
    if taped is not None:
        which = f"{native.select_isa()} instructions, {native.threads()} threads"
        kernels = KernelLimits(KernelCosts(metered, taped.tape.traffic), loaded.files.config, which)
    return Adviser(step_limit, tuple(alternatives), config.rows, config.step_tokens, more, kernels)


def heaviest(story: Story) -> StoryPart | None:
    """The computed part that took longest."""
    computed = [story.parts[name] for name in (PREFILL, DECODE, RECOMPUTE) if name in story.parts]
    return max(computed, key=lambda part: part.seconds, default=None)
