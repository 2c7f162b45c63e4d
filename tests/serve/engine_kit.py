"""A real engine process with a tiny model, and short words for what the tests ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.admission import QueueLimits
from bankfull.serve.engine.link import Link
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit
from tests.tiny import speaking_folder

T = TypeVar("T")
OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": "1MiB", "page_tokens": 4}
PROMPT = list(range(40, 60))
ENDLESS = SamplingParams(temperature=1.0, seed=3, ignore_eos=True)


@dataclass
class Service:
    """A link, and the event loop on which all of it runs."""

    link: Link
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def run(self, what: Callable[[Link], Awaitable[T]], timeout: float = 60.0) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(what(self.link), timeout)

        return self.runner.run(bounded())


@contextmanager
def service(limits: QueueLimits | None = None, **options: Any) -> Iterator[Service]:
    async def start(link: Link) -> None:
        await link.start()
        await link.wait_ready()

    # One thread: tests run beside each other, and kernels that wait for each other do not like to share a core.
    made = Service(Link(str(speaking_folder()), {**OPTIONS, **options}, limits, threads=1))
    try:
        made.run(start, timeout=240.0)
        yield made
    finally:
        made.run(lambda link: link.close())
        made.runner.close()


async def collect(link: Link, prompt: list[int], params: SamplingParams, **how: Any) -> list[Delta | RequestDone]:
    return [item async for items in link.generate(Submit(prompt, params, **how)) for item in items]


def text_of(items: list[Delta | RequestDone], index: int = 0) -> str:
    return "".join(item.text for item in items if isinstance(item, Delta) and item.index == index)


async def until(true: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until it is so; how long that took."""
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < seconds, "it never came true"
        await asyncio.sleep(0.002)
    return time.monotonic() - begun


def idle(link: Link) -> bool:
    load = link.load
    return load is None or load.running == load.waiting == load.waiting_tokens == load.pages_used == 0
