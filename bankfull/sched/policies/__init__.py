"""Every scheduling policy, by the value of `SchedConfig.policy`. A new policy is one file here and one line below."""

from __future__ import annotations

from collections.abc import Callable

from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.sched.policies.fair import Fair
from bankfull.sched.policies.fcfs import FirstCome, Orca
from bankfull.sched.policies.lpm import LongestPrefix
from bankfull.sched.policies.mlfq import Mlfq, SkipJoinMlfq
from bankfull.sched.policies.priority import Priority
from bankfull.sched.policies.srpt import Srpt
from bankfull.sched.policy import Policy

POLICIES: dict[str, Callable[[SchedConfig], Policy]] = {
    "fcfs": FirstCome,
    "priority": Priority,
    "mlfq": Mlfq,
    "skip-join-mlfq": SkipJoinMlfq,
    "srpt": Srpt,
    "lpm": LongestPrefix,
    "fair": Fair,
    "orca": Orca,
}


def policy_of(config: SchedConfig) -> Policy:
    """The policy that `config` names, behind the admission gate that it names."""
    policy = POLICIES.get(config.policy)
    if policy is None:
        raise ConfigError(f"policy={config.policy!r} is unknown; use one of {', '.join(POLICIES)}.")
    return policy(config)
