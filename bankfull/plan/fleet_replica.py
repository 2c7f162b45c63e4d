"""One replica of a simulated fleet: a simulated engine with a prefix cache and reports.

A step is reported to the front when it ends, unless it was plain and the queue is as long as before: such a
step changes nothing that a front routes by, except the lengths of contexts. The loop has depth 0: on a GPU, which plans
one step ahead, an arrival would wait for one step more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.plan.day_content import Content
from bankfull.plan.decode_times import DecodeTimes, Floats
from bankfull.plan.engine import NO_STEPS, SimulatedEngine
from bankfull.plan.fleet_front import FleetStep, load_of
from bankfull.plan.simulate import ReplicaSpec
from bankfull.plan.step_times import TimeBreakdown
from bankfull.plan.stride import plain_steps
from bankfull.sched.sequence import Sequence as Running
from bankfull.state.journal import packed_keys
from bankfull.state.manager import StateManager
from bankfull.state.prefix import Chain
from bankfull.types import Output, Request, StepPlan, Work


class FleetReplica(SimulatedEngine):
    def __init__(self, spec: ReplicaSpec, times: DecodeTimes, frames: int, stepped: bool = False) -> None:
        """`times` may be shared by all replicas of one kind. `frames`: pages of this replica."""
        self._spec, self._times = spec, times
        self._spent = TimeBreakdown()
        state = StateManager(spec.layout, frames, spec.sizes.slots, spec.state)
        sched = replace(spec.sched, rows=spec.sizes.rows)
        super().__init__(sched, state, self._sampled if stepped else None, stepped=stepped)
        self.scheduler.pace.measured = True
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
        [seq] = self.scheduler.add(request)
        if self.stepped:
            self._contents[request.id] = content
        else:
            seq.chain = chain

    def retire(self, names: Sequence[bytes]) -> bytes:
        """Nothing will look for blocks with these names: release their keys. The keys as the front knows them."""
        groups = range(len(self._spec.layout.paged))
        keys = [(group, name) for group in groups for name in names]
        self.state.pages.retire_keys(keys)
        return packed_keys(keys)

    def running(self) -> list[Hashable]:
        """Requests that have rows."""
        return [seq.request.id for seq in self.scheduler.facts.running]

    def next_ends(self) -> Floats:
        """The ends of the plain steps that begin now; empty if the next step must run through the engine."""
        return np.asarray(NO_STEPS if self._unanswered else self.plan_stride())

    def take_steps(self, ends: Floats) -> FleetStep | None:
        """Take the plain steps that end at these times. None if no request ends with the last of them; else that step,
        with the requests that end."""
        self.computed_tokens += len(ends) * self.scheduler.running
        ended = self.take_stride(ends)
        for output in ended:
            self.engine.started.pop(output.request, None)
        return self._report(ended) if ended else None

    def steps_before_end(self) -> int:
        """Plain steps that end no request."""
        return plain_steps(self.scheduler, self.clock.now) - 1

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
        facts = self.scheduler.facts
        return {seq.request.id: len(seq.tokens) - seq.prompt_len for seq in (*facts.running, *facts.waiting)}

    def _note(self, plan: StepPlan) -> None:
        for enter in plan.enter:
            self._waiting_tokens -= self._waiting.pop(enter.request, 0)
        self._changed = bool(plan.enter) or any(work.count > 1 for work in plan.work)
        self.most_rows = max(self.most_rows, self.scheduler.running)
        self.step_tokens = plan.tokens
        self.computed_tokens += plan.tokens

    def step_seconds(self, work: Sequence[Work]) -> float:
        if all(one.count == 1 for one in work):
            return self._times.step(len(work), sum(one.start + 1 for one in work))
        return self._spec.times.work(work, self._spent)

    def plain_ends(self, running: Sequence[Running], most: int, until: float) -> Floats:
        seconds = self._times.strides(len(running), sum(len(seq.tokens) for seq in running), most)
        seconds[0] = self.clock.now + seconds[0]
        ends: Floats = seconds.cumsum()  # added one by one, as the device's clock does
        return ends

    def _sampled(self, request: int, position: int) -> int:
        return self._contents[request].token(position)
