"""The device that is late: the promises that tests of the loop rely on."""

from __future__ import annotations

from tests.late import Late


def test_work_runs_in_order_and_is_late_but_done_when_waited_for() -> None:
    ran_before_wait = 0
    for seed in range(50):
        device, done = Late(seed), []
        futures = [device.launch(lambda i=i, done=done: done.append(i) or i) for i in range(6)]  # type: ignore[func-returns-value, misc]
        ran_before_wait += len(done)
        assert done == list(range(len(done)))
        assert futures[3].wait() == 3 and done[:4] == [0, 1, 2, 3]
        assert [f.wait() for f in futures] == list(range(6))
    assert 0 < ran_before_wait < 50 * 6, "it must be neither always late nor always in time"


def test_transfers_are_reported_late_each_once_and_all_in_the_end() -> None:
    late = 0
    for seed in range(50):
        device = Late(seed)
        told = device.completed([1, 2, 3])
        late += 3 - len(told)
        told += device.completed([4])
        told += device.completed([])
        assert sorted(told) == [1, 2, 3, 4]
    assert late > 0
