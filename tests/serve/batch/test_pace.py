"""The work that one iteration of the event loop does for batches is bounded, however many lines they have and however
quickly the lines end. The tests count operations instead of time, so that a busy machine fails nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bankfull.serve.batch.input import GROUP_BYTES, GROUP_LINES, grouped
from bankfull.serve.batch.runner import MOST_RESULTS, Slots
from bankfull.serve.batch.service import BatchService
from bankfull.serve.data.batch_store import BatchLine, BatchRecord, LineResult

ROWS = 500
LINES = 3000


class Turns:
    """Counts iterations of the event loop, and the events in the busiest of them."""

    def __init__(self) -> None:
        self._turn = 0
        self._seen: dict[str, Counter[int]] = {}

    async def count(self) -> None:
        while True:
            self._turn += 1
            await asyncio.sleep(0)

    def note(self, what: str) -> None:
        self._seen.setdefault(what, Counter())[self._turn] += 1

    def most(self, what: str) -> int:
        return max(self._seen[what].values())

    def all(self, what: str) -> int:
        return self._seen[what].total()


async def run_batch(service: BatchService, turns: Turns, lines: int) -> BatchRecord:
    text = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"n": number}})
        for number in range(lines)
    )
    upload = service.store.upload("me")
    upload.write(text.encode())
    file = upload.finish("in.jsonl", "batch")
    batch = service.batch_store.create("me", file.id, "/v1/completions", "24h", 86400)
    counting = asyncio.create_task(turns.count())
    try:
        async with service, asyncio.timeout(120):
            while (batch := await service.store.run(service.batch_store.refresh, batch)).status != "completed":
                await asyncio.sleep(0.01)
    finally:
        counting.cancel()
    return batch


def test_one_turn_of_the_loop_begins_few_lines_and_ends_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, sizes = Turns(), []

    async def answer_at_once(url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]:
        turns.note("begun")
        return 200, body

    service = BatchService(tmp_path, answer_at_once, rows=lambda: ROWS)
    record, run = service.batch_store.record, service.store.run

    def recording(results: list[LineResult]) -> int:
        sizes.append(len(results))
        return record(results)

    async def running(function: Callable[..., Any], *arguments: Any) -> Any:
        turns.note("handed to a thread")
        return await run(function, *arguments)

    monkeypatch.setattr(service.batch_store, "record", recording)
    monkeypatch.setattr(service.store, "run", running)
    batch = asyncio.run(run_batch(service, turns, LINES))
    assert batch.completed == LINES == turns.all("begun") == sum(sizes)
    assert turns.most("begun") == 1
    # The runner, its batch, its writer and this test may all use the store in the same iteration.
    assert turns.most("handed to a thread") <= 4
    assert max(sizes) <= MOST_RESULTS


def test_results_that_come_at_once_are_written_in_small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, sizes = Turns(), []
    all_there = asyncio.Event()

    async def answer_together(url: str, body: bytes, *, priority: int, key: str) -> tuple[int, bytes]:
        turns.note("begun")
        if turns.all("begun") == ROWS:
            all_there.set()
        await all_there.wait()
        return 200, body

    service = BatchService(tmp_path, answer_together, rows=lambda: ROWS)
    record = service.batch_store.record

    def recording(results: list[LineResult]) -> int:
        sizes.append(len(results))
        return record(results)

    monkeypatch.setattr(service.batch_store, "record", recording)
    assert asyncio.run(run_batch(service, turns, ROWS)).completed == ROWS
    assert sum(sizes) == ROWS and max(sizes) == MOST_RESULTS, "while the first group was stored, all others were queued"


def test_bodies_are_read_a_few_at_a_time_and_large_ones_alone() -> None:
    small = [BatchLine(number, str(number), number * 10, 10) for number in range(2 * GROUP_LINES + 1)]
    groups = list(grouped(small))
    assert [len(group) for group in groups] == [GROUP_LINES, GROUP_LINES, 1]
    assert [line for group in groups for line in group] == small
    lengths = [GROUP_BYTES - 10, 10, 1, 5 * GROUP_BYTES, 7]
    mixed = [BatchLine(number, str(number), 0, length) for number, length in enumerate(lengths)]
    assert [[line.line for line in group] for group in grouped(mixed)] == [[0, 1], [2], [3], [4]]
    assert list(grouped([])) == []


def test_slots_are_given_in_order_and_one_of_a_cancelled_waiter_goes_to_the_next() -> None:
    async def use() -> list[str]:
        slots, order = Slots(lambda: 1), []

        async def take(name: str) -> None:
            await slots.take()
            order.append(name)

        await slots.take()
        waiting = [asyncio.create_task(take(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        slots.give_back()
        await asyncio.sleep(0)
        waiting[1].cancel()  # when it has been granted the slot, but before it resumes
        await asyncio.gather(*waiting, return_exceptions=True)
        return order

    assert asyncio.run(asyncio.wait_for(use(), 10)) == ["c"]


def test_objects_of_the_start_are_excluded_from_later_garbage_collections() -> None:
    program = (
        "import gc; from bankfull.serve.run import settle_heap; begun = len(gc.get_objects()); settle_heap();"
        "print(gc.get_freeze_count() > 0.9 * begun > 1000, len(gc.get_objects()) < 0.1 * begun)"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.split() == ["True", "True"]
