"""Run the lines of batches through the handlers of online requests, at the lowest priority.

Each open batch has one task: validate the input, run the lines without a result, write the result files. Every step is
stored before the next begins, so a start after a crash is like any other start, and a failed task can be restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.api.errors import openai_error, problem_of
from bankfull.serve.batch.input import MOST_BODY_BYTES, MOST_LINES, Validation, grouped, read_bodies
from bankfull.serve.batch.usage import usage_of
from bankfull.serve.data.batch_store import BatchLine, BatchRecord, BatchStore, LineProblem, LineResult, succeeded
from bankfull.serve.data.store import NoSuchFile, StorageFull
from bankfull.serve.engine.backend import Busy, EngineDied, Unavailable
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.log import log_batch

log = logging.getLogger("bankfull.serve")

BACKLOG = 8
"""Lines in flight beyond the engine's rows, so that a row is refilled as soon as it ends."""
MOST_RESULTS = 32
"""Results stored in one transaction. All lines waiting for it resume in the same iteration of the event loop, which
online requests need too."""
MOST_DEATHS = 3
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 10.0
SWEEP_SECONDS = 3600.0
FINDER, WRITER, SWEEPER, BATCH = "batch finder", "batch results", "expiry of files", "batch"
"""Names of the supervised tasks, as the metrics report them."""


class Handle(Protocol):
    """The handler of online requests: takes a JSON body and returns the status and body of the response. It may
    raise Busy, Unavailable or EngineDied, or return 429 or 503; the line is then retried, because the cause is not
    the line."""

    async def __call__(self, url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]: ...


