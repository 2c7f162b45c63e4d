"""Several plain decode steps at once, for simulators: the scheduler ends up as if it had planned and settled each one.

A step is plain if every running sequence decodes one token and none waits. The decisions of such steps are known
beforehand up to the first one that ends a sequence, so a simulated device may take them together. Tests compare a
stride with single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Sequence

Decoded = Callable[[Sequence, int], list[int]]
"""(sequence, number) -> its next tokens."""


def plain_steps(scheduler: Scheduler) -> int:
    """Plain steps that could be taken now; the last of them ends at least one sequence. No step may be in flight.
    Windows, recurrent state, batch work and forks change more than lengths in a step; they are always stepped one by
    one."""
    state, running = scheduler.state, scheduler._running
    if not running or scheduler.waiting or scheduler._inflight or state.windowed or state.snapshots is not None:
        return 0
    if state.moving or running[-1].batch:
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


def _steps_with_pages(scheduler: Scheduler, steps: int) -> int:
    """Steps for which the pages suffice; all or none: a shortage is the scheduler's own decision."""
    need = 0
    for seq in scheduler._running:
        assert seq.state is not None
        for group, table in zip(scheduler.state.layout.paged, seq.state.tables, strict=True):
            need += max(0, -(-(seq.start + steps) // group.page_tokens) - len(table))
    return steps if need <= scheduler.state.pages.available else 0


def take_plain_steps(scheduler: Scheduler, steps: int, decoded: Decoded, seconds: list[float]) -> list[Sequence]:
    """Take that many plain steps, at most `plain_steps`. `seconds`: the times of the last of them, oldest first.
    Returns the sequences that have ended."""
    state = scheduler.state
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
        scheduler.pace.observe_decodes(len(scheduler._running), seconds)
    ended = [seq for seq in scheduler._running if len(seq.tokens) >= seq.request.limit]
    for seq in ended:
        scheduler._end(seq)
    return ended
