"""One replica of a simulated fleet: the real engine loop, scheduler, prefix cache and reports on a device that only
models time.

Plain decode steps are taken together (`sched.stride`); with `stepped` each one runs through the engine, with the same
result. A step is reported to the front when it ends, unless it was plain and the queue is as long as before: such a
step changes nothing that a front routes by, except the lengths of contexts. The loop has depth 0: on a GPU, which plans
one step ahead, an arrival would wait for one step more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.plan.day_content import Content
from bankfull.plan.decode_times import DecodeTimes, Floats
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.plan.fleet_front import FleetStep, load_of
from bankfull.plan.simulate import ReplicaSpec
from bankfull.plan.step_times import TimeBreakdown
from bankfull.sched.pace import REMEMBERED
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence as Running
from bankfull.sched.stride import plain_steps, take_plain_steps
from bankfull.state.journal import packed_keys
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.types import Finish, Output, Request, StepPlan, Work

NO_STEPS = np.empty(0)


class FleetReplica:
    def __init__(self, spec: ReplicaSpec, times: DecodeTimes, frames: int, stepped: bool = False) -> None:
        """`times` may be shared by all replicas of one kind. `frames`: pages of this replica."""
        self.clock = Clock()
        self._spec, self._times, self._stepped = spec, times, stepped
        self._spent = TimeBreakdown()
        self.state = StateManager(spec.layout, frames, spec.sizes.slots, spec.state)
        # The engine's own check counts all pages whenever it becomes idle; `check` does so when the simulation ends.
        self.check = self.state.check
        self.state.check = lambda: None  # type: ignore[method-assign]
        sched = replace(spec.sched, rows=spec.sizes.rows)
        self.scheduler = Scheduler(sched, self.state, clock=self.clock)
        self.scheduler.pace.measured = True
        self.runner = FakeRunner(self.clock, self._seconds, self._sampled if stepped else _no_token)
        self.engine = Engine(self.scheduler, self.runner, Plain(), 0, clock=self.clock)
        self.engine.on_launch.append(self._note)
        self._reporter = PrefixReporter(self.state, self.clock)
        self._waiting: dict[Hashable, int] = {}
        self._waiting_tokens = 0
        self._unanswered: set[Hashable] = set()
        """Requests without a token of this replica."""
        self._contents: dict[Hashable, Content] = {}
        """Contents of the requests, where each step samples tokens."""
        self._changed = False
        self._reported = (0, 0)
        """Running and waiting sequences in the last report."""
        self.most_rows = 0
        self.computed_tokens = self.step_tokens = 0
        """Tokens of all steps, and of the last one that ran through the engine."""

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def add(self, request: Request, content: Content, chain: Chain) -> None:
        """`chain` names the blocks of the content; where tokens are sampled, the scheduler hashes them itself."""
        tokens = len(request.prompt) + sum(map(len, request.generated))
        self._waiting[request.id] = tokens
        self._unanswered.add(request.id)
        self._waiting_tokens += tokens
        self.engine.add(request)
        if self._stepped:
            self._contents[request.id] = content
        else:
            self.scheduler._by_request[request.id][0].chain = chain

    def retire(self, names: Sequence[bytes]) -> bytes:
        """Nothing will look for blocks with these names: release their keys. The keys as the front knows them."""
        groups = range(len(self._spec.layout.paged))
        keys = [(group, name) for group in groups for name in names]
        self.state.pages.retire_keys(keys)
        return packed_keys(keys)

    def running(self) -> list[Hashable]:
        """Requests that have rows."""
        return [seq.request.id for seq in self.scheduler._running]

    def plan_stride(self, now: float) -> Floats:
        """The ends of the plain steps that begin now, as far as their number is known; empty if the next step must run
        through the engine. Changes nothing."""
        if self._stepped or self._unanswered or not (steps := plain_steps(self.scheduler)):
            return NO_STEPS
        rows = self.scheduler.running
        seconds = self._times.strides(rows, self._context(), steps)
        seconds[0] = now + seconds[0]
        ends: Floats = seconds.cumsum()  # added one by one, as the device's clock does
        policy = self.scheduler.policy
        if policy.counting:
            ends = ends[: policy.steps_to_change(self.scheduler._running, now, ends.tolist())]
        return ends

    def take_stride(self, begun: float, ends: Floats) -> FleetStep | None:
        """Take the plain steps that end at these times. None if no request ends with the last of them; else that step,
        with the requests that end."""
        steps, running = len(ends), [*self.scheduler._running]
        told = steps if self.scheduler.policy.counting else REMEMBERED
        late = ends[-told - 1 :].tolist()
        last = late[-1]
        if steps <= told:
            late.insert(0, begun)
        # The engine measures a step as the difference of two readings of its clock.
        seconds = [end - start for start, end in pairwise(late)]
        self.clock.now = last
        ended = take_plain_steps(self.scheduler, steps, _decoded, seconds)
        self.engine.took(steps, len(running), last - begun)
        self.computed_tokens += steps * len(running)
        self.runner.busy += last - begun
        if not ended:
            return None
        for seq in ended:
            self.engine.started.pop(seq.request.id, None)
        return self._report([Output(seq.request.id, 0, [], Finish.LENGTH, cached=seq.cached) for seq in ended])

    def steps_before_end(self) -> int:
        """Plain steps that end no request."""
        return plain_steps(self.scheduler) - 1

    def step(self, now: float) -> FleetStep:
        """One step of the engine that begins now; the clock then shows its end."""
        self.clock.now = max(now, self.clock.now)
        self._changed = False
        outputs = self.engine.step()
        for output in outputs:
            self.engine.started.pop(output.request, None)
            if output.finish is not None:
                self._contents.pop(output.request, None)
            if output.request in self._unanswered or output.finish is not None:
                self._unanswered.discard(output.request)
                self._changed = True
        if not self._changed and (self.scheduler.running, self.scheduler.waiting) == self._reported:
            return FleetStep(outputs)
        return self._report(outputs)

    def _report(self, outputs: list[Output]) -> FleetStep:
        self._reported = self.scheduler.running, self.scheduler.waiting
        return FleetStep(outputs, load_of(self.engine, self._waiting_tokens), self._reporter.report(idle=not self.busy))

    def progress(self) -> dict[Hashable, int]:
        """Requests that have not ended -> tokens that they have generated, in all."""
        sequences = [*self.scheduler._running, *self.scheduler._waiting]
        return {seq.request.id: len(seq.tokens) - seq.prompt_len for seq in sequences}

    def _note(self, plan: StepPlan) -> None:
        for enter in plan.enter:
            self._waiting_tokens -= self._waiting.pop(enter.request, 0)
        self._changed = bool(plan.enter) or any(work.count > 1 for work in plan.work)
        self.most_rows = max(self.most_rows, self.scheduler.running)
        self.step_tokens = plan.tokens
        self.computed_tokens += plan.tokens

    def _seconds(self, work: Sequence[Work]) -> float:
        if all(one.count == 1 for one in work):
            return self._times.step(len(work), sum(one.start + 1 for one in work))
        return self._spec.times.work(work, self._spent)

    def _context(self) -> int:
        return sum(len(seq.tokens) for seq in self.scheduler._running)

    def _sampled(self, request: int, position: int) -> int:
        return self._contents[request].token(position)


def _no_token(request: int, position: int) -> int:
    return 0


def _decoded(seq: Running, count: int) -> list[int]:
    return [0] * count
