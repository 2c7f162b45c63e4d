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
    Windows, recurrent state, tiers, batch work and forks change more than lengths in a step; they are always stepped
    one by one."""
    state, running = scheduler.state, scheduler._running
    if not running or scheduler._inflight or state.windowed or state.snapshots is not None or state.tiers is not None:
        return 0
    if state.moving or running[-1].batch or (scheduler.waiting and _may_admit(scheduler)):
        return 0
    if 0 < scheduler.config.decode_rows < len(running):
        return 0
    if len(running) > scheduler.config.step_tokens:
        return 0
    left = []
    for seq in running:
        request, start = seq.request, seq.start
        if seq.missing != 1 or start < seq.prompt_len or seq.children or not request.generates or request.stop_ids:
            return 0
        left.append(request.limit - start - 1)
    steps = min(left)
    return steps if steps > 0 and _have_pages(scheduler, steps) else 0


def _may_admit(scheduler: Scheduler) -> bool:
    """Whether the next plan could admit a waiting sequence, or do anything else for those that wait."""
    waiting, policy = scheduler._waiting, scheduler.policy
    if scheduler._tenants.compete or waiting[-1].batch:
        return True
    quota = waiting.quota(scheduler.running, scheduler._clock(), scheduler.sealed)
    index = waiting.admissible(0, quota)
    if index is None:
        return False
    if scheduler._free_rows:
        return True
    return policy.preemptive and bool(policy.giving_way(waiting[index], scheduler._running, None))


def _have_pages(scheduler: Scheduler, steps: int) -> bool:
    """Whether the pages suffice for so many steps; a shortage is the scheduler's own decision."""
    need, growth = 0, scheduler.state.growth
    for seq in scheduler._running:
        assert seq.state is not None
        need += growth(seq.state, seq.start + steps)
    return need <= scheduler.state.pages.available


def take_plain_steps(scheduler: Scheduler, steps: int, decoded: Decoded, seconds: list[float]) -> list[Sequence]:
    """Take that many plain steps, at most `plain_steps` and `Policy.steps_to_change`; the scheduler's clock must show
    their end. `seconds`: the times of all of them, oldest first, or where the policy is not `counting`, of the last
    ones that the pace remembers. Returns the sequences that have ended."""
    state, served = scheduler.state, [*scheduler._running]
    last = next(scheduler._steps) + steps - 1
    scheduler._steps = count(last + 1)
    scheduler._company = last
    state.launch(last)
    ended = []
    for seq in served:
        seq_state, computed = seq.state, seq.start + steps
        assert seq_state is not None
        if computed > seq_state.covered:
            reserved = state.reserve(seq_state, computed)
            assert reserved is not None, "plain_steps() has counted the pages"
        seq.tokens += decoded(seq, steps)
        seq.computed = seq.start = computed
        seq.turn = last
        if computed >= seq_state.border:
            state.publish(seq_state, seq.tokens, computed, seq.prompt_len)
        if computed + 1 >= seq.request.limit:
            ended.append(seq)
    state.settle(last)
    if scheduler.pace.measured:
        scheduler.pace.observe_decodes(len(scheduler._running), seconds[-REMEMBERED:])
    now, policy = scheduler._clock(), scheduler.policy
    if policy.counting and ended and steps > 1:  # it hears of the last step's ends before it hears of the step
        scheduler.rank_again(policy.after_plain(ended, seconds[:-1], now - seconds[-1]), now)
        ended.sort(key=lambda seq: seq.order)
    for seq in ended:
        scheduler._end(seq)
    scheduler.rank_again(policy.after_plain(served, seconds, now), now)
    return ended
