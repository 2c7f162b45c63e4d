"""Jobs on several simulated engines behind the server's own routing policies."""

from __future__ import annotations

from collections.abc import Sequence

from bankfull.config import SchedConfig
from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.routing import routing_policy
from bankfull.plan.fake_runner import Clock
from bankfull.plan.fleet_front import facts_of, load_of
from bankfull.plan.policies.jobs import JobTraffic, TrafficJob
from bankfull.plan.policies.simulator import Advance, JobEngine, JobRun
from bankfull.plan.policies.step_model import StepModel
from bankfull.plan.simulate import RequestTimes

ROUTINGS = ("completion", "least-loaded", "random-two")
"""Routing policies that are compared."""


def place(
    jobs: Sequence[TrafficJob],
    replicas: int,
    routing: str,
    sched: SchedConfig,
    model: StepModel,
    traffic: JobTraffic,
    seed: int = 0,
    advance: Advance = lambda done, note: None,
) -> JobRun:
    """Run the jobs to their ends. The front knows what each engine has reported after its last step."""
    clock, policy = Clock(), routing_policy(routing, seed)
    fleet = [JobEngine(sched, model, traffic) for _ in range(replicas)]
    meters = [ReplicaMeter(clock) for _ in fleet]
    for engine, meter in zip(fleet, meters, strict=True):
        engine.scheduler.pace.measured = True
        state = engine.scheduler.state
        meter.started(facts_of(state.layout, sched.rows, state.pages.size, sched.step_tokens))
    times = [RequestTimes(job.time, job.prompt, job.output) for job in jobs]
    told, answered = [0] * replicas, [set[int]() for _ in fleet]
    for number, job in enumerate(jobs):
        clock.now = job.time
        for index, (engine, meter) in enumerate(zip(fleet, meters, strict=True)):
            engine.run_until(job.time)
            for sent in [one for one in answered[index] if times[one].first is not None]:
                meter.answered(sent)
                answered[index].discard(sent)
            for ended in engine.ends[told[index] :]:
                meter.ended(ended)
            told[index] = len(engine.ends)
            meter.report(load_of(engine.engine, 0))
        chosen = policy.choose(job.prompt, False, [meter.candidate() for meter in meters])
        meters[chosen].sent(job.number, job.prompt)
        answered[chosen].add(job.number)
        fleet[chosen].expect([job], times)
        if number % 500 == 0:
            advance(number, routing)
    run = JobRun(times, 0.0, 0, 0, 0)
    for engine in fleet:
        engine.run_until(float("inf"))
        run.seconds = max(run.seconds, engine.clock.now - jobs[0].time)
        run.preemptions += engine.scheduler.preemptions
        run.ends += engine.ends
    return run
