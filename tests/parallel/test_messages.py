"""Messages between ranks: what is no message of ours ends the replica, whatever part of it is malformed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bankfull.errors import RankLost
from bankfull.parallel.messages import (
    JobWire,
    MasksMessage,
    PlanMessage,
    masks_message,
    masks_of,
    plan_message,
    step_plan,
)
from bankfull.runtime.rows import Job
from bankfull.sample.params import SamplingParams
from bankfull.types import Enter, StepPlan

JOB = Job(SamplingParams(temperature=0.5, logit_bias={3: 1.5}), 7, frozenset({1, 2}), None, None)


def plan_with(payload: Any) -> StepPlan:
    return StepPlan(0, enter=[Enter(0, 0, (5, 6), 0, 2, 0, 0, payload)])


def over_the_wire(plan: StepPlan) -> PlanMessage:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(PlanMessage(plan)), type=PlanMessage)


def test_a_job_arrives_as_it_was_sent() -> None:
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(plan_message(plan_with(JOB))), type=PlanMessage)
    (entered,) = step_plan(arrived, lambda wanted: None).enter
    assert entered.payload == JOB


@pytest.mark.parametrize(
    "payload",
    [
        None,
        7,
        [],
        {"params": {}},
        {"params": {}, "seed": "seven", "stop_ids": [], "pool": None},
        JobWire({"unknown": 1}, 0, [], None),
        JobWire({"temperature": -1.0}, 0, [], None),
        JobWire({"temperature": "warm"}, 0, [], None),
        JobWire({"logit_bias": [[1, 2, 3]]}, 0, [], None),
        JobWire({"logit_bias": 5}, 0, [], None),
    ],
    ids=str,
)
def test_a_malformed_job_ends_the_replica(payload: Any) -> None:
    with pytest.raises(RankLost, match=r"^rank 0 sent what is no job \(.*\)\.$"):
        step_plan(over_the_wire(plan_with(payload)), lambda wanted: None)


def test_malformed_masks_end_the_replica() -> None:
    assert masks_of(masks_message({2: 5})) == {2: 5}
    for data, shape in ((b"abc", (1,)), (b"abcd", (2,)), (b"abcdefgh", ())):
        with pytest.raises(RankLost, match=r"^rank 0 sent what is no mask \(.*\)\.$"):
            masks_of(MasksMessage({0: (data, shape)}))
