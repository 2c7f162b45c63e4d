"""Explanation of a request's or a run's time: each part beside the limit of the machine."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from bankfull.limits.explain.advice import Advice, Adviser, heaviest
from bankfull.limits.explain.recorder import DECODE, HELD_BACK, PREEMPTED, PREFILL, RECOMPUTE, Story, StoryPart
from bankfull.limits.explain.speculation_account import SpeculationAccount, speculation_of
from bankfull.limits.meter.step_limit import StepLimit

QUEUE = "queue"
ORDER = (QUEUE, PREFILL, DECODE, RECOMPUTE, PREEMPTED, HELD_BACK)
MUCH_WAITING, MUCH_HOST = 0.3, 0.2
"""Minimum share of the time for waiting and for the host to be mentioned."""
BEYOND = 105.0
"""Percent of a limit above which the limit itself is in doubt."""


@dataclass(frozen=True, slots=True)
class Detail:
    """The components of a part's seconds; they add up. None where the machine's limit is not known."""

    own_limit: float | None
    """Shortest time of the machine for the request alone."""
    batch_mates: float | None
    """Added by decode tokens of other requests."""
    other_prompts: float | None
    """Added by prompts of other requests."""
    kernels: float | None
    """Time inside kernels beyond these limits; negative where the limit was measured on a busier machine."""
    host: float
    """Time outside of kernels: planning, settling, detokenizing, sending."""


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    part: str
    seconds: float
    share: float
    """Fraction of the whole time."""
    steps: int = 0
    tokens: int = 0
    mean_batch: float | None = None
    limit_seconds: float | None = None
    percent_of_limit: float | None = None
    bound: str | None = None
    """What bounds the average step: memory or arithmetic."""
    detail: Detail | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    parts: tuple[ExplainedPart, ...]
    summary: str
    advice: tuple[Advice, ...] = field(default=())
    ahead: int = 0
    """Sequences that waited when it arrived."""
    cached_saved_seconds: float | None = None
    """Shortest time that the cached part of the prompt would have taken."""
    speculation: SpeculationAccount | None = None
    """What draft tokens gave, or why there were none; None if nothing was decoded."""
    blocked_seconds: float = 0.0
    """Head-of-line blocking: time in which an idle engine would have run it, but others had the rows or the memory
    (`sched.blocked`)."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(story: Story, step_limit: StepLimit | None = None, adviser: Adviser | None = None) -> Explanation:
    whole = max(story.seconds, 1e-9)
    parts = [ExplainedPart(QUEUE, story.queue, story.queue / whole)] if story.queue > 0 else []
    parts += [_part(part, whole, step_limit) for part in story.parts.values() if part.seconds > 0 or part.steps]
    parts.sort(key=lambda part: ORDER.index(part.part))
    advice = [] if adviser is None else adviser.advise(story)
    saved = None
    if step_limit is not None and story.cached:
        saved = _prefill_seconds(story.cached, step_limit)
    return Explanation(
        story.seconds,
        story.prompt,
        story.cached,
        story.preemptions,
        story.recomputed,
        tuple(parts),
        _summary(story, parts, step_limit, advice),
        tuple(advice),
        story.waiting,
        saved,
        speculation_of(story),
        story.blocked,
    )


def _prefill_seconds(tokens: int, step_limit: StepLimit) -> float:
    """Shortest time for the first tokens of a prompt in one step without logits."""
    from bankfull.limits.meter.step import StepShape

    return step_limit.least(step_limit.form.cost(StepShape((tokens,), (tokens,), 0)))


def _part(part: StoryPart, whole: float, step_limit: StepLimit | None) -> ExplainedPart:
    if not part.steps:
        return ExplainedPart(part.name, part.seconds, part.seconds / whole)
    host = part.seconds - part.inside
    bound = percent = None
    detail = Detail(None, None, None, None, host)
    if part.limit is not None and part.decodes is not None and part.alone is not None:
        detail = Detail(
            part.alone, part.decodes - part.alone, part.limit - part.decodes, part.inside - part.limit, host
        )
        percent = 100 * part.limit / part.seconds if part.seconds else None
        if step_limit is not None and part.features is not None:
            bound = step_limit.bound(part.features / part.steps)
    return ExplainedPart(
        part.name,
        part.seconds,
        part.seconds / whole,
        part.steps,
        part.tokens,
        part.mean_sequences,
        part.limit,
        percent,
        bound,
        detail,
    )


def _summary(story: Story, parts: list[ExplainedPart], step_limit: StepLimit | None, advice: list[Advice]) -> str:
    """One or two sentences: the longest part, its share of the limit, and what would make it faster."""
    whole = max(story.seconds, 1e-9)
    sentences = []
    waited = story.seconds - sum(part.seconds for part in story.parts.values() if part.steps)
    if waited > MUCH_WAITING * whole:
        sentences.append(_waiting(story, waited / whole))
    part = heaviest(story)
    said = [a.sentence for a in advice]
    if part is not None:
        shown = next(explained for explained in parts if explained.part == part.name)
        lead = f"{part.name} took {shown.share:.0%} of the time"
        if shown.percent_of_limit is not None:
            lead += f" and is bound by {shown.bound} at {shown.percent_of_limit:.0f}% of the limit"
            if step_limit is not None and math.isinf(step_limit.peak):
                lead += " (of memory alone: its arithmetic was not measured)"
            if shown.percent_of_limit > BEYOND:
                lead += ", which was measured on a busier machine (`bankfull limits --refresh` measures it again)"
        host = part.seconds - part.inside
        if host > MUCH_HOST * part.seconds:
            lead += f", {host / part.seconds:.0%} of it outside of kernels"
        sentences.append("; ".join([f"{lead}: {said[0]}", *said[1:]]) if said else lead)
    return " ".join(sentence[:1].upper() + sentence[1:] + "." for sentence in sentences)


def _waiting(story: Story, share: float) -> str:
    if story.preemptions:
        times = "once" if story.preemptions == 1 else f"{story.preemptions} times"
        return (
            f"it waited for {share:.0%} of the time, was preempted {times} for lack of memory, and computed "
            f"{story.recomputed} tokens again"
        )
    others = f"{story.waiting} others in the queue and {story.running} running"
    return f"it waited for {share:.0%} of the time, behind {others}"
