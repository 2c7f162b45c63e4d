"""Scheduling policies and ways of batching as data: what each is called, means, reads, needs and is made by.

The configuration, the command line's help and the refusals of options read these tables, so nothing here imports a
policy. A new policy is a file in `sched.policies` and a line here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bankfull.declared import Declared, Trait

FCFS, CONTINUOUS = "fcfs", "continuous"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingWay(Declared):
    made_by: str = ""
    """FILE.CLASS in `sched.policies`, for a policy."""
    reads: tuple[str, ...] = ()
    """Options of `SchedConfig` that only some ways read."""


_ORDER = {
    Trait.ARRIVAL_ORDER: "{asked} runs whole batches in the order of arrival, which policy={policy!r} would change; "
    "use policy='fcfs' or batching='continuous'."
}
_QUEUES = ("quantum_ms", "starvation")

POLICIES: dict[str, SchedulingWay] = {
    FCFS: SchedulingWay("order of arrival", made_by="fcfs.FirstCome"),
    "priority": SchedulingWay(
        "priority number, with equal shares of rows, pages and tokens for API keys", made_by="priority.Priority"
    ),
    "mlfq": SchedulingWay(
        "queues with doubling quanta, every job starts in the first", made_by="mlfq.Mlfq", reads=_QUEUES
    ),
    "skip-join-mlfq": SchedulingWay(
        "the same, a job starts in the first queue whose quantum covers its predicted prefill",
        made_by="mlfq.SkipJoinMlfq",
        reads=_QUEUES,
    ),
    "srpt": SchedulingWay("fewest remaining tokens, taken from max_tokens", made_by="srpt.Srpt"),
    "lpm": SchedulingWay("longest cached prefix", made_by="lpm.LongestPrefix", reads=("starvation",)),
    "fair": SchedulingWay(
        "least service of the API key so far, over its weight", made_by="fair.Fair", reads=("weights",)
    ),
    "orca": SchedulingWay("order of arrival, with memory reserved for the largest length", made_by="fcfs.Orca"),
}
"""By the value of `SchedConfig.policy`."""

BATCHING: dict[str, SchedulingWay] = {
    CONTINUOUS: SchedulingWay("a request joins at any step"),
    "static": SchedulingWay(
        "batches of batch_size requests start and end together; needs fcfs",
        _ORDER,
        reads=("batch_size",),
    ),
    "dynamic": SchedulingWay(
        "static, but an incomplete batch starts after batch_timeout; needs fcfs",
        _ORDER,
        reads=("batch_size", "batch_timeout"),
    ),
}
"""Admission gates, by the value of `SchedConfig.batching`."""

BY_OPTION: Mapping[str, Mapping[str, SchedulingWay]] = {"policy": POLICIES, "batching": BATCHING}


def readers() -> Iterator[tuple[str, str, list[str]]]:
    """Each option that only some ways read, the option that chooses between ways, and those that read it."""
    for owner, table in BY_OPTION.items():
        for option in dict.fromkeys(option for way in table.values() for option in way.reads):
            yield option, owner, [name for name, way in table.items() if option in way.reads]
