"""Where the time of a request goes, recorded step by step for the requests that are followed.

The span of a step lasts from the arrival of the previous step's results to the arrival of its own, at any loop depth,
so the spans of a request's steps add up to its time. Only sums are kept: a long request takes no more memory than a
short one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from bankfull.decode.draft_counts import DraftCounts
from bankfull.engine import Engine
from bankfull.limits.explain.instruments import KernelTimes
from bankfull.limits.meter.step_limit import StepLimit
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.types import Enter, StepPlan, StepResult, Work

PREFILL, DECODE, RECOMPUTE = "prefill", "decode", "recompute"
PREEMPTED, HELD_BACK = "preempted", "held back"


@dataclass(slots=True)
class StoryPart:
    """Sums over the spans of one kind. Limits are None where this machine was never measured."""

    name: str
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    """Tokens of the request itself that were computed and kept: rejected drafts do not count."""
    turns: int = 0
    """Sequences of the request itself, summed over the steps."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens of the request itself."""
    drafting: float = 0.0
    """Seconds in which drafts were found."""
    plain_steps: int = 0
    plain_seconds: float = 0.0
    """Steps in which none of its sequences had drafts, and their seconds."""
    sequences: int = 0
    """Sequences in its steps, its own included, summed over the steps."""
    prompt_tokens: int = 0
    """Prompt tokens of other requests in the same steps."""
    inside: float = 0.0
    """Seconds inside kernels."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Seconds inside kernels by the tape's labels; empty without a tape."""
    limit: float | None = None
    """Shortest time of the machine for the steps as they were."""
    decodes: float | None = None
    """Shortest time without the prompts of other requests."""
    alone: float | None = None
    """Shortest time without any other request."""
    plain: float | None = None
    """Shortest time without draft tokens."""
    features: np.ndarray | None = None
    """Features of the closed form of costs, summed over the steps."""
    prompt_features: np.ndarray | None = None
    """The part of `features` from prompts of other requests."""

    def add(self, step: StepNote, seconds: float, own: Sequence[Work], step_limit: StepLimit | None) -> None:
        self.seconds += seconds
        self.steps += 1
        self.sequences += len(step.work)
        self.inside += min(step.inside, seconds)
        for label, taken in step.kernels.items():
            self.kernels[label] = self.kernels.get(label, 0.0) + taken
        self.turns += len(own)
        self.drafting += step.drafting
        for w in own:
            accepted = 0 if w.block else max(0, step.sampled.get(w.row, 1) - 1)
            self.tokens += w.count + accepted
            if w.drafts and not w.block:
                self.drafts.verified(w.drafts, accepted)
        if not any(w.drafts and not w.block for w in own):
            self.plain_steps += 1
            self.plain_seconds += seconds
        mine = {id(w) for w in own}
        strangers = [w for w in step.work if w.count > 1 and id(w) not in mine]
        self.prompt_tokens += sum(w.count for w in strangers)
        if step_limit is None or step.features is None:
            return
        self.features = step.features.copy() if self.features is None else self.features + step.features
        limit = step_limit.seconds(step.features)
        decodes = limit
        if strangers:
            rest = step_limit.features([w for w in step.work if w.count == 1 or id(w) in mine])
            decodes, theirs = step_limit.seconds(rest), step.features - rest
            self.prompt_features = theirs if self.prompt_features is None else self.prompt_features + theirs
        plain = limit
        if any(w.drafts and not w.block for w in step.work):
            plain = step_limit.of_work([w if w.block else replace(w, drafts=0) for w in step.work])
        self.limit = (self.limit or 0.0) + limit
        self.plain = (self.plain or 0.0) + plain
        self.decodes = (self.decodes or 0.0) + decodes
        self.alone = (self.alone or 0.0) + (limit if len(own) == len(step.work) else step_limit.of_work(own))

    def wait(self, seconds: float) -> None:
        """Add time in which nothing was computed for the request."""
        self.seconds += seconds

    @property
    def mean_sequences(self) -> float:
        return self.sequences / self.steps if self.steps else 0.0


@dataclass(slots=True)
class StepNote:
    """One settled step."""

    work: Sequence[Work]
    begun: float
    ended: float
    inside: float
    features: np.ndarray | None
    kernels: Mapping[str, float]
    sampled: Mapping[int, int]
    """Row -> tokens that it got: accepted drafts, and the sampled one."""
    drafting: float


@dataclass(slots=True)
class Story:
    """The recorded time of a request, or of a whole run."""

    arrived: float
    started: float | None = None
    ended: float = 0.0
    queue: float = 0.0
    blocked: float = 0.0
    """Seconds behind others: the scheduler's own count (`sched.blocked`), in the queue and after preemptions."""
    parts: dict[str, StoryPart] = field(default_factory=dict)
    preemptions: int = 0
    recomputed: int = 0
    """Tokens computed again after preemption."""
    cached: int = 0
    """Prompt tokens found in the prefix cache."""
    prompt: int = 0
    waiting: int = 0
    running: int = 0
    """Sequences that waited and ran when it arrived."""
    rows: set[int] = field(default_factory=set)
    entered: int = 0
    children: int = 1
    """Number of its sequences."""
    first: float | None = None
    """Time of its first token."""
    no_drafts: str = ""
    """Why it had no draft tokens, as a clause; empty if they were possible."""

    def part(self, name: str) -> StoryPart:
        return self.parts.setdefault(name, StoryPart(name))

    @property
    def seconds(self) -> float:
        return self.ended - self.arrived


