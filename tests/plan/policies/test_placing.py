"""Jobs on several engines: none is lost, and the router sees what the policy's queues hold."""

from __future__ import annotations

import pytest

from bankfull.config import SchedConfig
from bankfull.fleet.reports import Load
from bankfull.fleet.routing import Candidate, CompletionRouting, completion_ms
from bankfull.plan.policies.jobs import JobTraffic
from bankfull.plan.policies.placing import ROUTINGS, place
from bankfull.plan.policies.simulator import JobEngine, saturation
from bankfull.plan.policies.step_model import StepModel

MODEL, SCHED = StepModel(), SchedConfig(rows=4, step_tokens=512, policy="skip-join-mlfq")


def candidate(*queues: float, online: int = 8, quantum_ms: float = 10.0) -> Candidate:
    load = Load(4, online - 4, 0, 0, 100, 0, 0, 0, 1, 0.0, 0.0, 0.0)
    load.queues, load.quantum_ms = list(queues), quantum_ms
    return Candidate(load, 0, 0.1, 8.0, rows=4, inflight=online, row_ms=400.0)


def test_what_waits_in_later_queues_counts_less_and_a_long_prompt_joins_one_of_them() -> None:
    early, late = candidate(100.0, 0.0, 0.0), candidate(0.0, 0.0, 100.0)
    assert completion_ms(10, early, 50.0) - completion_ms(10, late, 50.0) == pytest.approx(0.75 * 100 / 4)
    # A prefill of 35 ms joins the third queue: what is left there delays it as much as what is left before it.
    assert completion_ms(350, early, 50.0) == pytest.approx(completion_ms(350, late, 50.0))


def test_a_replica_with_free_rows_is_chosen_and_equal_ones_take_turns() -> None:
    policy = CompletionRouting()
    assert policy.choose(10, False, [candidate(50.0, 50.0), candidate(1.0, online=3)]) == 1
    idle = [candidate(0.0, online=1) for _ in range(3)]
    assert {policy.choose(10, False, idle) for _ in range(3)} == {0, 1, 2}


def test_one_replica_equals_an_engine_without_a_router() -> None:
    traffic = JobTraffic(jobs=60, longest=200)
    jobs = traffic.draw(20.0)
    routed, alone = (
        place(jobs, 1, "completion", SCHED, MODEL, traffic),
        JobEngine(SCHED, MODEL, traffic).run(jobs),
    )
    assert [one.last for one in routed.times] == pytest.approx([one.last for one in alone.times])


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["skip-join-mlfq", "fcfs"])
def test_sixteen_replicas_end_every_job_and_completion_is_no_worse_than_chance(policy: str) -> None:
    sched, traffic = SchedConfig(rows=4, step_tokens=512, policy=policy), JobTraffic(jobs=800, longest=500)
    jobs = traffic.draw(0.9 * 16 * saturation(SchedConfig(rows=4, step_tokens=512), MODEL, traffic))
    mean = {}
    for routing in ROUTINGS:
        run = place(jobs, 16, routing, sched, MODEL, traffic)
        assert sorted(run.ends) == list(range(800)) and all(one.done for one in run.times)
        mean[routing] = sum(one.e2e for one in run.times) / len(run.times)
    assert mean["completion"] <= 1.05 * mean["random-two"]
