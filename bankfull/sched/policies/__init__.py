"""Every scheduling policy: one file each, found by its line in `scheduling.POLICIES`."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from bankfull.config import SchedConfig
from bankfull.sched.policy import Policy
from bankfull.scheduling import POLICIES


def policy_of(config: SchedConfig) -> Policy:
    """The policy that `config` names, behind the admission gate that it names."""
    file, maker = POLICIES[config.policy].made_by.split(".")
    return cast(Policy, getattr(import_module(f"{__name__}.{file}"), maker)(config))
