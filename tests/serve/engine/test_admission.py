"""The bounded queue, on a clock of its own."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from bankfull.errors import ConfigError
from bankfull.serve.engine.admission import BATCH_PRIORITY, LONGEST_WAIT, Admission, QueueLimits, Ticket
from bankfull.serve.engine.backend import Busy, Unavailable
from bankfull.serve.engine.wire import Facts

FACTS = Facts(
    "tiny", max_len=100, vocab=10, rows=4, pages=100, page_tokens=4, step_tokens=64, dtype="float32", device="cpu"
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock | None = None, **limits: int) -> Admission:
    admission = Admission(QueueLimits(**limits), clock or Clock())
    admission.open(FACTS)
    return admission


def enter(admission: Admission, prompt: int = 10, samples: int = 1, most: int | None = 10, priority: int = 0) -> Ticket:
    return admission.enter(prompt, samples, most, priority)


def test_the_queue_is_bounded_by_requests() -> None:
    admission = opened(requests=2)
    tickets = [enter(admission) for _ in range(6)]
    with pytest.raises(Busy):
        enter(admission)
    admission.leave(tickets.pop())
    tickets.append(enter(admission))
    for ticket in tickets:
        admission.leave(ticket)
        admission.leave(ticket)  # the second time counts nothing
    assert admission.samples == admission.tokens == 0


def test_what_would_be_refused_can_be_known_before_there_is_a_prompt() -> None:
    admission = opened(requests=0)
    admission.expect(9, 0, 0)
    tickets = [enter(admission) for _ in range(3)]
    admission.expect(1, 0, 0)
    with pytest.raises(Busy):
        admission.expect(2, 0, 0)
    tickets.append(enter(admission))
    with pytest.raises(Busy):
        admission.expect(1, 0, 0)
    admission.expect(1, 0, BATCH_PRIORITY)
    assert admission.samples == len(tickets) == 4
    admission.close("Gone.")
    with pytest.raises(Unavailable):
        admission.expect(1, 0, BATCH_PRIORITY)


def test_the_queue_is_bounded_by_tokens() -> None:
    admission = opened(tokens=0)
    for _ in range(3):
        enter(admission, prompt=50, most=None)  # until the context of 100 ends
    enter(admission, prompt=1, samples=3, most=33)
    with pytest.raises(Busy):
        enter(admission, prompt=1, most=0)


def test_samples_count_one_by_one_and_the_first_always_comes_in() -> None:
    admission = opened(requests=0)
    ticket = enter(admission, samples=9)
    with pytest.raises(Busy):
        enter(admission)
    admission.leave(ticket)
    enter(admission)


def test_batch_work_takes_no_place_from_online_requests() -> None:
    admission = opened(requests=0)
    for _ in range(1000):
        enter(admission, priority=BATCH_PRIORITY)
    for _ in range(4):
        enter(admission)
    enter(admission, priority=BATCH_PRIORITY)
    with pytest.raises(Busy):
        enter(admission, priority=BATCH_PRIORITY - 1)


def test_closed_means_unavailable_and_opening_helps() -> None:
    admission = Admission(QueueLimits())
    with pytest.raises(Unavailable, match="loaded"):
        enter(admission)
    admission.open(FACTS)
    ticket = enter(admission)
    admission.close("Gone fishing.")
    with pytest.raises(Unavailable, match="fishing"):
        enter(admission, priority=BATCH_PRIORITY)
    admission.leave(ticket)


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        QueueLimits(requests=-1)


def test_under_five_times_the_load_the_house_stays_full_and_no_wait_is_endless() -> None:
    clock, random = Clock(), Random(3)
    admission = opened(clock)
    inside: list[tuple[float, Ticket]] = []
    coming_back: list[float] = []
    served, free = 0, clock.now
    while clock.now < 700.0:
        clock.now += 0.05
        while inside and inside[0][0] <= clock.now:
            admission.leave(inside.pop(0)[1])
            served += 1
        arrivals = sum(when <= clock.now for when in coming_back) + (random.random() < 0.5)
        coming_back = [when for when in coming_back if when > clock.now]
        for _ in range(arrivals):
            try:
                ticket = enter(admission)
            except Busy as busy:
                assert 1.0 <= busy.retry_after <= LONGEST_WAIT
                if random.random() < 0.2:  # the others give up
                    coming_back.append(clock.now + busy.retry_after)
            else:
                free = max(free, clock.now) + 0.5  # two a second are served
                inside.append((free, ticket))
    assert served > 0.95 * 2 * 600


def test_the_wait_follows_the_measured_rate() -> None:
    clock = Clock()
    admission = opened(clock, requests=0)
    tickets = [enter(admission) for _ in range(4)]
    for _ in range(20):  # one leaves every two seconds
        clock.now += 2.0
        admission.leave(tickets.pop(0))
        tickets.append(enter(admission))
    waits = []
    for _ in range(3):
        with pytest.raises(Busy) as refused:
            enter(admission)
        waits.append(refused.value.retry_after)
    assert waits == pytest.approx([2.0, 4.0, 6.0], rel=0.15), "each of them behind the one before"


def test_no_tenant_can_fill_the_house() -> None:
    admission = opened(requests=12)  # 16 in all
    held = []
    with pytest.raises(Busy, match="other keys"):
        while True:
            held.append(admission.enter(1, 1, 1, 0, "greedy"))
    assert len(held) == 12
    assert admission.enter(1, 1, 1, 0, "modest").counted
    with pytest.raises(Busy):
        admission.expect(1, 0, 0, "greedy")
    for ticket in held:
        admission.leave(ticket)
    assert admission.samples == 1 and list(admission._samples_of) == ["modest"]


@pytest.mark.parametrize("greedy", [1, 2, 3, 6])
def test_there_is_room_for_one_more_tenant_however_many_are_greedy(greedy: int) -> None:
    admission = opened(requests=60)
    random = Random(greedy)
    for _ in range(1000):
        tenant = f"greedy {random.randrange(greedy)}"
        with suppress(Busy):
            admission.enter(random.randrange(1, 5), random.randrange(1, 4), 2, 0, tenant)
    assert admission.enter(1, 1, 1, 0, "modest").counted


def test_a_house_without_tenants_may_be_filled() -> None:
    admission = opened(requests=12)
    for _ in range(16):
        enter(admission)
    with pytest.raises(Busy, match="16 answers"):
        enter(admission)
