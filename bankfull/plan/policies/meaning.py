"""Which figures of a comparison mean nothing: of policies that the load is too high for, and of equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bankfull.config import SchedConfig
from bankfull.plan.policies.compare import PolicyFigures
from bankfull.plan.policies.jobs import JobTraffic
from bankfull.plan.policies.simulator import saturation, state_of
from bankfull.plan.policies.step_model import StepModel


def mark_overloaded(
    found: Sequence[PolicyFigures],
    compared: Mapping[str, SchedConfig],
    model: StepModel,
    traffic: JobTraffic,
    rate: float,
    load: float,
) -> tuple[list[PolicyFigures], list[str]]:
    """The figures, marked where the policy cannot serve `rate` jobs per second, and a sentence for each of these. With
    continuous batching every policy serves as many as fcfs, of whose saturation `load` is a fraction."""
    marked, notes = [], []
    for one in found:
        sched = compared[one.policy]
        served = rate / load if sched.batching == "continuous" else min(rate / load, saturation(sched, model, traffic))
        marked.append(replace(one, overloaded=rate >= served))
        if rate >= served:
            notes.append(
                f"{one.policy} is overloaded: it serves {served:.3g} of the {rate:.3g} jobs per second, and its queue "
                f"grows without bound; --load {0.9 * served / rate * load:.2g} bounds it."
            )
    return marked, notes


def equal_policies(
    found: Sequence[PolicyFigures], compared: Mapping[str, SchedConfig], traffic: JobTraffic, memory_tokens: int
) -> list[str]:
    """A sentence if Orca's reservation cannot make a job wait. `memory_tokens`: as for the simulated engine."""
    if not {"fcfs", "orca"} <= {one.policy for one in found}:
        return []
    sched = compared["orca"]
    state = state_of(sched, traffic, memory_tokens)
    needed = sched.rows * state.frames_for(traffic.most_tokens, sched.step_tokens)
    if state.pages.size < needed:
        return []
    return [
        "orca equals fcfs here: it only reserves memory for the largest lengths, which the memory holds for all rows; "
        f"--memory-tokens {needed * state.layout.block_tokens // 4} shows the difference."
    ]
