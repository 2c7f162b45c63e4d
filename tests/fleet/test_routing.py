"""Routing policies are pure: one view per replica in, an index out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.routing import (
    POLICIES,
    Candidate,
    first_token_ms,
    others_delay_ms,
    predicted,
    routing_policy,
    with_rates,
)
from bankfull.serve.engine.wire import Facts, Load

IDLE = Load(0, 0, 0, 0, 100, 0, 0, 0, 1, 0.0, 0.0, 0.0)
MEASURED = Candidate(IDLE, prefill_ms_per_token=0.1, step_ms=10.0, rows=16, step_tokens=512, row_ms=500.0)


def busy(running: int = 0, waiting: int = 0, used: int = 0, cached: int = 0) -> Load:
    load = Load(running, waiting, 0, used, 100, 0, 0, 0, 1, 0.0, 0.0, 0.0)
    load.pages_cached = cached
    return load


LOADS = st.builds(busy, st.integers(0, 40), st.integers(0, 40), st.integers(0, 100), st.integers(0, 100))
CANDIDATES = st.builds(
    Candidate,
    load=st.none() | LOADS,
    cached_tokens=st.integers(0, 5000),
    prefill_ms_per_token=st.floats(0, 10),
    step_ms=st.floats(0, 1000),
    inflight_tokens=st.integers(0, 100_000),
    rows=st.integers(0, 64),
    inflight=st.integers(0, 100),
    batch_inflight=st.integers(0, 100),
    step_tokens=st.integers(0, 8192),
    row_ms=st.floats(0, 1e5),
)


@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(0, 5000),
    st.booleans(),
    st.lists(CANDIDATES, min_size=1, max_size=8),
)
def test_every_policy_chooses_one_of_the_replicas_whatever_they_report(
    name: str, prompt: int, batch: bool, candidates: list[Candidate]
) -> None:
    policy, same = routing_policy(name, 7), routing_policy(name, 7)
    for _ in range(3):
        chosen = policy.choose(prompt, batch, candidates)
        assert 0 <= chosen < len(candidates)
        assert chosen == same.choose(prompt, batch, candidates), "a policy depends on its arguments and its seed only"


@given(st.integers(1, 5000), CANDIDATES, st.integers(0, 5000), st.integers(1, 10_000))
def test_more_cached_tokens_never_cost_more_and_a_longer_queue_never_less(
    prompt: int, replica: Candidate, cached: int, queued: int
) -> None:
    warmer = replace(replica, cached_tokens=max(cached, replica.cached_tokens))
    assert first_token_ms(prompt, warmer) <= first_token_ms(prompt, replica)
    assert others_delay_ms(prompt, warmer) <= others_delay_ms(prompt, replica)
    assert first_token_ms(prompt, replace(replica, inflight_tokens=replica.inflight_tokens + queued)) >= first_token_ms(
        prompt, replica
    )


def test_a_session_stays_where_its_prefix_is() -> None:
    policy = routing_policy()
    holders = [MEASURED, replace(MEASURED, cached_tokens=900), MEASURED]
    assert [policy.choose(1000, False, holders) for _ in range(5)] == [1] * 5


def test_a_session_leaves_a_replica_whose_queue_costs_more_than_its_prefix() -> None:
    policy = routing_policy()
    for queued, chosen in ((0, 1), (800, 1), (1100, 0), (50_000, 0)):
        holder = replace(MEASURED, cached_tokens=1000, inflight_tokens=queued)
        assert policy.choose(1100, False, [MEASURED, holder]) == chosen


def test_a_full_cache_makes_sessions_stick_longer() -> None:
    """Elsewhere the prompt would evict what others need."""
    policy = routing_policy()
    holder = replace(MEASURED, cached_tokens=1000, inflight_tokens=1500)
    assert policy.choose(1100, False, [MEASURED, holder]) == 0
    full = replace(MEASURED, load=busy(cached=100))
    assert policy.choose(1100, False, [full, replace(holder, load=full.load)]) == 1


def test_a_replica_without_a_free_row_makes_requests_wait() -> None:
    policy = routing_policy()
    crowded = replace(MEASURED, load=busy(running=16), cached_tokens=200, inflight=40)
    assert policy.choose(300, False, [crowded, MEASURED]) == 1
    assert first_token_ms(300, crowded) > 25 * 500.0 / 16


def test_an_added_replica_gets_its_share_of_equal_prompts() -> None:
    """Streams of one short prompt, which the first replica holds; each lasts 40 arrivals."""
    policy = routing_policy()
    online, holds = [0, 0], [True, False]
    ends: list[tuple[int, int]] = []
    for arrival in range(400):
        for _, at in (one for one in ends if one[0] == arrival):
            online[at] -= 1
        replicas = [
            replace(MEASURED, load=busy(running=count), inflight=count, cached_tokens=99 * held)
            for count, held in zip(online, holds, strict=True)
        ]
        chosen = policy.choose(100, False, replicas)
        online[chosen] += 1
        holds[chosen] = True
        ends.append((arrival + 40, chosen))
        assert arrival < 100 or abs(online[0] - online[1]) <= 2


@given(st.integers(1, 5000), st.integers(0, 16), st.integers(0, 16), st.integers(0, 5000))
def test_a_prefix_is_left_exactly_if_sharing_costs_more_than_computing_it(
    prompt: int, here: int, there: int, cached: int
) -> None:
    """Nothing but decoding runs at either replica, and the cache of neither is full."""
    cached = min(cached, prompt - 1)
    holder, other = (replace(MEASURED, inflight=count, cached_tokens=0) for count in (here, there))
    holder = replace(holder, cached_tokens=cached)
    gained = predicted(prompt, holder) - predicted(prompt, other)
    full = (500.0 / 16) * ((here == 16) - (there == 16))  # until a row is free
    assert gained == pytest.approx(0.5 * 500.0 * (here - there) / 16 - cached * 0.1 + full, abs=1e-6)
    if abs(gained) > 0.2:
        assert routing_policy().choose(prompt, False, [holder, other]) == int(gained > 0)


def test_a_slower_replica_gets_less() -> None:
    policy = routing_policy()
    slow = replace(MEASURED, prefill_ms_per_token=1.0, inflight_tokens=100)
    fast = replace(MEASURED, inflight_tokens=900)
    assert policy.choose(500, False, [slow, fast]) == 1


def test_equal_replicas_take_turns_and_ties_go_to_the_least_in_flight() -> None:
    policy = routing_policy()
    assert [policy.choose(100, False, [MEASURED] * 3) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert policy.choose(100, False, [replace(MEASURED, inflight=2), replace(MEASURED, inflight=1)]) == 1


def test_a_replica_that_was_never_measured_is_taken_for_one_like_the_others() -> None:
    fresh = Candidate(rows=16)
    [_, assumed] = with_rates([MEASURED, fresh])
    assert (assumed.prefill_ms_per_token, assumed.step_ms, assumed.row_ms) == (0.1, 10.0, 500.0)
    policy = routing_policy()
    assert policy.choose(100, False, [replace(MEASURED, inflight_tokens=300), fresh]) == 1
    assert policy.choose(100, False, [MEASURED, replace(fresh, inflight_tokens=300)]) == 0
    assert policy.choose(1000, False, [fresh, replace(fresh, cached_tokens=500)]) == 1, "defaults before any step"


def test_batch_work_goes_where_the_least_online_work_is() -> None:
    for name in ("prefix", "least-loaded"):
        policy = routing_policy(name)
        online = replace(MEASURED, inflight=1, cached_tokens=1000)
        crowd = replace(MEASURED, load=busy(running=9), batch_inflight=9)
        assert policy.choose(1000, True, [online, crowd]) == 1
        assert policy.choose(1000, True, [online, crowd, MEASURED]) == 2, "then where the least batch work is"


def test_round_robin_takes_turns_whatever_the_load() -> None:
    policy = routing_policy("round-robin")
    crowd = replace(MEASURED, inflight=99)
    assert [policy.choose(9, False, [crowd, MEASURED, MEASURED]) for _ in range(4)] == [0, 1, 2, 0]
    assert policy.choose(9, False, [crowd]) == 0, "replicas may leave at any time"


def test_least_loaded_counts_the_requests_of_other_fronts() -> None:
    policy = routing_policy("least-loaded")
    assert policy.choose(9, False, [replace(MEASURED, load=busy(5, 5)), replace(MEASURED, inflight=9)]) == 1


def test_random_two_avoids_the_busiest_and_uses_all_others() -> None:
    policy = routing_policy("random-two", 1)
    candidates = [replace(MEASURED, inflight=50), *[MEASURED] * 4]
    counts = Counter(policy.choose(9, False, candidates) for _ in range(400))
    assert counts[0] == 0 and min(counts[i] for i in range(1, 5)) > 40


def test_an_unknown_policy_is_named_with_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"'prefx' is unknown; did you mean 'prefix'\?"):
        routing_policy("prefx")
    with pytest.raises(ConfigError, match="use one of prefix, round-robin, least-loaded, random-two"):
        routing_policy("zzz")


# -- the meter


def test_a_prompt_counts_until_its_first_token() -> None:
    now = 0.0
    meter = ReplicaMeter(lambda: now)
    meter.started(Facts("", 64, 99, 4, 100, 16, 256, "", ""))
    meter.sent("a", 1000, 600)
    meter.sent("b", 50, 50, samples=2)
    view = meter.candidate(7)
    assert (view.inflight_tokens, view.inflight, view.cached_tokens) == (401, 3, 7), "one token always runs"
    assert (view.rows, view.step_tokens, view.row_ms) == (4, 256, 0.0)
    meter.answered("a")
    meter.answered("a")
    assert (meter.candidate().inflight_tokens, meter.candidate().inflight) == (1, 3)
    now = 2.0
    meter.ended("a")
    meter.ended("a")
    meter.ended("b")
    view = meter.candidate()
    assert (view.inflight_tokens, view.inflight, view.row_ms) == (0, 0, 2000.0)


def test_batch_requests_are_no_online_work() -> None:
    meter = ReplicaMeter()
    meter.sent(1, 1000, 0, batch=True)
    view = meter.candidate()
    assert (view.inflight_tokens, view.inflight, view.batch_inflight) == (0, 0, 1)
    meter.ended(1)
    assert meter.candidate().batch_inflight == 0


def test_prompts_of_other_fronts_are_part_of_the_queue() -> None:
    meter = ReplicaMeter()
    meter.sent(1, 1000, 900)
    meter.report(Load(0, 1, 1000, 0, 100, 0, 0, 0, 1, 0.0, 0.0, 0.0))
    assert meter.candidate().inflight_tokens == 100, "only its own request waits"
    meter.report(Load(0, 2, 1500, 0, 100, 0, 0, 0, 1, 0.0, 0.0, 0.0))
    assert meter.candidate().inflight_tokens == 600
    meter.lost()
    assert meter.candidate() == Candidate(inflight_tokens=100, inflight=1)
