"""An engine that hangs without dying is noticed, and one that has nothing to do is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from bankfull import SamplingParams
from bankfull.errors import ConfigError
from bankfull.progress import Progress, SharedProgress, watched_file
from bankfull.serve.engine import keeper as keeper_module
from bankfull.serve.engine.backend import EngineDied
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.stall import stalled
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT, collect, idle, until
from tests.tiny import speaking_folder

FEW = SamplingParams(temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
SECONDS = 1.0


async def is_stalled(seconds: float, watched: float, *, busy: bool, steps_every: float | None) -> bool:
    begun = time.monotonic()

    def progress() -> int:
        return 0 if steps_every is None else int((time.monotonic() - begun) / steps_every)

    try:
        await asyncio.wait_for(stalled(seconds, lambda: busy, progress), watched)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("busy", "steps_every", "expected"), [(True, None, True), (False, None, False), (True, 0.02, False)]
)
def test_only_work_without_steps_is_a_stall(busy: bool, steps_every: float | None, expected: bool) -> None:
    watched = 60.0 if expected else 1.0  # a busy machine delays each of its beats
    found = asyncio.run(is_stalled(0.2, watched, busy=busy, steps_every=steps_every))
    assert found is expected


def test_a_pause_of_this_process_counts_as_one_beat() -> None:
    async def pause() -> bool:
        watching = asyncio.ensure_future(stalled(0.4, lambda: True, lambda: 0))
        await asyncio.sleep(0.02)
        time.sleep(0.6)
        await asyncio.sleep(0.02)
        done = watching.done()
        watching.cancel()
        return done

    assert not asyncio.run(pause())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="stall_seconds"):
        Link("model", stall_seconds=seconds)


def test_progress_is_seen_from_within_a_step() -> None:
    """A prompt with scores is one step here, and moves the count with each of its layers and blocks of scores."""

    async def ask() -> None:
        link = Link(str(speaking_folder()), OPTIONS, threads=1)
        await link.start()
        try:
            await link.wait_ready()
            assert link._engine is not None
            before = link._engine.progress
            assert before > 0, "it was warmed up"
            params = SamplingParams(max_tokens=1, prompt_logprobs=1)
            await collect(link, list(range(40, 50)), params)
            assert link.load is not None and link.load.steps == 1
            assert link._engine.progress >= before + 2
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(ask(), 120))


@pytest.mark.parametrize("memory", [True, False])
def test_the_count_of_another_process_is_read_where_it_lies(memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    file = watched_file()
    own, watched = Progress(), SharedProgress(file)
    for _ in range(3):
        own.tick()
    own.share(file)
    os.close(file)
    assert watched.count == own.count == 3
    own.tick()
    assert watched.count == 4
    watched.close()


def test_an_engine_that_hangs_is_ended_and_started_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.0)

    async def hang() -> None:
        link = Link(str(speaking_folder()), OPTIONS, threads=1, stall_seconds=SECONDS)
        await link.start()
        try:
            await link.wait_ready()
            await collect(link, PROMPT, FEW)
            await until(lambda: idle(link))
            await asyncio.sleep(1.5 * SECONDS)
            first = link.engine_pid
            assert first is not None and link.restarts == 0, "an idle engine makes no steps either"
            stream = link.generate(Submit(PROMPT, ENDLESS))
            await anext(stream)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
            await link.wait_ready()
            assert link.restarts == 1 and link.engine_pid != first
            await collect(link, PROMPT, FEW)
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(hang(), 120))
    assert "made no progress for 1 seconds" in caplog.text and "started again" in caplog.text
