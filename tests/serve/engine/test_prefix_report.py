"""An engine process that reports its prefix cache to a front, over its socket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bankfull.fleet.prefixes import HeldPrefixes, PromptKeys
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.wire import (
    Configure,
    Facts,
    Forgotten,
    Load,
    Ready,
    RequestDone,
    ResetCache,
    StepMessage,
)
from bankfull.submit import Submit
from tests.serve.engine.test_worker import Process
from tests.serve.engine_kit import OPTIONS
from tests.tiny import speaking_folder

PROMPT = list(range(40, 61))
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Front:
    """What a front knows of one engine process."""

    def __init__(self, reports: bool) -> None:
        self.process = Process()
        self.process.send(Configure(str(speaking_folder()), OPTIONS, threads=1, tells_prefixes=reports))
        self.facts: Facts = self.process.until(Ready).facts
        self.held = HeldPrefixes(self.facts)
        self.load: Load | None = None
        self.reports = 0

    def ask(self, number: int, salt: str = "") -> RequestDone:
        """Submit the prompt, and follow all messages until the engine is idle."""
        self.process.send(Submit(PROMPT, PARAMS, id=number, salt=salt))
        done: list[RequestDone] = []
        while not done:
            done += self.take().done
        return done[0]

    def take(self) -> StepMessage:
        step: StepMessage = self.process.until(StepMessage)
        self.load = step.load
        if step.prefixes is not None:
            self.reports += 1
            self.held.apply(step.prefixes)
        return step

    def cached(self, salt: str = "") -> int:
        return self.held.cached_tokens(PromptKeys(PROMPT, salt, self.facts.page_tokens))

    def close(self) -> None:
        self.process.process.kill()
        self.process.process.wait()
        self.process.socket.close()


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    made = Front(reports=True)
    yield made
    made.close()


def test_the_front_knows_what_the_next_request_finds(front: Front) -> None:
    assert front.facts.groups == [(4, 0)] and front.facts.snapshots == 0
    assert front.cached() == 0
    for number, salt in enumerate(("", "a key", "", "a key")):
        known = front.cached(salt)
        assert front.ask(number, salt).cached_tokens == known
        assert front.cached(salt) == 20, "the idle engine has reported all five whole pages"
    assert front.cached("another key") == 0


def test_the_load_has_the_measured_pace(front: Front) -> None:
    front.ask(10)
    assert front.load is not None
    assert front.load.prefill_ms_per_token > 0 and front.load.step_ms > 0 and front.load.pages_cached > 0


def test_a_cleared_cache_is_reported(front: Front) -> None:
    front.ask(20)
    assert front.cached() == 20
    front.process.send(ResetCache(1))
    front.process.until(Forgotten)
    front.take()
    assert front.cached() == 0 and not front.held.keys


def test_an_engine_that_is_not_asked_reports_nothing() -> None:
    front = Front(reports=False)
    try:
        assert front.ask(1).cached_tokens == 0
        assert front.ask(2).cached_tokens == 20
        assert front.reports == 0 and front.cached() == 0
        assert front.load is not None
        assert (front.load.prefill_ms_per_token, front.load.step_ms, front.load.pages_cached) == (0.0, 0.0, 0)
    finally:
        front.close()
