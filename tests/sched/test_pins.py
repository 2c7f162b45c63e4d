"""Pinned prefixes: kept for their time, within their tenant's share, and never in a request's way."""

from __future__ import annotations

from typing import Any

import pytest

from bankfull.config import StateConfig
from bankfull.sched.scheduler import Scheduler
from bankfull.state.lower_tier import LowerTier
from bankfull.state.prefix import Chain
from bankfull.state.spec import Paged, TensorSpec
from bankfull.state.tiers import Tiers
from bankfull.types import StepResult, Tier
from tests.sched.driver import FULL, MEMORY, Clock, drain, request, scheduler, step

WINDOW = Paged((TensorSpec("k", (1, 2), "float32"), TensorSpec("v", (1, 2), "float32")), window=6)


def run(sched: Scheduler, id: int, length: int = 32, more: int = 2, **options: Any) -> Any:
    """The whole life of one request; the request itself, which notes what it keeps."""
    made = request(id, length, more, **options)
    sched.add(made)
    made.payload = drain(sched)[id, 0]
    return made


def flood(sched: Scheduler, first: int, count: int = 20, **options: Any) -> None:
    """Requests that evict all that can be evicted."""
    for number in range(count):
        run(sched, first + number, 32, **options)


def again(sched: Scheduler, made: Any, id: int) -> int:
    """Tokens of an earlier prompt that are found in the cache."""
    return run(sched, id, prompt=(*made.prompt, 1)).payload.cached


