"""The ledger of a key's pins: what it holds is what a plain count over all live pins says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.serve.guard.pin_quota import PinLedger, PinsExceeded
from tests.sched.driver import Clock


def test_a_conversation_counts_each_token_once() -> None:
    ledger = PinLedger(100)
    for length in (20, 50, 90):
        ledger.charge("", list(range(length)), [(length, 300.0)])
    assert ledger.held == 90


def test_another_salt_is_another_prefix() -> None:
    ledger = PinLedger(100)
    for salt in ("", "a"):
        ledger.charge(salt, list(range(20)), [(20, 300.0)])
    assert ledger.held == 40


def test_a_call_that_never_ran_is_taken_back() -> None:
    ledger = PinLedger(100)
    ledger.charge("", list(range(20)), [(20, 300.0)])
    ledger.charge("", list(range(60)), [(40, 300.0), (60, 300.0)])()
    assert ledger.held == 20


def test_beyond_the_quota_the_time_until_enough_pins_end_is_told() -> None:
    clock = Clock()
    ledger = PinLedger(100, clock)
    ledger.charge("", list(range(60)), [(60, 300.0)])
    clock.now += 100
    with pytest.raises(PinsExceeded) as told:
        ledger.charge("", [7] * 50, [(50, 300.0)])
    assert (told.value.wanted, told.value.held, told.value.seconds) == (50, 60, 200.0)
    with pytest.raises(PinsExceeded) as told:
        ledger.charge("", [7] * 101, [(101, 300.0)])
    assert told.value.seconds is None
    clock.now += 200
    ledger.charge("", [7] * 50, [(50, 300.0)])
    assert ledger.held == 50


def test_a_use_begins_the_time_anew_also_without_a_mark() -> None:
    clock = Clock()
    ledger = PinLedger(100, clock)
    ledger.charge("", list(range(60)), [(60, 300.0)])
    clock.now += 200
    ledger.charge("", list(range(80)), [])
    clock.now += 200
    ledger.charge("", [9], [])
    assert ledger.held == 60


CALLS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.lists(st.integers(1, 8), max_size=3),
        st.sampled_from([10.0, 100.0]),
        st.sampled_from([0.0, 5.0, 50.0]),
    ),
    max_size=25,
)


@given(CALLS)
def test_what_is_held_never_exceeds_the_quota_and_ends_with_the_pins(
    calls: list[tuple[list[int], list[int], float, float]],
) -> None:
    clock = Clock()
    ledger = PinLedger(12, clock)
    for prompt, lengths, seconds, passes in calls:
        before = ledger.held
        keeps = sorted((length, seconds) for length in lengths if length <= len(prompt))
        try:
            ledger.charge("", prompt, keeps)
        except PinsExceeded as told:
            assert told.held <= before and told.held + told.wanted > 12
        assert 0 <= ledger.held <= 12
        assert ledger.held == sum(pin.own for pin in ledger._pins.values())
        live = {pin.length for pin in ledger._pins.values()}
        assert ledger.held >= max(live, default=0), "the longest prefix alone has that many"
        clock.now += passes
    clock.now += 1000
    ledger.charge("", [0], [])
    assert ledger.held == 0 and not ledger._pins
