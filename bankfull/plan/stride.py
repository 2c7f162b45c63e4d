"""A stride: several plain decode steps at once, after which the scheduler is as if it had planned and settled each one.

A step is plain if every running sequence decodes one token, and no sequence waits that could be admitted: all rows are
taken, or the gate is closed, and no running sequence gives way. The decisions of such steps are known beforehand up to
the first one that ends a sequence or changes who gives way, so a simulated device may take them together. Tests compare
strides with single steps.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

from bankfull.engine import Engine
from bankfull.plan.decode_times import Floats
from bankfull.plan.fake_runner import FakeRunner
from bankfull.sched.pace import REMEMBERED
from bankfull.sched.policies.fcfs import FirstCome, Orca
from bankfull.sched.policies.lpm import LongestPrefix
from bankfull.sched.policies.mlfq import DEEPEST, Mlfq, is_fruitless
from bankfull.sched.policies.priority import Priority
from bankfull.sched.policies.srpt import Srpt
from bankfull.sched.policy import Policy
from bankfull.sched.scheduler import Scheduler
from bankfull.types import Finish, Output, StepPlan, Work

STEADY = frozenset((FirstCome, Orca, Priority, LongestPrefix, Srpt))
"""Policies that remember nothing of a step, read no plan, and under which plain steps change no decision: they hear of
the last step of a stride alone. Every other policy hears of each step."""
LEAST_STRIDE = 3
"""Plain steps that are worth taking together where the engine's pipeline is emptied before and filled afterwards."""
ROUNDING = 1e-6
"""More seconds than the sums of a run of steps may be wrong by."""

Ends = list[float] | Floats
"""When each of several steps ends."""


def plain_steps(scheduler: Scheduler, now: float, pipelined: bool = False) -> int:
    """Plain steps that could be taken now, up to the one that ends a sequence; where the engine plans ahead
    (`pipelined`), up to the one before it, and none if they are few. Windows, recurrent state, tiers, batch work and
    forks change more than lengths in a step; they are always stepped one by one."""
    state, config, running = scheduler.state, scheduler.config, scheduler.facts.running
    if not running or state.windowed or state.snapshots is not None or state.tiers is not None or state.moving:
        return 0
    if scheduler.canvas is not None or running[-1].batch or (scheduler.waiting and _may_admit(scheduler, now)):
        return 0
    if len(running) > config.step_tokens or 0 < config.decode_rows < len(running):
        return 0
    left = []
    for seq in running:
        request, start = seq.request, seq.start
        if seq.missing != 1 or start < seq.prompt_len or seq.children or not request.generates or request.stop_ids:
            return 0
        left.append(request.limit - start - 1)
    steps = min(left) - pipelined
    return steps if steps >= (LEAST_STRIDE if pipelined else 1) and _have_pages(scheduler, steps) else 0


def _may_admit(scheduler: Scheduler, now: float) -> bool:
    """Whether the next plan could admit a waiting sequence, or do anything else for those that wait."""
    facts, policy = scheduler.facts, scheduler.policy
    if facts.contested or facts.waiting[-1].batch:
        return True
    head = facts.admissible(now, scheduler.sealed)
    if head is None:
        return False
    return facts.free_rows > 0 or (policy.preemptive and bool(policy.giving_way(head, facts.running, None)))


def _have_pages(scheduler: Scheduler, steps: int) -> bool:
    """Whether the pages suffice for so many steps; a shortage is the scheduler's own decision."""
    need, growth = 0, scheduler.state.growth
    for seq in scheduler.facts.running:
        assert seq.state is not None
        need += growth(seq.state, seq.start + steps)
    return need <= scheduler.state.pages.available


def steps_to_change(policy: Policy, begun: float, ends: Ends) -> int:
    """How many of the next plain steps may be taken at once: only the last of them may change who gives way."""
    if not policy.preemptive or type(policy) in STEADY:
        return len(ends)
    running = policy.facts.running
    if not isinstance(policy, Mlfq) or any(map(is_fruitless, running)):
        return 1  # a fruitless sequence may give way after its next token, and ranks of an unknown policy after any
    until = policy.next_promotion
    head = next((seq for seq in policy.facts.waiting if seq.parent is None), None)
    if head is not None and (level := policy.level_of(head)) < DEEPEST:
        until = min(until, begun + min(policy.stays_above(seq, level) for seq in running))
    return min(len(ends), bisect_left(ends, until - ROUNDING) + 1)


def decode(scheduler: Scheduler, runner: FakeRunner, steps: int) -> None:
    """Every running sequence decodes one token in each of so many steps, at most `plain_steps`."""
    state = scheduler.state
    for seq in scheduler.facts.running:
        seq_state, computed = seq.state, seq.start + steps
        assert seq_state is not None
        if computed > seq_state.covered:
            reserved = state.reserve(seq_state, computed)
            assert reserved is not None, "plain_steps() has counted the pages"
        seq.tokens += runner.decode(seq.row, len(seq.tokens), steps)
        seq.computed = seq.start = computed
        seq.turn = state.launched
        if computed >= seq_state.border:
            state.publish(seq_state, seq.tokens, computed, seq.prompt_len)


def settle(engine: Engine[FakeRunner], begun: float, ends: Ends) -> list[Output]:
    """Settle the steps that the sequences have decoded in: sequences end, and the pace and the policy hear of it."""
    scheduler, steps = engine.scheduler, len(ends)
    policy, facts, each = scheduler.policy, scheduler.facts, type(scheduler.policy) not in STEADY
    served, told = [*facts.running], steps if each else min(steps, REMEMBERED)
    readings = [*(() if told < steps else (begun,)), *map(float, ends[-told - 1 :])]
    # The engine measures a step as the difference of two readings of its clock.
    seconds = [end - start for start, end in pairwise(readings)]
    for one in seconds[-REMEMBERED:] if scheduler.pace.measured else ():
        scheduler.pace.observe(len(served), 0, 0, one)
    plan = StepPlan(scheduler.state.launched)
    if each:
        plan.work = [Work(seq.row, seq.start - 1, 1, sample=True) for seq in served]
        for now, one in zip(readings[1:-1], seconds, strict=False):
            if changed := [*policy.after(plan, served, now, one)]:
                scheduler.rank_again(changed, now)
                served = [*facts.running]
    outputs = []
    for seq in served:
        if seq.start + 1 >= seq.request.limit:
            outputs += engine.abort(seq.request.id, Finish.LENGTH, seq.child)
    scheduler.rank_again(policy.after(plan, served, readings[-1], seconds[-1]), readings[-1])
    return outputs
