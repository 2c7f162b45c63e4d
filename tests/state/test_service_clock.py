"""Ages are measured whatever somebody does to the clock of the day."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.state.disk import DiskStore, identity_of
from bankfull.state.service_clock import ServiceClock

YEAR = 365 * 86400.0


class Machine:
    def __init__(self) -> None:
        self.counted, self.day, self.boot = 1000.0, 1.8e9, "first"

    def sleep(self, seconds: float) -> None:
        self.counted += seconds
        self.day += seconds

    def clock(self, kept: dict[str, object] | None = None) -> ServiceClock:
        return ServiceClock(kept or {}, lambda: self.counted, lambda: self.day, self.boot)


@pytest.mark.parametrize("jump", [-40 * YEAR, -3600.0, 3600.0, 40 * YEAR])
def test_a_clock_that_jumps_while_the_machine_runs_ages_nothing(jump: float) -> None:
    machine = Machine()
    clock = machine.clock()
    written = clock.now()
    machine.sleep(100)
    machine.day += jump
    assert clock.now() - written == pytest.approx(100)
    kept = clock.stored()
    machine.day += jump
    machine.sleep(50)
    assert machine.clock(kept).now() - written == pytest.approx(150)


@pytest.mark.parametrize(("slept", "aged"), [(7200.0, 7200.0), (-7200.0, 0.0), (-40 * YEAR, 0.0)])
def test_across_a_reboot_the_clock_of_the_day_counts_but_never_backwards(slept: float, aged: float) -> None:
    machine = Machine()
    clock = machine.clock()
    written, kept = clock.now(), clock.stored()
    machine.counted, machine.day, machine.boot = 5.0, machine.day + slept, "second"
    assert machine.clock(kept).now() - written == pytest.approx(aged)


@pytest.mark.parametrize("kept", [{}, {"at": "x"}, {"at": 1.0}, {"at": 1.0, "counted": None, "day": 3}])
def test_a_damaged_clock_begins_anew(kept: dict[str, object]) -> None:
    machine = Machine()
    assert machine.clock(kept).now() == machine.day


def test_a_clock_that_was_set_neither_drops_nor_keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr("bankfull.state.disk.ServiceClock", machine.clock)

    def opened() -> DiskStore:
        return DiskStore(tmp_path, identity_of({}), {}, {"pages": 4, "slots": 1}, {"pages": 64, "slots": 24})

    store = opened()
    store.files["pages"].write(1, b"old", memoryview(bytes(64)))
    machine.sleep(3000)
    store.files["pages"].write(2, b"young", memoryview(bytes(64)))
    store.close()
    for jump in (10 * YEAR, -20 * YEAR):
        machine.day += jump
        machine.sleep(300)
        store = opened()
        young = store.files["pages"].entries(store.clock.now() - 3000)
        assert [entry.key for entry in young] == [b"young"]
        store.close()
