from __future__ import annotations

import pytest

from bankfull.errors import ConfigError, RequestError
from bankfull.types import Request
from tests.sched.driver import MEMORY, drain, request, scheduler


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    sched = scheduler(frames=3)
    with pytest.raises(RequestError, match=r"13 tokens.* need 4 pages.*pool has 3"):
        sched.add(request(0, length=5, more=8))
    assert not sched.unfinished


def test_a_request_that_just_fits_runs_alone_in_the_whole_pool() -> None:
    sched = scheduler(frames=3)
    sched.add(request(0, length=5, more=7))
    assert drain(sched)[0, 0].finish == "length"


def test_a_prompt_without_room_for_one_token_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match=r"prompt has 5 tokens and the limit is 5"):
        scheduler().add(request(0, length=5, more=0))


def test_scoring_needs_room_for_the_prompt_only() -> None:
    sched = scheduler(frames=2)
    sched.add(request(0, length=8, more=0, generates=False))
    with pytest.raises(RequestError, match=r"9 tokens.* need 3 pages.*pool has 2"):
        sched.add(request(1, length=9, more=-9, generates=False))
    assert drain(sched)[0, 0].finish == "stop"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt is empty"):
        scheduler().add(Request(0, (), 5))


@pytest.mark.parametrize("samples", [0, -1])
def test_a_request_for_no_samples_is_refused_and_not_forgotten(samples: int) -> None:
    with pytest.raises(RequestError, match=f"samples={samples}"):
        scheduler().add(request(0, samples=samples))


def test_an_id_is_refused_while_it_is_in_use_and_free_again_after_the_end() -> None:
    sched = scheduler()
    sched.add(request(0))
    with pytest.raises(RequestError, match="id 0 is already in use"):
        sched.add(request(0))
    drain(sched)
    sched.add(request(0))


def test_the_queue_is_bounded_and_counts_every_sample() -> None:
    sched = scheduler(max_waiting=3)
    sched.add(request(0, samples=2))
    with pytest.raises(RequestError, match=r"2 sequences are waiting and 2 more.*max_waiting=3"):
        sched.add(request(1, samples=2))
    sched.add(request(2))


def test_a_recurrent_model_needs_two_slots() -> None:
    with pytest.raises(ConfigError, match="pool has 1"):
        scheduler([MEMORY], slots=1)
    sched = scheduler([MEMORY], slots=2)
    sched.add(request(0))
    sched.add(request(1))
    assert len(drain(sched)) == 2