@pytest.mark.parametrize("specs", [[FULL], [FULL, WINDOW], [FULL, MEMORY], [MEMORY]], ids=str)
def test_a_pinned_prefix_survives_what_evicts_all_others_until_its_time_is_over(specs: list[Any]) -> None:
    clock = Clock()
    sched = scheduler(specs, frames=40, slots=12, clock=clock)
    kept, other = run(sched, 1, keeps=((22, 300.0),)), run(sched, 2)
    border = sched.state.border_tokens
    assert kept.kept == [22 // border * border]
    flood(sched, 10)
    assert again(sched, other, 100) == 0
    assert again(sched, kept, 101) >= kept.kept[0]
    clock.now += 301
    flood(sched, 200)
    assert not sched.state.pins.all and again(sched, kept, 300) == 0
    sched.state.check()


def test_every_use_begins_the_time_of_a_pin_anew() -> None:
    clock = Clock()
    sched = scheduler(frames=40, clock=clock)
    kept = run(sched, 1, keeps=((32, 300.0),))
    for turn in range(4):
        clock.now += 200
        assert again(sched, kept, 10 + turn) == 32
        flood(sched, 100 * (turn + 1))
    clock.now += 299
    assert again(sched, kept, 1000) == 32


def test_the_longer_of_two_times_counts() -> None:
    clock = Clock()
    sched = scheduler(frames=40, clock=clock)
    prompt = tuple(range(32))
    run(sched, 1, prompt=prompt, keeps=((32, 3600.0),))
    second = run(sched, 2, prompt=(*prompt, 1), keeps=((32, 300.0),))
    assert second.kept == [0], "all of it was read from the cache"
    clock.now += 3000
    sched.state.pins.advance()
    assert len(sched.state.pins.all) == 1


def test_each_breakpoint_tells_the_tokens_that_it_newly_keeps() -> None:
    sched = scheduler(frames=60)
    first = run(sched, 1, 40, keeps=((9, 3600.0), (23, 300.0), (40, 300.0)))
    assert first.kept == [8, 12, 20]
    assert first.payload.cached == 0
    # The next turn of the conversation finds what there is, and keeps the rest.
    second = run(sched, 2, prompt=(*first.prompt, *range(900, 920)), keeps=((9, 3600.0), (60, 300.0)))
    assert second.payload.cached == 40 and second.kept == [0, 20]


def test_a_prefix_shorter_than_a_page_is_not_kept() -> None:
    sched = scheduler(frames=40)
    assert run(sched, 1, keeps=((3, 300.0),)).kept == [0]
    assert not sched.state.pins.all


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    sched = scheduler(frames=40, state=StateConfig(page_tokens=4, prefix_cache=False))
    assert run(sched, 1, keeps=((32, 300.0),)).kept == [0]
    assert not sched.state.pins.all


def test_a_running_sequence_gets_the_pages_of_the_oldest_pin_before_another_sequence_is_preempted() -> None:
    sched = scheduler(frames=20, rows=4)
    old = run(sched, 1, 16, keeps=((16, 300.0),))
    young = run(sched, 2, 16, keeps=((16, 300.0),))
    for id in (3, 4):
        sched.add(request(id, 8, 20))
    drain(sched)
    assert sched.preemptions == 0
    assert sched.state.pins.counts.given_up == 1
    assert again(sched, young, 10) == 16 and again(sched, old, 11) < 16


def test_a_request_as_large_as_the_pool_runs_although_half_of_it_is_pinned() -> None:
    sched = scheduler(frames=20)
    run(sched, 1, 40, keeps=((40, 300.0),))
    assert sched.state.pages.available == 10
    sched.add(request(2, 70, 10))
    drain(sched)
    assert sched.state.pins.counts.given_up == 1 and not sched.state.pins.all


def test_pins_yield_to_a_waiting_sequence_only_when_nothing_runs() -> None:
    sched = scheduler(frames=20, rows=2)
    run(sched, 1, 40, keeps=((40, 300.0),))
    sched.add(request(2, 4, 8))
    step(sched)
    sched.add(request(3, 40, 4))
    for _ in range(3):
        step(sched)
    assert sched.running == 1 and sched.state.pins.all
    drain(sched)
    assert not sched.state.pins.all


def test_a_recurrent_models_snapshots_yield_too() -> None:
    sched = scheduler([MEMORY], slots=4, rows=4)
    for id in (1, 2):
        assert run(sched, id, 16, keeps=((16, 300.0),)).kept == [16]
    for id in (3, 4):
        sched.add(request(id, 8, 8))
    assert len(drain(sched)) == 2
    sched.state.check()


# -- shares


def test_over_its_share_a_tenant_loses_the_pin_that_it_used_least_recently() -> None:
    sched = scheduler(frames=40)  # half of them: 20 pages, or 80 tokens
    made = [run(sched, id, 24, tenant="a", keeps=((24, 300.0),)) for id in (1, 2, 3)]
    assert len(sched.state.pins.all) == 3
    assert again(sched, made[0], 10) == 24  # now the second one is the oldest
    run(sched, 4, 24, tenant="a", keeps=((24, 300.0),))
    assert len(sched.state.pins.all) == 3 and sched.state.pins.counts.over_quota == 1
    flood(sched, 20)
    assert again(sched, made[0], 100) == 24 and again(sched, made[1], 101) == 0


def test_a_tenant_alone_may_pin_all_that_pins_may_hold_and_gives_way_to_the_next_one() -> None:
    sched = scheduler(frames=40)
    for id in range(1, 6):
        run(sched, id, 16, tenant="a", keeps=((16, 300.0),))
    assert len(sched.state.pins.all) == 5
    for id in (6, 7):
        run(sched, id, 16, tenant="b", keeps=((16, 300.0),))
    assert [pin.tenant for pin in sched.state.pins.all.values()] == ["a", "a", "a", "b", "b"]
    run(sched, 8, 16, tenant="b", keeps=((16, 300.0),))
    assert sorted(pin.tenant for pin in sched.state.pins.all.values()).count("b") in (2, 3)
    assert sched.state.pins.places <= 20


def test_a_prefix_larger_than_the_share_is_not_kept_and_drops_nothing() -> None:
    sched = scheduler(frames=40)
    small = run(sched, 1, 16, keeps=((16, 300.0),))
    assert run(sched, 2, 100, keeps=((100, 300.0),)).kept == [0]
    assert len(sched.state.pins.all) == 1 and sched.state.pins.counts.over_quota == 1
    flood(sched, 10)
    assert again(sched, small, 100) == 16


def test_pages_that_two_pins_of_a_conversation_share_count_once() -> None:
    sched = scheduler(frames=40)
    tokens = tuple(range(72))
    for turn, length in enumerate((24, 36, 48, 60, 72)):
        run(sched, turn + 1, prompt=tokens[:length], keeps=((length, 300.0),))
    assert len(sched.state.pins.all) == 5 and sched.state.pins.places == 18
    assert sched.state.pins.counts.over_quota == 0


def test_a_share_of_nothing_keeps_nothing() -> None:
    sched = scheduler(frames=40, state=StateConfig(page_tokens=4, pin_share=0))
    assert run(sched, 1, keeps=((32, 300.0),)).kept == [0]
    assert not sched.state.pins.all


def test_emptying_the_cache_ends_all_pins() -> None:
    sched = scheduler(frames=40)
    run(sched, 1, keeps=((32, 300.0),))
    sched.state.forget()
    assert not sched.state.pins.all and sched.state.pages.available == 40


def test_two_tenants_with_the_same_prefix_both_keep_it_and_both_can_give_it_up() -> None:
    sched = scheduler(frames=20)
    prompt = tuple(range(16))
    for id, tenant in ((1, "a"), (2, "b")):
        run(sched, id, prompt=(*prompt, id), tenant=tenant, keeps=((16, 300.0),))
    assert len(sched.state.pins.all) == 2 and sched.state.pins.places == 4
    sched.add(request(3, 70, 10))
    drain(sched)
    assert not sched.state.pins.all and sched.state.pins.counts.given_up == 2


# -- lower tiers


def tiered(sched: Scheduler, tier: Tier, pages: int) -> LowerTier:
    state = sched.state
    lower = LowerTier(tier, pages, 0)
    state.tiers = Tiers(state.pages, state.slots, [lower], state.moves, page_bytes=100, slot_bytes=0)
    return lower


def settle_moves(sched: Scheduler) -> None:
    """Run until no copy is under way."""
    for _ in range(100):
        if (plan := sched.plan()) is None:
            return
        sched.settle(plan, StepResult(plan.step, [], completed=[transfer.id for transfer in plan.transfers]))


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.HOST], ids=str)
def test_a_pinned_page_with_a_copy_below_leaves_the_device_and_the_copy_is_held(tier: Tier) -> None:
    sched = scheduler(frames=20)
    lower = tiered(sched, tier, 60)
    kept = run(sched, 1, 40, keeps=((40, 300.0),))
    settle_moves(sched)
    for id in (2, 3):
        run(sched, id, 28, 4)
        settle_moves(sched)
    run(sched, 4, 70, 10)
    settle_moves(sched)
    assert sched.state.pins.all and sched.state.pins.counts.given_up == 0
    held = sched.state.pins._held.values()
    assert all(place.pool is lower.pages for place in held) and lower.pages.census().held == 10
    for id in range(10, 20):  # they would evict it from a tier of 60 pages
        run(sched, id, 40, 4)
        settle_moves(sched)
    names = sched.state.keys_for(chain_of(sched, kept), 40)
    assert all(lower.find(key) is not None for key in names)
    sched.state.check()


def chain_of(sched: Scheduler, made: Any) -> Any:
    chain = Chain(made.salt, sched.state.layout.block_tokens)
    chain.extend(made.prompt, len(made.prompt))
    return chain


def test_what_was_computed_again_after_a_damaged_copy_is_held_again() -> None:
    sched = scheduler(frames=20)
    lower = tiered(sched, Tier.DISK, 60)
    kept = run(sched, 1, 40, keeps=((40, 300.0),))
    settle_moves(sched)
    run(sched, 2, 70, 10)  # moves the pin below
    key = sched.state.keys_for(chain_of(sched, kept), 40)[3]
    lower.pages.withdraw(key)  # as a failed read does
    run(sched, 3, prompt=kept.prompt, keeps=((40, 300.0),))
    held = sched.state.pins._held[key]
    assert held.pool.find(key) == held.place
    sched.state.pins.clear()
    settle_moves(sched)
    sched.state.check()
    assert lower.pages.census().held == 0
