"""However many lines a batch has and however quickly they end, the event loop is never theirs for long: what one turn
of it does for them is bounded. Counted, not timed, so that a busy machine fails nothing."""

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

from bankfull.serve.batch.input import BYTES_TOGETHER, MOST_TOGETHER, read_together
from bankfull.serve.batch.runner import MOST_RESULTS, Slots
from bankfull.serve.batch.service import BatchService
from bankfull.serve.data.ledger import Batch, Line, Result

ROWS = 500
LINES = 3000


class Turns:
    """Counts the turns of the event loop, and how often something happened in the busiest of them."""

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


async def run_batch(service: BatchService, turns: Turns, lines: int) -> Batch:
    text = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"n": number}})
        for number in range(lines)
    )
    upload = service.store.upload("me")
    upload.write(text.encode())
    file = upload.finish("in.jsonl", "batch")
    batch = service.ledger.create("me", file.id, "/v1/completions", "24h", 86400)
    counting = asyncio.create_task(turns.count())
    try:
        async with service, asyncio.timeout(120):
            while (batch := await service.store.run(service.ledger.again, batch)).status != "completed":
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
    record, run = service.ledger.record, service.store.run

    def recording(results: list[Result]) -> int:
        sizes.append(len(results))
        return record(results)

    async def running(function: Callable[..., Any], *arguments: Any) -> Any:
        turns.note("handed to a thread")
        return await run(function, *arguments)

    monkeypatch.setattr(service.ledger, "record", recording)
    monkeypatch.setattr(service.store, "run", running)
    batch = asyncio.run(run_batch(service, turns, LINES))
    assert batch.completed == LINES == turns.all("begun") == sum(sizes)
    assert turns.most("begun") == 1
    # Each of the few that use the store may come in the same turn: the runner, its batch, its writer, and this test.
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
    record = service.ledger.record

    def recording(results: list[Result]) -> int:
        sizes.append(len(results))
        return record(results)

    monkeypatch.setattr(service.ledger, "record", recording)
    assert asyncio.run(run_batch(service, turns, ROWS)).completed == ROWS
    assert sum(sizes) == ROWS and max(sizes) == MOST_RESULTS, "all of them waited for the first group"


def test_bodies_are_read_a_few_at_a_time_and_large_ones_alone() -> None:
    small = [Line(number, str(number), number * 10, 10) for number in range(2 * MOST_TOGETHER + 1)]
    groups = list(read_together(small))
    assert [len(group) for group in groups] == [MOST_TOGETHER, MOST_TOGETHER, 1]
    assert [line for group in groups for line in group] == small
    lengths = [BYTES_TOGETHER - 10, 10, 1, 5 * BYTES_TOGETHER, 7]
    mixed = [Line(number, str(number), 0, length) for number, length in enumerate(lengths)]
    assert [[line.line for line in group] for group in read_together(mixed)] == [[0, 1], [2], [3], [4]]
    assert list(read_together([])) == []


def test_slots_are_given_in_order_and_one_that_is_not_taken_goes_to_the_next() -> None:
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
        waiting[1].cancel()  # when its turn has come, but before it knows
        await asyncio.gather(*waiting, return_exceptions=True)
        return order

    assert asyncio.run(asyncio.wait_for(use(), 10)) == ["c"]


def test_what_the_server_begins_with_is_left_out_of_later_collections() -> None:
    program = (
        "import gc; from bankfull.serve.run import settle_heap; begun = len(gc.get_objects()); settle_heap();"
        "print(gc.get_freeze_count() > 0.9 * begun > 1000, len(gc.get_objects()) < 0.1 * begun)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split() == ["True", "True"]
