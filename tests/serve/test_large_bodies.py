"""Large bodies take turns of the event loop, so that many of them do not delay the tokens of others."""

from __future__ import annotations

import asyncio

from bankfull.serve.app import LARGE_BODY, LargeBodies


def test_one_large_body_per_turn_of_the_loop_and_small_ones_at_once() -> None:
    async def run() -> list[tuple[int, int]]:
        large, turn, passed = LargeBodies(), 0, []

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        async def arrive(size: int) -> None:
            await large.turn(size)
            passed.append((size, turn))

        counting = asyncio.ensure_future(count())
        await asyncio.gather(*(arrive(size) for size in (LARGE_BODY, LARGE_BODY, LARGE_BODY, 100)))
        counting.cancel()
        return passed

    passed = asyncio.run(run())
    assert passed[0][0] == 100, "a small body waits for nothing"
    turns = [turn for size, turn in passed if size == LARGE_BODY]
    assert len(set(turns)) == 3, "two large bodies in one turn"
