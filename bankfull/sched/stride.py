"""Several plain decode steps at once, for simulators: the scheduler ends up as if it had planned and settled each one.

A step is plain if every running sequence decodes one token, and no sequence waits that could be admitted: all rows are
taken, or the gate is closed, and no running sequence gives way. The decisions of such steps are known beforehand up to
the first one that ends a sequence or changes a rank (`Policy.steps_to_change`), so a simulated device may take them
together. Tests compare a stride with single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from bankfull.sched.pace import REMEMBERED
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence

Decoded = Callable[[Sequence, int], list[int]]
"""(sequence, number) -> its next tokens."""


def plain_steps(scheduler: Scheduler) -> int:
    """Plain steps that could be taken now; the last of them ends at least one sequence. No step may be in flight.
    Windows, recurrent state, batch work and forks change more than lengths in a step; they are always stepped one by
    one."""
    state, running = scheduler.state, scheduler._running
    if not running or scheduler._inflight or state.windowed or state.snapshots is not None:
        return 0
    if state.moving or running[-1].batch or (scheduler.waiting and _may_admit(scheduler)):
        return 0
    if 0 < scheduler.config.decode_rows < len(running):
        return 0
    steps = 1 << 30
    for seq in running:
        if (
            seq.missing != 1
            or seq.start < seq.prompt_len
            or seq.children
            or not seq.request.generates
            or seq.request.stop_ids
        ):
            return 0
        steps = min(steps, seq.request.limit - len(seq.tokens))
    if steps <= 0 or len(running) > scheduler.config.step_tokens:
        return 0
    return min(steps, _steps_with_pages(scheduler, steps))


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether the next plan could admit a waiting sequence, or do anything else for those that wait."""
    waiting, policy = scheduler._waiting, scheduler.policy
    if scheduler.state.tiers is not None or scheduler._tenants.compete or waiting[-1].batch:
        return True
    quota = waiting.quota(scheduler.running, scheduler._clock(), scheduler.sealed)
    index = waiting.admissible(0, quota)
    if index is None:
        return False
    return bool(scheduler._free_rows) or bool(
        policy.preemptive and policy.giving_way(waiting[index], scheduler._running, None)
    )


def _steps_with_pages(scheduler: Scheduler, steps: int) -> int:
    """Steps for which the pages suffice; all or none: a shortage is the scheduler's own decision."""
    need = 0
    for seq in scheduler._running:
        assert seq.state is not None
        for group, table in zip(scheduler.state.layout.paged, seq.state.tables, strict=True):
            need += max(0, -(-(seq.start + steps) // group.page_tokens) - len(table))
    return steps if need <= scheduler.state.pages.available else 0


def take_plain_steps(scheduler: Scheduler, steps: int, decoded: Decoded, seconds: list[float]) -> list[Sequence]:
    """Take that many plain steps, at most `plain_steps` and `Policy.steps_to_change`; the scheduler's clock must show
    their end. `seconds`: the times of all of them, oldest first, or where the policy is not `counting`, of the last
    ones that the pace remembers. Returns the sequences that have ended."""
    state, served = scheduler.state, [*scheduler._running]
    last = next(scheduler._steps) + steps - 1
    scheduler._steps = count(last + 1)
    scheduler._company = last
    state.launch(last)
    for seq in scheduler._running:
        assert seq.state is not None
        reserved = state.reserve(seq.state, seq.start + steps)
        assert reserved is not None, "plain_steps() has counted the pages"
        seq.tokens += decoded(seq, steps)
        seq.computed += steps
        seq.start += steps
        seq.turn = last
        if seq.computed >= seq.state.border:
            state.publish(seq.state, seq.tokens, seq.computed, seq.prompt_len)
    state.settle(last)
    if scheduler.pace.measured:
        scheduler.pace.observe_decodes(len(scheduler._running), seconds[-REMEMBERED:])
    ended = [seq for seq in scheduler._running if len(seq.tokens) >= seq.request.limit]
    now, policy = scheduler._clock(), scheduler.policy
    if ended and policy.counting:  # it hears of a step's ends before it hears of the step
        policy.after_plain(ended, seconds[:-1], now - sum(seconds))
    for seq in ended:
        scheduler._end(seq)
    for seq in policy.after_plain(served, seconds, now):
        scheduler.rank_again(seq, now)
    return ended
