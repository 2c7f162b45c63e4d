"""The simulated engine: the engine's own loop, scheduler and state, on a device that only models time.

The schedule is not modelled: `Engine`, `Scheduler` and `StateManager` are the real ones, and a test checks that their
plans equal those of an engine that computes. Only the time of a step is modelled. Plain decode steps are taken together
(`plan.stride`), with the same result as single steps; with a host tier every step is taken alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from math import inf

import numpy as np

from bankfull.config import SchedConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.plan import stride
from bankfull.plan.decode_times import Floats
from bankfull.plan.fake_runner import Clock, FakeRunner, Tokens
from bankfull.plan.stride import Ends
from bankfull.sched.canvas import Canvas
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence as Running
from bankfull.state.manager import StateManager
from bankfull.types import Output, Work

NO_STEPS: Floats = np.empty(0)


class SimulatedEngine:
    """One engine. A subclass says how long its steps take and, where it has arrivals, what becomes of them."""

    def __init__(
        self,
        sched: SchedConfig,
        state: StateManager,
        token: Tokens | None = None,
        *,
        clock: Clock | None = None,
        depth: int = 0,
        canvas: Canvas | None = None,
        stepped: bool = False,
    ) -> None:
        """`token`: None if no one reads what is sampled. `stepped`: every step runs through the loop, also the plain
        ones, which is slower and gives the same result."""
        self.clock, self.state, self.stepped = clock or Clock(), state, stepped
        # The engine's own check counts all pages whenever it becomes idle; who simulates does so once, at the end.
        self.check = state.check
        state.check = lambda: None  # type: ignore[method-assign]
        self.scheduler = Scheduler(sched, state, clock=self.clock, canvas=canvas)
        self.runner = FakeRunner(self.clock, self.step_seconds, token)
        self.engine: Engine[FakeRunner] = Engine(self.scheduler, self.runner, Plain(), depth, clock=self.clock)
        self.coming: deque[tuple[float, int]] = deque()
        """Times and numbers of the arrivals that are known, in their order."""

    def step_seconds(self, work: Sequence[Work]) -> float:
        """Time of a step that begins now."""
        raise NotImplementedError

    def plain_ends(self, running: Sequence[Running], most: int, until: float) -> Ends:
        """When the plain steps of these sequences end that begin now: at most so many, or up to the first one that ends
        at `until` or later."""
        raise NotImplementedError

    def arrive(self, number: int) -> None:
        """Add the request of this number to the engine."""
        raise NotImplementedError

    def receive(self, outputs: list[Output]) -> None:
        """Outputs of a step, or of a stride's last one, which has ended now; tokens of strides are not among them."""
        raise NotImplementedError

    def decoded(self, running: Sequence[Running], begun: float, ends: Ends) -> None:
        """These sequences have decoded a token in each step of a stride. None of them has left its row yet."""

    # -- the run

    def run_until(self, time: float) -> None:
        """Take every step that begins before this time."""
        while self.proceed(time):
            pass

    def proceed(self, until: float = inf) -> bool:
        """One event before this time: an arrival at an idle engine, a step, or a stride; False if there is none."""
        clock, engine, arrival = self.clock, self.engine, self._take_in()
        if not engine.busy:
            if arrival >= until:
                return False
            clock.now = max(clock.now, arrival)
            return True
        if clock.now >= until:
            return False
        if self.scheduler.stuck:
            wake = engine.wake_at()
            if not self._wait(arrival if wake is None else min(arrival, wake), until):
                return False
            arrival = self._take_in()
        ends = self.plan_stride(min(until, arrival))
        self.receive(self.take_stride(ends) if len(ends) else engine.step())
        return True

    def _take_in(self) -> float:
        """Add what has arrived; the time of the next arrival."""
        while self.coming and self.coming[0][0] <= self.clock.now:
            self.arrive(self.coming.popleft()[1])
        return self.coming[0][0] if self.coming else inf

    def _wait(self, event: float, until: float) -> bool:
        """An engine finds no work before this event: move the clock there. False if it is not before `until`."""
        if event == until == inf:
            self.scheduler.sealed = True  # nothing will arrive: the last batch stays incomplete
        elif event >= until:
            return False
        else:
            self.clock.now = max(self.clock.now, event)
        return True

    # -- strides

    def plan_stride(self, until: float = inf) -> Ends:
        """The ends of the plain steps that begin now, as far as their number is known, and up to the first one that
        ends at `until` or later; none if the next step must run through the engine."""
        pipelined = self.engine.depth > 0
        if self.stepped or (pipelined and not self._may_empty(until)):
            return NO_STEPS
        steps = stride.plain_steps(self.scheduler, self.clock.now, pipelined)
        if not steps:
            return NO_STEPS
        while self.engine.launched:
            self.receive(self.engine.settle())
        ends = self.plain_ends(self.scheduler.facts.running, steps, until)
        if pipelined:  # the step after it is planned before it ends, and must know of all arrivals until then
            ends = ends[: bisect_left(ends, until)]
        return ends[: stride.steps_to_change(self.scheduler.policy, self.clock.now, ends)]

    def _may_empty(self, until: float) -> bool:
        """Whether the steps in flight are plain and end before this time. Each has the time that it has alone, and the
        next plan finds what it would find after single steps: nothing arrives or ends between the plan of a step in
        flight and its end."""
        if self.scheduler.waiting or type(self.scheduler.policy) not in stride.STEADY or self.runner.free_at >= until:
            return False
        # Coming pages count as used until the steps in flight have settled.
        return not self.state.pages.coming and all(w.count == 1 for plan in self.engine.launched for w in plan.work)

    def take_stride(self, ends: Ends) -> list[Output]:
        """Take the plain steps that end at these times: the outputs of the sequences that end."""
        running, begun, steps = [*self.scheduler.facts.running], self.clock.now, len(ends)
        self.clock.now = float(ends[-1])
        stride.decode(self.scheduler, self.runner, steps)
        self.decoded(running, begun, ends)
        outputs = stride.settle(self.engine, begun, ends)
        totals = self.engine.totals
        totals.steps += steps
        totals.tokens += steps * len(running)
        totals.sampled += steps * len(running)
        totals.busy += self.clock.now - begun
        self.runner.free_at = self.clock.now
        return outputs