class BatchRunner:
    def __init__(
        self,
        batch_store: BatchStore,
        handle: Handle,
        *,
        rows: Callable[[], int],
        most_lines: int = MOST_LINES,
        priority: int = BATCH_PRIORITY,
        count: Callable[[str], None] = lambda outcome: None,
        wait: Callable[[str], float] = lambda owner: 0.0,
        most_body_bytes: int = MOST_BODY_BYTES,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`rows` returns how many requests the engine currently runs at once. `count` receives "completed" or "failed"
        for every result. `wait` returns the seconds until the lines of an owner may start."""
        self._count, self._wait, self._most_body_bytes = count, wait, most_body_bytes
        self._batch_store, self._store, self._handle = batch_store, batch_store.store, handle
        self._most_lines, self._priority = most_lines, priority
        self._slots = Slots(lambda: rows() + BACKLOG)
        self._backoff = Backoff()
        self._supervisor = supervisor or Supervisor()
        self._own: list[asyncio.Task[None]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._wakeup = asyncio.Event()
        self._results: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._unwritten = asyncio.Event()
        self._suspects = asyncio.Lock()

    def wake(self, id: str | None = None) -> None:
        """Notify the runner that a batch was created, or that the batch `id` was cancelled."""
        self._wakeup.set()
        if id in self._changed:
            self._changed[id].set()

    def start(self) -> None:
        """Start on the running event loop, until `stop`. The next start resumes unfinished batches."""
        works = {FINDER: self._find, WRITER: self._write_results, SWEEPER: self._sweep}
        self._own = [self._supervisor.keep(name, work) for name, work in works.items()]

    async def stop(self) -> None:
        for tasks in (self._own, list(self._tasks.values())):  # first the task that starts batches
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self) -> None:
        while True:
            self._wakeup.clear()
            for batch in await self._store.run(self._batch_store.open_batches):
                if batch.id not in self._tasks:
                    self._begin(batch)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wakeup.wait(), SWEEP_SECONDS)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._store.run(self._store.remove_expired)
            except StorageFull as error:  # the next sweep retries
                log.error("cannot remove expired files: %s", error)
            await self._store.run(self._store.copy_database)
            await asyncio.sleep(SWEEP_SECONDS)

    def _begin(self, batch: BatchRecord) -> None:
        self._changed[batch.id] = asyncio.Event()
        task = self._supervisor.keep(BATCH, lambda: self._run_batch(batch), ends=True, about=batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, id: str) -> None:
        del self._tasks[id], self._changed[id]

    async def _run_batch(self, batch: BatchRecord) -> None:
        """Run one batch to its end. Any failure can be retried without losing data. A full disk only delays the batch
        and is not a failure of the service."""
        seconds = FIRST_BACKOFF
        while True:
            try:
                await self._advance(await self._store.run(self._batch_store.refresh, batch))
                break
            except StorageFull as error:
                log.error("batch %s: retrying in %g s: %s", batch.id, seconds, error)
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, LONGEST_BACKOFF)
        log_batch(await self._store.run(self._batch_store.refresh, batch), self._store.clock() - batch.created_at)

    async def _advance(self, batch: BatchRecord) -> None:
        if batch.status == "validating":
            await self._run_uninterrupted(self._validate, batch)
            batch = await self._store.run(self._batch_store.refresh, batch)
        if batch.status == "in_progress":
            complete = await self._run_within_window(batch)
            await self._store.run(self._batch_store.finalize, batch, "completed" if complete else "expired")
            batch = await self._store.run(self._batch_store.refresh, batch)
        if batch.status in ("finalizing", "cancelling"):
            await self._run_uninterrupted(self._batch_store.conclude, batch)

    async def _run_uninterrupted(self, function: Callable[[BatchRecord], object], batch: BatchRecord) -> None:
        """Run `function` on a thread of the store. If the caller is cancelled, wait for the function first: a retry may
        start at once and must not run beside it."""
        work = asyncio.ensure_future(self._store.run(function, batch))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    def _validate(self, batch: BatchRecord) -> None:
        self._batch_store.clear_lines(batch)
        try:
            path = self._store.path_of(self._store.file(batch.owner, batch.input_file).id)
        except NoSuchFile:
            gone = LineProblem("file_not_found", "The input file no longer exists.", param="input_file_id")
            self._batch_store.fail(batch, [gone])
            return
        validation = Validation(path, batch.endpoint, self._most_lines, self._most_body_bytes)
        try:
            for group in validation.groups():
                self._batch_store.add_lines(batch, group)
        except FileNotFoundError:
            lost = LineProblem(
                "file_not_found",
                "The contents of the input file are missing on the server; upload it again.",
                param="input_file_id",
            )
            self._batch_store.fail(batch, [lost])
            return
        if validation.problems:
            self._batch_store.fail(batch, validation.problems)
        else:
            self._batch_store.start(batch)

    async def _run_within_window(self, batch: BatchRecord) -> bool:
        """False if the window closed, or the batch was cancelled, before all lines had a result."""
        work = asyncio.create_task(self._run_lines(batch))
        changed = asyncio.create_task(self._changed[batch.id].wait())
        try:
            await asyncio.wait(
                {work, changed},
                timeout=max(0.0, batch.expires_at - self._store.clock()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                await work
                return True
            return False
        finally:
            for task in (work, changed):
                task.cancel()
            await asyncio.gather(work, changed, return_exceptions=True)

    async def _run_lines(self, batch: BatchRecord) -> None:
        after = -1
        async with asyncio.TaskGroup() as running:
            while lines := await self._store.run(self._batch_store.pending, batch, after):
                for group in grouped(lines):
                    bodies: list[bytes] = []
                    for line in group:
                        await self._wait_for_quota(batch.owner)
                        # All batches queue here for one slot at a time, which makes them fair.
                        await self._slots.take()
                        bodies = bodies or await self._bodies(batch, group)
                        task = running.create_task(self._run_line(batch, line, bodies.pop()))
                        task.add_done_callback(self._slots.give_back)
                after = lines[-1].line

    async def _wait_for_quota(self, owner: str) -> None:
        """Wait for the owner's rate limit without holding a slot, so that other batches proceed. Limits may change in
        the meantime, so each sleep is short."""
        while (seconds := self._wait(owner)) > 0:
            await asyncio.sleep(min(seconds, LONGEST_BACKOFF))

    async def _bodies(self, batch: BatchRecord, lines: list[BatchLine]) -> list[bytes]:
        """The bodies in reverse order, so that `pop` returns the first. The caller holds a slot: lines waiting for a
        slot stay in the file, not in memory."""
        try:
            bodies: list[bytes] = await self._store.run(read_bodies, self._store.path_of(batch.input_file), lines)
        except BaseException:
            self._slots.give_back()
            raise
        return bodies[::-1]

    async def _run_line(self, batch: BatchRecord, line: BatchLine, body: bytes) -> None:
        status, answer = await self._answer(batch, body)
        await self._store_result(LineResult(batch.sequence, line.line, status, answer, usage_of(answer)))
        self._count("completed" if succeeded(status) else "failed")

    async def _answer(self, batch: BatchRecord, body: bytes) -> tuple[int, bytes]:
        deaths = 0
        while True:
            await self._backoff.wait()
            try:
                if deaths:
                    # After an engine crash its lines run one at a time, so that the line that caused it takes no others
                    # with it.
                    async with self._suspects:
                        status, answer = await self._call(batch, body)
                else:
                    status, answer = await self._call(batch, body)
            except Busy as error:
                self._backoff.begin(error.retry_after)
            except Unavailable:
                self._backoff.begin()
            except EngineDied:
                deaths += 1
                if deaths == MOST_DEATHS:
                    problem = problem_of(EngineDied(f"The engine crashed {deaths} times while it ran this request."))
                    return problem.status, openai_error(problem)
                self._backoff.begin()
            else:
                self._backoff.reset()
                return status, answer

    async def _call(self, batch: BatchRecord, body: bytes) -> tuple[int, bytes]:
        """The status and body of the response, as JSON on one line."""
        try:
            status, answer = await self._handle(batch.endpoint, body, priority=self._priority, key=batch.owner)
            answer = msgspec.json.format(answer, indent=-1)
        except (Busy, Unavailable, EngineDied):
            raise
        except Exception as error:
            problem = problem_of(error)
            return problem.status, openai_error(problem)
        if status == 429:
            raise Busy("The server is busy.", FIRST_BACKOFF)
        if status == 503:
            raise Unavailable("The engine is unavailable.")
        if status == 500 and _code(answer) == "engine_died":
            raise EngineDied("The engine crashed.")
        return status, answer

    async def _store_result(self, result: LineResult) -> None:
        """Return once the result is stored."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._results.append((result, done))
        self._unwritten.set()
        await done

    async def _write_results(self) -> None:
        """Store results; those that arrive during a transaction share the next one. After a failure they stay queued,
        so no line runs twice."""
        seconds = FIRST_BACKOFF
        while True:
            await self._unwritten.wait()
            group, self._results = self._results[:MOST_RESULTS], self._results[MOST_RESULTS:]
            if not self._results:
                self._unwritten.clear()
            try:
                await self._store.run(self._batch_store.record, [result for result, _ in group])
            except BaseException as error:
                self._results = group + self._results  # a result that was stored after all is not stored again
                self._unwritten.set()
                if not isinstance(error, StorageFull):
                    raise
                log.error("cannot store results; retrying in %g s: %s", seconds, error)
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, LONGEST_BACKOFF)
                continue
            seconds = FIRST_BACKOFF
            for _, done in group:
                if not done.done():
                    done.set_result(None)


class Slots:
    """A FIFO semaphore whose limit may change at any time. It grants at most one slot per iteration of the event loop,
    because starting a line takes time and online requests must get their turn in between."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit, self._taken = limit, 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._giving = False

    async def take(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._give_soon()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self, _task: object = None) -> None:
        self._taken -= 1
        self._give_soon()

    def _give_soon(self) -> None:
        if self._waiting and not self._giving and self._taken < self._limit():
            self._giving = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._giving = False
        while self._waiting and self._taken < self._limit():
            turn = self._waiting.popleft()
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
                break
        self._give_soon()


class Backoff:
    """An exponential back-off shared by all lines: one refusal delays every line."""

    def __init__(self) -> None:
        self._until, self._seconds = 0.0, FIRST_BACKOFF

    def begin(self, wanted: float = 0.0) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._until = now + min(max(wanted, self._seconds), LONGEST_BACKOFF)
            self._seconds = min(2 * self._seconds, LONGEST_BACKOFF)

    def reset(self) -> None:
        self._seconds = FIRST_BACKOFF

    async def wait(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(left)


def _code(answer: bytes) -> Any:
    try:
        return msgspec.json.decode(answer)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
