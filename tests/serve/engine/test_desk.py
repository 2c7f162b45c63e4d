"""Whose work comes next, what is dropped, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bankfull.serve.desk import SHORT, Desk, DeskJob
from bankfull.serve.engine.backend import Busy

LONG = SHORT + 1


class Diary:
    """A desk with one thread that is held until all work is there, and the order in which it is then done."""

    def __init__(self, **limits: int) -> None:
        given = {"most_size": 10**9, "most_size_per_key": 10**9, "threads": 1, **limits}
        self.desk = Desk("test", what="works", **given)
        self.done: list[str] = []
        self._go = threading.Event()
        self._ended = threading.Condition()
        self._open = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        begun = threading.Event()
        self.put("", 1, work=lambda: (begun.set(), self._go.wait(30)))
        assert begun.wait(30)
        self.done.clear()
        yield
        self._go.set()
        with self._ended:
            assert self._ended.wait_for(lambda: not self._open, 30)
        self.desk.close()

    def put(
        self, owner: str, size: int, batch: bool = False, name: str = "", work: Callable[[], Any] | None = None
    ) -> DeskJob:
        def noted() -> None:
            self.done.append(name or f"{owner}{size}")

        def tell(made: Any, error: BaseException | None) -> None:
            with self._ended:
                self._open -= 1
                self._ended.notify_all()

        job = DeskJob(owner, size, batch, work or noted, tell)
        self.desk.put(job)
        self._open += 1
        return job

    def drop(self, job: DeskJob) -> None:
        self.desk.drop(job)
        self._open -= 1


def test_the_shortest_comes_first_and_batch_work_last() -> None:
    diary = Diary()
    with diary.held():
        for size, batch in ((500, False), (3, True), (20, False), (1, True), (100, False)):
            diary.put("", size, batch, name=f"{'batch' if batch else 'online'} {size}")
    assert diary.done == ["online 20", "online 100", "online 500", "batch 1", "batch 3"]


def test_no_key_waits_for_all_that_another_one_sent() -> None:
    diary = Diary()
    with diary.held():
        for number in range(20):
            diary.put("many", 100, name=f"many {number}")
        diary.put("one", 1000, name="one")
    assert diary.done.index("one") <= 1, "what this key has had before is nothing; the other's 20 come after"


def test_long_work_is_done_in_slices_and_short_work_comes_between() -> None:
    diary = Diary()

    def slices() -> Generator[int, None, None]:
        for number in range(3):
            diary.done.append(f"slice {number}")
            if number == 0:
                diary.put("", 5, name="short")
            yield 100

    with diary.held():
        diary.put("", 300, work=slices)
    assert diary.done == ["slice 0", "short", "slice 1", "slice 2"]


def test_one_thread_keeps_itself_free_for_short_work() -> None:
    diary = Diary(threads=2)
    hold, short_done = threading.Event(), threading.Event()
    for _ in range(4):
        diary.put("", LONG, work=lambda: hold.wait(30))
    diary.put("", 5, work=short_done.set)
    assert short_done.wait(30), "every thread was taken by long work"
    hold.set()


def test_what_was_dropped_is_not_done_and_makes_room() -> None:
    diary = Diary(most_jobs_per_key=3)
    with diary.held():
        jobs = [diary.put("a", size) for size in (10, 20, 30)]
        with pytest.raises(Busy, match="3 works of this key wait already"):
            diary.put("a", 1)
        diary.drop(jobs[0])
        diary.put("a", 40)
        diary.desk.drop(jobs[0])  # once more
        assert diary.desk.waiting == 4, "three of this key, and the one that is being done"
    assert diary.done == ["a20", "a30", "a40"]
    assert diary.desk.waiting == 0


def test_sizes_are_bounded_by_key_and_in_all() -> None:
    diary = Diary(most_size=100, most_size_per_key=60)
    with diary.held():
        diary.put("a", 40)
        with pytest.raises(Busy, match="of this key"):
            diary.put("a", 21)
        diary.put("b", 50)
        with pytest.raises(Busy, match="wait already"):
            diary.put("c", 20)
        diary.put("c", 5)
    assert sorted(diary.done) == ["a40", "b50", "c5"]


def test_errors_are_told_and_the_thread_goes_on() -> None:
    desk = Desk("test", what="works", most_size=100, most_size_per_key=100, threads=1)
    told: list[Any] = []
    ended = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    desk.put(DeskJob("", 1, False, fail, lambda made, error: told.append(error)))
    desk.put(DeskJob("", 2, False, lambda: 7, lambda made, error: (told.append(made), ended.set())))
    assert ended.wait(30)
    assert isinstance(told[0], ValueError) and told[1] == 7
    desk.close()


def test_a_thread_that_ends_is_replaced_with_the_next_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda problem: None)
    desk = Desk("test", what="works", most_size=100, most_size_per_key=100, threads=1)
    choose = desk._next

    def fail(short: bool) -> DeskJob | None:
        monkeypatch.setattr(desk, "_next", choose)
        raise RuntimeError("a defect")

    monkeypatch.setattr(desk, "_next", fail)
    desk._start()
    desk._threads[0].join(30)
    assert not desk._threads[0].is_alive()
    ended = threading.Event()
    desk.put(DeskJob("", 1, False, lambda: None, lambda made, error: ended.set()))
    assert ended.wait(30)
    desk.close()
