"""Runs the lines of batches through the same handlers as online requests, at the lowest priority.

One task per open batch: validate, run what has no result yet, make the files. All of it is in the store before the
next thing begins, so a start after a crash is the same as any other start, and a task that fails may begin again.
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
from bankfull.serve.batch.input import MOST_BODY_BYTES, MOST_LINES, Validation, read_bodies, read_together
from bankfull.serve.batch.usage import spent_in
from bankfull.serve.data.ledger import Batch, Ledger, Line, LineProblem, Result, succeeded
from bankfull.serve.data.store import Full, NoSuchFile
from bankfull.serve.engine.backend import Busy, EngineDied, Unavailable
from bankfull.serve.supervise import Supervisor
from bankfull.serve.telemetry.log import log_batch

log = logging.getLogger("bankfull.serve")

BACKLOG = 8
"""Lines in flight beyond the engine's rows, so that a row that ends is filled at once."""
MOST_RESULTS = 32
"""In one transaction: those who wait for it go on in the same turn of the event loop, which others need too."""
MOST_DEATHS = 3
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 10.0
SWEEP_SECONDS = 3600.0
FINDER, WRITER, SWEEPER, CARRIER = "batch finder", "batch results", "expiry of files", "batch"
"""Names of its tasks."""


class Handle(Protocol):
    """What answers an online request: its body in JSON, and the status and body of the answer. May raise Busy,
    Unavailable or EngineDied, or answer 429 or 503: that is not the line's fault, which is tried again."""

    async def __call__(self, url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]: ...


