"""What goes wrong in production, done on purpose."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bankfull import SamplingParams
from bankfull.errors import ModelError
from bankfull.serve.engine import keeper as keeper_module
from bankfull.serve.engine.admission import QueueLimits
from bankfull.serve.engine.backend import Busy, EngineDied, Unavailable
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.process import EngineProcess
from bankfull.submit import Submit
from tests.serve.engine_kit import ENDLESS, OPTIONS, PROMPT, Service, collect, idle, service, until
from tests.tiny import speaking_folder

SHORT = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def serving() -> Iterator[Service]:
    with service(QueueLimits(requests=4), rows=4, step_tokens=16) as made:
        yield made


async def some_stage(link: Link, random: Random, prompt: list[int]) -> None:
    """Ask, and leave in the queue, in the prompt or in the middle of the answer."""
    try:
        stream = link.generate(Submit(prompt, ENDLESS))
    except Busy:
        return
    stage = random.randrange(3)
    if stage == 1:
        await asyncio.sleep(random.random() * 0.01)
    elif stage == 2:
        for _ in range(random.randint(1, 5)):
            await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


def test_two_hundred_disconnects_leave_nothing_behind(serving: Service) -> None:
    async def storm(link: Link) -> None:
        random = Random(7)
        for _ in range(20):
            prompts = [[random.randrange(300) for _ in range(random.randint(1, 90))] for _ in range(10)]
            await asyncio.gather(*(some_stage(link, random, prompt) for prompt in prompts))
        await until(lambda: idle(link))
        assert link.admission.samples == link.admission.tokens == 0
        await collect(link, PROMPT, SHORT)

    serving.run(storm)


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_whoever_leaves_frees_the_pages_at_every_stage(serving: Service, stage: str) -> None:
    async def leave(link: Link) -> None:
        await until(lambda: idle(link))
        others = []
        if stage == "queue":  # all four rows are taken
            others = [link.generate(Submit([i, i + 1], ENDLESS)) for i in range(4)]
            for other in others:
                await anext(other)
        steps = link.load.steps if link.load is not None else 0
        stream = link.generate(Submit(list(range(90)), ENDLESS))  # six steps of sixteen tokens
        if stage == "prefill":
            await until(lambda: link.load is not None and link.load.steps > steps)
        elif stage == "decode":
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        if stage != "queue":
            await until(lambda: idle(link))
        for other in others:
            await other.aclose()  # type: ignore[attr-defined]
        await until(lambda: idle(link))

    serving.run(leave)


def test_at_five_times_the_capacity_steps_stay_full(serving: Service) -> None:
    async def served(link: Link, clients: int, seconds: float) -> tuple[float, int]:
        """Pieces of answers for each step of the engine, from this many clients that ask again at once, or after a
        refusal; and how many refusals there were."""
        await until(lambda: idle(link))
        assert link.load is not None
        before, end = link.load.steps, time.monotonic() + seconds
        tokens = refused = 0

        async def client() -> None:
            nonlocal tokens, refused
            while time.monotonic() < end:
                try:
                    async for items in link.generate(Submit(PROMPT[:4], SHORT)):
                        tokens += len(items)
                except Busy as busy:
                    assert busy.retry_after >= 1.0
                    refused += 1
                    await asyncio.sleep(0.02)  # sooner than told

        await asyncio.gather(*(client() for _ in range(clients)))
        await until(lambda: idle(link))
        return tokens / (link.load.steps - before), refused

    async def compare(link: Link) -> float:
        peak, _ = await served(link, 8, 0.5)
        loaded, refused = await served(link, 40, 0.5)
        assert refused > 0
        return loaded / peak

    assert serving.run(compare) > 0.7  # tokens a second are the soak's to measure


def test_a_killed_engine_fails_its_streams_and_comes_back(serving: Service) -> None:
    async def kill(link: Link) -> None:
        streams = [link.generate(Submit(PROMPT, ENDLESS)) for _ in range(6)]
        await anext(streams[0])
        died = link.engine_pid
        assert died is not None and link.facts is not None
        os.kill(died, signal.SIGKILL)
        await until(lambda: not link.ready)
        for stream in streams:
            with pytest.raises(EngineDied):
                async for _ in stream:
                    pass
        with pytest.raises(Unavailable):
            link.generate(Submit(PROMPT, SHORT))
        with pytest.raises(Unavailable):
            await link.reset_cache()
        assert link.facts is not None, "what is known of the model stays known"
        assert link.admission.samples == 0
        await link.wait_ready()
        assert link.engine_pid != died and link.restarts == 1
        assert len(await collect(link, PROMPT, SHORT)) > 1

    serving.run(kill)


def test_whoever_does_not_finish_within_the_grace_is_told(serving: Service) -> None:
    async def drain(link: Link) -> None:
        stream = link.generate(Submit(PROMPT, ENDLESS))
        assert link.engine_pid is not None
        os.kill(link.engine_pid, signal.SIGSTOP)  # it will never be done
        try:
            await link.drain(0.2)
            with pytest.raises(Unavailable, match="shut down"):
                async for _ in stream:
                    pass
        finally:
            os.kill(link.engine_pid, signal.SIGCONT)

    serving.run(drain)


def test_an_engine_that_cannot_be_loaded_three_times_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts: list[Any] = []
    start = EngineProcess.start

    async def doomed(self: EngineProcess) -> None:
        await start(self)
        starts.append(self.pid)
        os.kill(self.pid, signal.SIGKILL)

    async def wait() -> None:
        link = Link(str(speaking_folder()), OPTIONS)
        await link.start()
        try:
            with pytest.raises(ModelError, match="signal 9"):
                await asyncio.wait_for(link.wait_ready(), 30)
        finally:
            await link.close()

    monkeypatch.setattr(EngineProcess, "start", doomed)
    asyncio.run(wait())
    assert len(starts) == 3
    assert "not started again" in caplog.text


@contextmanager
def movable(tmp_path: Path) -> Iterator[Path]:
    """A model that can be taken away."""
    folder = tmp_path / "model"
    shutil.copytree(speaking_folder(), folder)
    yield folder


async def fail_to_load(link: Link, folder: Path, attempts: int) -> Path:
    """The model is taken away and the engine killed, until so many loads have failed."""
    await link.start()
    await link.wait_ready()
    away = folder.rename(folder.with_name("away"))
    assert link.engine_pid is not None
    os.kill(link.engine_pid, signal.SIGKILL)
    await until(lambda: link.failed_loads >= attempts or link.failure is not None, 120)
    return away


@pytest.mark.full
def test_a_model_that_was_away_is_loaded_as_soon_as_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(keeper_module, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(keeper_module, "MOST_FAILED_LOADS", 1)

    async def lose_and_find(folder: Path) -> None:
        link = Link(str(folder), OPTIONS, threads=1)
        try:
            away = await fail_to_load(link, folder, keeper_module.MOST_FAILED_LOADS + 1)
            assert not link.ready and link.failure is None
            assert "attempts to load the model again have failed" in link.says
            assert str(tmp_path) not in link.says and "away" not in link.says and "/" not in link.says
            with pytest.raises(Unavailable) as told:
                link.generate(Submit(PROMPT, SHORT))
            assert str(told.value) == link.says
            away.rename(folder)
            await asyncio.wait_for(link.wait_ready(), 120)
            assert link.says == "" and len(await collect(link, PROMPT, SHORT)) > 1
        finally:
            await link.close()

    with movable(tmp_path) as folder:
        asyncio.run(lose_and_find(folder))
    assert "tried again" in caplog.text and str(tmp_path) in caplog.text, "the log says why"


def test_a_link_without_an_engine_for_a_stated_time_fails_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "FIRST_PAUSE", 0.01)

    async def lose(folder: Path) -> None:
        link = Link(str(folder), OPTIONS, threads=1, give_up_after=60.0)
        try:
            await fail_to_load(link, folder, 1)
            assert link.failure is None
            link._on_give_up()  # the timer's own call, without the wait
            with pytest.raises(ModelError, match=r"no engine for 60 seconds.*There is no model"):
                await link.wait_failed()
            assert str(tmp_path) not in link.says
        finally:
            await link.close()

    with movable(tmp_path) as folder:
        asyncio.run(lose(folder))


def test_the_time_to_give_up_runs_only_while_there_is_no_engine() -> None:
    async def live() -> None:
        link = Link(str(speaking_folder()), OPTIONS, threads=1, give_up_after=600.0)
        await link.start()
        try:
            await link.wait_ready()
            assert link._giving_up is None, "a first load may take as long as it takes"
            assert link.engine_pid is not None
            os.kill(link.engine_pid, signal.SIGKILL)
            await until(lambda: not link.ready)
            assert link._giving_up is not None
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(live(), 120))


def test_a_supervisor_that_fails_ends_the_whole_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: EngineProcess, patience: float) -> str:
        self.kill()
        raise RuntimeError("a defect")

    async def live() -> None:
        link = Link(str(speaking_folder()), OPTIONS, threads=1)
        await link.start()
        try:
            await link.wait_ready()
            waiting = link.generate(Submit(PROMPT, ENDLESS))
            monkeypatch.setattr(EngineProcess, "finish", broken)
            assert link.engine_pid is not None
            os.kill(link.engine_pid, signal.SIGKILL)
            with pytest.raises((EngineDied, Unavailable)):
                async for _ in waiting:
                    pass
            with pytest.raises(ModelError, match="a defect"):
                await link.wait_failed()
        finally:
            await link.close()

    asyncio.run(asyncio.wait_for(live(), 120))
