"""What goes wrong in production, done on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from bankfull import SamplingParams
from bankfull.errors import ModelError
from bankfull.serve import link as link_module
from bankfull.serve.admission import QueueLimits
from bankfull.serve.backend import Busy, EngineDied, Unavailable
from bankfull.serve.link import Link
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
        stream = link.generate(prompt, ENDLESS)
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
            others = [link.generate([i, i + 1], ENDLESS) for i in range(4)]
            for other in others:
                await anext(other)
        steps = link.load.steps if link.load is not None else 0
        stream = link.generate(list(range(90)), ENDLESS)  # six steps of sixteen tokens
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
                    async for items in link.generate(PROMPT[:4], SHORT):
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
        streams = [link.generate(PROMPT, ENDLESS) for _ in range(6)]
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
            link.generate(PROMPT, SHORT)
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
        stream = link.generate(PROMPT, ENDLESS)
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
    start = link_module.EngineProcess.start

    async def doomed(self: link_module.EngineProcess) -> None:
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

    monkeypatch.setattr(link_module.EngineProcess, "start", doomed)
    asyncio.run(wait())
    assert len(starts) == 3
    assert "not started again" in caplog.text
