"""Runs a case on an engine over several ranks, which are threads here: rank 0 plans, the others run what it sends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bankfull.errors import BankfullError
from bankfull.parallel.leading import check_devices
from tests.kit import device_of
from tests.tiny import DEVICE
from tests.trial.outcome import Outcome, Refused
from tests.trial.plain import Expected
from tests.trial.rank_threads import ThreadedRanks
from tests.trial.run_engine import Loop, loading, truths_of
from tests.trial.setup import Setup, suits_late


def run(setup: Setup, expected: Sequence[Sequence[Expected]]) -> list[Outcome]:
    if setup.tiers:  # by hand each rank would get tiers of its own; the loader has a sentence for it
        setup.state["kv_host"], setup.tiers = "256KiB", ""
    if setup.late and not suits_late(setup.run["parallel"]):
        raise Refused("The late device runs work when its host waits, but these ranks wait for each other before that.")
    try:
        check_devices(setup.configs()[0].mesh, DEVICE.type)
    except BankfullError as error:
        raise Refused(str(error)) from error
    late, seed = int(setup.late), setup.case.seed
    with pytest.MonkeyPatch.context() as patch, loading(setup, truths_of(setup, expected)) as load:
        others = ThreadedRanks(patch, lambda: device_of(late, seed))
        try:
            made = load()
        except BankfullError as error:
            raise Refused(str(error)) from error
        others.state = made.engine.scheduler.state
        loop = Loop(setup, made.frontend, expected, others.poison)
        with others:
            others.poison()
            loop.run()
    return loop.outcomes
