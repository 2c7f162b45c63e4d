"""Worker threads for work that would block a loop: tokenizing, rendering, compiling grammars. The next slice of work
is chosen anew after every slice:

- batch work waits until no online work is queued;
- among keys, the one with the least work done comes first;
- of one key, the shortest job comes first, and one thread takes only short jobs;
- a job whose client has left is dropped.

The queue is bounded per key and in total.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bankfull.serve.engine.backend import Busy

SHORT = 1 << 14
"""Size up to which a job is short: one of the threads takes only short ones."""
MOST_JOBS, MOST_JOBS_PER_KEY = 512, 256
"""Jobs in one desk, in total and per key; a desk may be made for fewer per key."""


@dataclass(slots=True, eq=False)
class DeskJob:
    """Work for a key. `size` is its expected cost, in characters or tokens."""

    owner: str
    size: int
    batch: bool
    work: Callable[[], Any]
    """A generator that it returns is run slice by slice: it yields the size of each, and returns the result."""
    tell: Callable[[Any, BaseException | None], None]
    """Called with the result or the error, on a thread; not called for a dropped job."""
    left: int = 0
    slices: Generator[int, None, Any] | None = None
    dropped: bool = False

    def __post_init__(self) -> None:
        self.left = self.size

    def go_on(self) -> tuple[bool, int, Any]:
        """One slice: whether that was the last, its size, and the result."""
        if self.slices is None:
            result = self.work()
            if not isinstance(result, Generator):
                return True, self.left, result
            self.slices = result
        try:
            return False, next(self.slices), None
        except StopIteration as end:
            return True, self.left, end.value


@dataclass(slots=True)
class KeyQueue:
    """The queue of one key, the shortest job first."""

    served: float
    """Size of the work done for the key, on the desk's virtual clock."""
    jobs: list[tuple[int, int, DeskJob]] = field(default_factory=list)


class Desk:
    def __init__(
        self,
        name: str,
        *,
        what: str,
        most_size: int,
        most_size_per_key: int,
        most_jobs_per_key: int = MOST_JOBS_PER_KEY,
        threads: int = 2,
    ) -> None:
        """`what`: the kind of work, for messages."""
        self._most_jobs_per_key = most_jobs_per_key
        self._name, self._count, self._what = name, threads, what
        self._most, self._most_per_key = most_size, most_size_per_key
        self._lines: dict[tuple[bool, str], KeyQueue] = {}
        self._held: dict[str, tuple[int, int]] = {}
        """Jobs and their total size for each key, running or queued."""
        self._changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._numbers = count()
        self._clock = 0.0
        self._closed = False
        self.begun = 0
        """Slices so far."""

    def put(self, job: DeskJob) -> None:
        """Queue a job, from any thread. Raises Busy when the queue is full."""
        with self._changed:
            self._refuse(job)
            jobs, size = self._held.get(job.owner, (0, 0))
            self._held[job.owner] = jobs + 1, size + job.size
            self._queue(job)
            self._start()
            self._changed.notify_all()

    def drop(self, job: DeskJob) -> None:
        """Forget a job whose client has left. From any thread, also when the job has ended."""
        with self._changed:
            if not job.dropped:
                job.dropped = True
                line = self._lines.get((job.batch, job.owner))
                if line is not None and any(other is job for _, _, other in line.jobs):
                    line.jobs = [entry for entry in line.jobs if entry[2] is not job]
                    heapq.heapify(line.jobs)
                    self._leave(job)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Jobs in the desk, running or queued."""
        with self._changed:
            return sum(jobs for jobs, _ in self._held.values())

    def _refuse(self, job: DeskJob) -> None:
        """A key without any job here is always admitted: the size of a single job has limits of its own."""
        jobs, size = self._held.get(job.owner, (0, 0))
        if jobs >= self._most_jobs_per_key or (jobs and size + job.size > self._most_per_key):
            raise Busy(f"{jobs} {self._what} of this key wait already; try again later.", 1.0)
        all_jobs, all_sizes = (sum(column) for column in zip((0, 0), *self._held.values(), strict=True))
        if all_jobs >= MOST_JOBS or (all_jobs and all_sizes + job.size > self._most):
            raise Busy(f"{all_jobs} {self._what} wait already; try again later.", 1.0)

    def _start(self) -> None:
        """The threads start with the first job; a thread that has died is replaced with the next one."""
        for number in range(self._count):
            if number not in self._threads or not self._threads[number].is_alive():
                thread = threading.Thread(
                    target=self._serve, args=(number > 0,), name=f"{self._name}-{number}", daemon=True
                )
                self._threads[number] = thread
                thread.start()

    def _queue(self, job: DeskJob) -> None:
        line = self._lines.setdefault((job.batch, job.owner), KeyQueue(self._clock))
        if not line.jobs:
            line.served = max(line.served, self._clock)  # an idle key does not save up credit
        heapq.heappush(line.jobs, (job.left, next(self._numbers), job))

    def _leave(self, job: DeskJob) -> None:
        jobs, size = self._held[job.owner]
        if jobs == 1:
            del self._held[job.owner]
            for batch in (False, True):
                self._lines.pop((batch, job.owner), None)
        else:
            self._held[job.owner] = jobs - 1, size - job.size

    # -- on a thread

    def _serve(self, short: bool) -> None:
        while (job := self._next(short)) is not None:
            error: BaseException | None = None
            done, size, result = True, job.left, None
            try:
                done, size, result = job.go_on()
            except BaseException as problem:
                error = problem
            with self._changed:
                self.begun += 1
                line = self._lines.get((job.batch, job.owner))
                if line is not None:
                    line.served += max(1, size)
                if not done and not job.dropped:
                    job.left = max(1, job.left - size)
                    self._queue(job)
                    self._changed.notify_all()
                    continue
                self._leave(job)
            if not job.dropped:
                job.tell(result, error)
            del job, result, error  # a waiting thread keeps no result alive

    def _next(self, short: bool) -> DeskJob | None:
        """The next job; blocks until there is one. None when the desk is closed. `short`: only short jobs."""
        with self._changed:
            while not self._closed:
                chosen = min(
                    (
                        (batch, line.served, owner)
                        for (batch, owner), line in self._lines.items()
                        if line.jobs and (not short or line.jobs[0][0] <= SHORT)
                    ),
                    default=None,
                )
                if chosen is not None:
                    batch, served, owner = chosen
                    self._clock = max(self._clock, served)
                    return heapq.heappop(self._lines[batch, owner].jobs)[2]
                self._changed.wait()
            return None