class RequestRecorder:
    """Follows requests through an engine; without followed requests it observes nothing and costs nothing."""

    def __init__(
        self, engine: Engine[DeviceRunner], step_limit: StepLimit | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.step_limit = step_limit
        self._engine, self._clock = engine, clock
        self._stories: dict[Hashable, Story] = {}
        self._times: KernelTimes | None = None
        self._instruments = ExitStack()
        self._before = self._spent = self._drafted = 0.0
        self._seen: set[tuple[Hashable, int]] = set()
        self.run: Story | None = None
        """The sum of all steps while any request is followed."""

    def follow(self, request: Hashable, arrived: float, samples: int = 1, drafts: int | None = None) -> None:
        """Start recording a request that was just queued. `drafts`: its own limit of draft tokens per step."""
        if not self._stories:
            self._attach(arrived)
        scheduler = self._engine.scheduler
        self._stories[request] = Story(
            arrived,
            waiting=max(0, scheduler.waiting - samples),
            running=scheduler.running,
            children=samples,
            no_drafts=self._engine.no_drafts or ("the request turned it off" if drafts == 0 else ""),
        )

    def follows(self, request: Hashable) -> bool:
        return request in self._stories

    def finish(self, request: Hashable, ended: float, blocked: float = 0.0) -> Story:
        """Stop recording; the request's story. `ended`: time by the engine's clock. `blocked`: seconds that it waited
        behind others."""
        story = self._stories[request]
        story.ended, story.blocked = ended, blocked
        if story.started is None:
            story.queue = ended - story.arrived
        elif story.parts and (rest := ended - self._last_of(story)) > 0:
            name = DECODE if DECODE in story.parts else next(iter(story.parts))
            story.part(name).wait(rest)  # detokenizing and sending
        self.forget(request)
        return story

    def _last_of(self, story: Story) -> float:
        return story.arrived + story.queue + sum(part.seconds for part in story.parts.values())

    def forget(self, request: Hashable) -> None:
        if self._stories.pop(request, None) is not None and not self._stories:
            self._detach()

    # -- while steps run

    def _attach(self, now: float) -> None:
        times = self._times = KernelTimes(self._engine)
        times.open()
        self._instruments.callback(times.close)
        if self.step_limit is not None:
            self._instruments.enter_context(times.by_kernel())
        self._before, self._spent, self._drafted = now, times.seconds, self._drafting
        self.run = Story(now, now, no_drafts=self._engine.no_drafts)
        self._seen.clear()
        self._engine.on_settle.append(self._note)

    def _detach(self) -> None:
        self._engine.on_settle.remove(self._note)
        self._instruments.close()
        self._times = None

    @property
    def _drafting(self) -> float:
        """Seconds so far in which drafts were found, on the host and on the device."""
        return self._engine.totals.drafting + (0.0 if self._times is None else self._times.drafting)

    def _note(self, plan: StepPlan, result: StepResult) -> None:
        assert self._times is not None and self.run is not None
        now, spent = self._clock(), self._times.seconds
        known = self.step_limit
        features = known.features(plan.work) if known is not None and plan.work else None
        kernels = {label: seconds for label, (seconds, _) in self._times.take().items()}
        sampled = {w.row: len(tokens) for w, tokens in zip(plan.work, result.tokens, strict=True)}
        drafted = self._drafting
        step = StepNote(
            plan.work, self._before, now, spent - self._spent, features, kernels, sampled, drafted - self._drafted
        )
        self._before, self._spent, self._drafted = now, spent, drafted
        for request, story in self._stories.items():
            self._note_one(request, story, plan, step)
        self._note_entering(plan)
        prompts = any(w.count > 1 for w in plan.work)
        self.run.part(PREFILL if prompts else DECODE).add(step, now - step.begun, plan.work, known)
        self.run.ended = now

    def _note_entering(self, plan: StepPlan) -> None:
        """Prefix cache hits and preemptions of the whole run."""
        assert self.run is not None
        for enter in plan.enter:
            key = (enter.request, enter.child)
            if key in self._seen:
                self.run.preemptions += 1
                self.run.recomputed += len(enter.tokens) - 1 - enter.computed
            elif not enter.child:
                self.run.prompt += enter.prompt_len
                self.run.cached += min(enter.computed, enter.prompt_len)
            self._seen.add(key)

    def _note_one(self, request: Hashable, story: Story, plan: StepPlan, step: StepNote) -> None:
        gone = story.rows.intersection(plan.leave)
        story.rows -= gone
        for enter in plan.enter:
            if enter.request == request:
                self._enter(story, enter)
            else:
                story.rows.discard(enter.row)
        if story.started is None:
            if not story.rows:
                return
            story.started = self._engine.started.get(request, step.begun)
            story.queue = story.started - story.arrived
            step_begun = story.started
        else:
            step_begun = step.begun
        seconds = max(0.0, step.ended - step_begun)
        own = [w for w in step.work if w.row in story.rows]
        if not own:
            story.part(HELD_BACK if story.rows else PREEMPTED).wait(seconds)
            return
        name = PREFILL if story.first is None else DECODE
        if name == DECODE and any(w.count > 1 for w in own):
            name = RECOMPUTE
        story.part(name).add(step, seconds, own, self.step_limit)
        if story.first is None and any(w.sample for w in own):
            story.first = step.ended

    def _enter(self, story: Story, enter: Enter) -> None:
        story.rows.add(enter.row)
        story.entered += 1
        story.prompt = enter.prompt_len
        if story.entered == 1:
            story.cached = min(enter.computed, enter.prompt_len)
        elif story.entered > story.children:
            story.preemptions += 1
            story.recomputed += len(enter.tokens) - 1 - enter.computed  # the last one was never computed