class BatchRunner:
    def __init__(
        self,
        ledger: Ledger,
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
        """`rows`: how many requests the engine runs at once, as far as it is known now. `count` is told of every result
        whether its line has "completed" or "failed". `wait`: seconds until lines of this owner may begin."""
        self._count, self._wait, self._most_body_bytes = count, wait, most_body_bytes
        self._ledger, self._store, self._handle = ledger, ledger.store, handle
        self._most_lines, self._priority = most_lines, priority
        self._slots = Slots(lambda: rows() + BACKLOG)
        self._pause = Pause()
        self._supervisor = supervisor or Supervisor()
        self._own: list[asyncio.Task[None]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._news = asyncio.Event()
        self._results: list[tuple[Result, asyncio.Future[None]]] = []
        self._unwritten = asyncio.Event()
        self._one_suspect = asyncio.Lock()

    def wake(self, id: str | None = None) -> None:
        """A batch was created, or the one with this id was cancelled."""
        self._news.set()
        if id in self._changed:
            self._changed[id].set()

    def start(self) -> None:
        """On a running event loop; until `stop`. What was running then goes on at the next start."""
        works = {FINDER: self._find, WRITER: self._write_results, SWEEPER: self._sweep}
        self._own = [self._supervisor.keep(name, work) for name, work in works.items()]

    async def stop(self) -> None:
        for tasks in (self._own, list(self._tasks.values())):  # who begins batches ends first
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self) -> None:
        while True:
            self._news.clear()
            for batch in await self._store.run(self._ledger.open_batches):
                if batch.id not in self._tasks:
                    self._begin(batch)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), SWEEP_SECONDS)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._store.run(self._store.remove_expired)
            except Full as error:  # the next sweep finds the same
                log.error("expired files stay: %s", error)
            await asyncio.sleep(SWEEP_SECONDS)

    def _begin(self, batch: Batch) -> None:
        self._changed[batch.id] = asyncio.Event()
        task = self._supervisor.keep(CARRIER, lambda: self._carry(batch), ends=True, about=batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, id: str) -> None:
        del self._tasks[id], self._changed[id]

    async def _carry(self, batch: Batch) -> None:
        """One batch to its end. Whatever fails on the way, nothing is lost by trying again. A full disk is waited for;
        it is no failure of the service."""
        seconds = SHORTEST_PAUSE
        while True:
            try:
                await self._advance(await self._store.run(self._ledger.again, batch))
                break
            except Full as error:
                log.error("batch %s waits %g s: %s", batch.id, seconds, error)
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, LONGEST_PAUSE)
        log_batch(await self._store.run(self._ledger.again, batch), self._store.clock() - batch.created_at)

    async def _advance(self, batch: Batch) -> None:
        if batch.status == "validating":
            await self._undivided(self._validate, batch)
            batch = await self._store.run(self._ledger.again, batch)
        if batch.status == "in_progress":
            complete = await self._run_within_window(batch)
            await self._store.run(self._ledger.finalize, batch, "completed" if complete else "expired")
            batch = await self._store.run(self._ledger.again, batch)
        if batch.status in ("finalizing", "cancelling"):
            await self._undivided(self._ledger.conclude, batch)

    async def _undivided(self, function: Callable[[Batch], object], batch: Batch) -> None:
        """On a thread of the store; who is cancelled meanwhile waits for its end: a second attempt, which may begin at
        once, must not meet the first."""
        work = asyncio.ensure_future(self._store.run(function, batch))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    def _validate(self, batch: Batch) -> None:
        self._ledger.clear(batch)
        try:
            path = self._store.place(self._store.file(batch.owner, batch.input_file).id)
        except NoSuchFile:
            gone = LineProblem("file_not_found", "The input file does not exist any more.", param="input_file_id")
            self._ledger.fail(batch, [gone])
            return
        validation = Validation(path, batch.endpoint, self._most_lines, self._most_body_bytes)
        try:
            for group in validation.groups():
                self._ledger.add(batch, group)
        except FileNotFoundError:
            lost = LineProblem("file_not_found", "The contents of the input file are lost.", param="input_file_id")
            self._ledger.fail(batch, [lost])
            return
        if validation.problems:
            self._ledger.fail(batch, validation.problems)
        else:
            self._ledger.start(batch)

    async def _run_within_window(self, batch: Batch) -> bool:
        """False where time was over, or the batch was cancelled, before all lines had a result."""
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

    async def _run_lines(self, batch: Batch) -> None:
        after = -1
        async with asyncio.TaskGroup() as running:
            while lines := await self._store.run(self._ledger.pending, batch, after):
                for group in read_together(lines):
                    bodies: list[bytes] = []
                    for line in group:
                        await self._allowed(batch.owner)
                        # The feeders of all batches queue here for one slot each: that makes them fair.
                        await self._slots.take()
                        bodies = bodies or await self._bodies(batch, group)
                        task = running.create_task(self._run_line(batch, line, bodies.pop()))
                        task.add_done_callback(self._slots.give_back)
                after = lines[-1].line

    async def _allowed(self, owner: str) -> None:
        """Without a slot: others go on. The limits may be changed meanwhile, so no sleep is long."""
        while (seconds := self._wait(owner)) > 0:
            await asyncio.sleep(min(seconds, LONGEST_PAUSE))

    async def _bodies(self, batch: Batch, lines: list[Line]) -> list[bytes]:
        """The first line's comes last. A slot is held meanwhile: what waits for one is in the file, not in memory."""
        try:
            bodies: list[bytes] = await self._store.run(read_bodies, self._store.place(batch.input_file), lines)
        except BaseException:
            self._slots.give_back()
            raise
        return bodies[::-1]

    async def _run_line(self, batch: Batch, line: Line, body: bytes) -> None:
        status, answer = await self._answer(batch, body)
        await self._written(Result(batch.sequence, line.line, status, answer, spent_in(answer)))
        self._count("completed" if succeeded(status) else "failed")

    async def _answer(self, batch: Batch, body: bytes) -> tuple[int, bytes]:
        deaths = 0
        while True:
            await self._pause.over()
            try:
                if deaths:
                    # A line that kills the engine must not drag others with it: suspects run one by one.
                    async with self._one_suspect:
                        status, answer = await self._handled(batch, body)
                else:
                    status, answer = await self._handled(batch, body)
            except Busy as error:
                self._pause.begin(error.retry_after)
            except Unavailable:
                self._pause.begin()
            except EngineDied:
                deaths += 1
                if deaths == MOST_DEATHS:
                    problem = problem_of(EngineDied(f"The engine ended {deaths} times while this request ran."))
                    return problem.status, openai_error(problem)
                self._pause.begin()
            else:
                self._pause.reset()
                return status, answer

    async def _handled(self, batch: Batch, body: bytes) -> tuple[int, bytes]:
        """What the handler answers, whole and in one line."""
        try:
            status, answer = await self._handle(batch.endpoint, body, priority=self._priority, key=batch.owner)
            answer = msgspec.json.format(answer, indent=-1)
        except (Busy, Unavailable, EngineDied):
            raise
        except Exception as error:
            problem = problem_of(error)
            return problem.status, openai_error(problem)
        if status == 429:
            raise Busy("The server is busy.", SHORTEST_PAUSE)
        if status == 503:
            raise Unavailable("There is no engine.")
        if status == 500 and _code(answer) == "engine_died":
            raise EngineDied("The engine ended.")
        return status, answer

    async def _written(self, result: Result) -> None:
        """When the result is safe."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._results.append((result, done))
        self._unwritten.set()
        await done

    async def _write_results(self) -> None:
        """Results that arrived meanwhile share a transaction. Whatever fails, they wait: nothing runs twice."""
        seconds = SHORTEST_PAUSE
        while True:
            await self._unwritten.wait()
            group, self._results = self._results[:MOST_RESULTS], self._results[MOST_RESULTS:]
            if not self._results:
                self._unwritten.clear()
            try:
                await self._store.run(self._ledger.record, [result for result, _ in group])
            except BaseException as error:
                self._results = group + self._results  # those that were written after all are not written again
                self._unwritten.set()
                if not isinstance(error, Full):
                    raise
                log.error("results wait %g s: %s", seconds, error)
                await asyncio.sleep(seconds)
                seconds = min(2 * seconds, LONGEST_PAUSE)
                continue
            seconds = SHORTEST_PAUSE
            for _, done in group:
                if not done.done():
                    done.set_result(None)


class Slots:
    """So many at once, first come, first served; the number may change at any time. However many are free, one is given
    in each turn of the event loop: a line that begins costs time, and requests come in between."""

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


class Pause:
    """Shared by all lines: who is told to come back later speaks for all, and waits longer every time."""

    def __init__(self) -> None:
        self._until, self._seconds = 0.0, SHORTEST_PAUSE

    def begin(self, wanted: float = 0.0) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._until = now + min(max(wanted, self._seconds), LONGEST_PAUSE)
            self._seconds = min(2 * self._seconds, LONGEST_PAUSE)

    def reset(self) -> None:
        self._seconds = SHORTEST_PAUSE

    async def over(self) -> None:
        while (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(left)


def _code(answer: bytes) -> Any:
    try:
        return msgspec.json.decode(answer)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
