"""Conversations whose contexts exceed the device's pool four times find them again on the host, however many wait."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from bankfull.config import StateConfig
from bankfull.state.lower_tier import LowerTier
from bankfull.state.tiers import Tiers
from bankfull.types import StepResult, Tier
from tests.sched.driver import TOKEN, Clock, request, scheduler

CONVERSATIONS, TURNS, NEW, ANSWER, PAGE = 32, 4, 128, 8, 16
CONTEXTS = CONVERSATIONS * TURNS * NEW // PAGE
"""Pages."""


def cached_share(frames: int, host: int, at_once: int, step_tokens: int) -> float:
    """Cached prompt tokens as a share of all. Transfers end one step after the one that starts them."""
    clock, random = Clock(), Random(0)
    sched = scheduler(frames=frames, clock=clock, state=StateConfig(page_tokens=PAGE), rows=16, step_tokens=step_tokens)
    state = sched.state
    if host:
        lower = [LowerTier(Tier.HOST, host, 0)]
        state.tiers = Tiers(state.pages, state.slots, lower, state.moves, page_bytes=2 << 20, slot_bytes=0, clock=clock)
    known = [tuple(random.choices(range(1000), k=NEW)) for _ in range(CONVERSATIONS)]
    cached = total = 0
    moving: deque[list[int]] = deque([[]])
    for turn in range(TURNS):
        for first in range(0, CONVERSATIONS, at_once):
            own = range(first, first + at_once)
            for number in own:
                sched.add(request(turn * CONVERSATIONS + number, prompt=known[number], more=ANSWER))
                total += len(known[number])
            found = {}
            while sched.unfinished:
                plan = sched.plan()
                assert plan is not None, "it is stuck"
                clock.now += 0.008
                moving.append([transfer.id for transfer in plan.transfers])
                tokens = [[TOKEN] if work.sample else [] for work in plan.work]
                for output in sched.settle(plan, StepResult(plan.step, tokens, completed=moving.popleft())):
                    found[output.request] = output.cached
            cached += sum(found.values())
            for number in own:
                more = random.choices(range(1000), k=NEW - ANSWER)
                known[number] = (*known[number], *[TOKEN] * ANSWER, *more)
    state.check()
    return cached / total


@pytest.mark.parametrize("step_tokens", [256, 2048])
@pytest.mark.parametrize("at_once", [1, 8, 32])
def test_a_host_tier_of_four_pools_finds_what_an_unbounded_cache_finds(at_once: int, step_tokens: int) -> None:
    pool = CONTEXTS // 4
    unbounded = cached_share(4 * CONTEXTS, 0, at_once, step_tokens)
    assert unbounded > 0.5 > 5 * cached_share(pool + 1, 0, at_once, step_tokens), "the pool alone is too large to tell"
    assert cached_share(pool + 1, 4 * pool, at_once, step_tokens) >= 0.9 * unbounded
