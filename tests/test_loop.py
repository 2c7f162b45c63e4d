"""The loop around the engine: what is posted to it happens before the next step."""

from __future__ import annotations

import threading

import pytest

from bankfull import LLM, SamplingParams
from bankfull import loop as loop_module
from bankfull.loop import EngineLoop
from bankfull.outputs import Delta
from tests.tiny import speaking_folder

ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(speaking_folder()), dtype="float32", memory="1MiB", page_tokens=4, rows=2, step_tokens=16)


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_an_aborted_request_is_gone_before_the_next_step(llm: LLM, stage: str) -> None:
    front = llm.loaded.frontend
    scheduler = front.engine.scheduler
    mine, others = "mine", ("first", "second")
    turns = 0
    aborted_at = -1

    def in_stage() -> bool:
        pending = front.pending.get(mine)
        if pending is None:
            return False
        if stage == "queue":
            return scheduler.waiting == 1
        tokens = pending.result.metrics.output_tokens  # a step may accept several draft tokens
        return tokens == 0 if stage == "prefill" else tokens >= 5

    def abort() -> None:
        front.abort(mine)
        front.pending.pop(mine)

    def tell(deltas: list[Delta]) -> None:
        nonlocal turns, aborted_at
        turns += 1
        if aborted_at < 0:
            if in_stage():
                aborted_at = turns
                loop.post(abort)
            return
        assert turns == aborted_at + 1
        assert mine not in front.engine.started or stage != "queue"
        assert all(delta.request_id != mine for delta in deltas)
        held = scheduler.state.census()[0].held
        assert (held > 0) == (stage == "queue"), "the others hold theirs, and nobody else"
        loop.stop()

    loop = EngineLoop(front, tell)
    if stage == "queue":
        for other in others:
            loop.post(lambda other=other: front.submit([1, 2, 3], ENDLESS, id=other))  # type: ignore[misc]
    loop.post(lambda: front.submit(list(range(90)), ENDLESS, id=mine))  # type: ignore[arg-type, return-value]
    loop.run()
    assert aborted_at > 0
    for other in others:
        front.abort(other)
        front.pending.pop(other, None)
    assert not front.engine.busy


def test_the_loop_sleeps_until_somebody_posts(llm: LLM) -> None:
    turns: list[int] = []
    loop = EngineLoop(llm.loaded.frontend, lambda deltas: turns.append(len(deltas)))
    thread = threading.Thread(target=loop.run)
    thread.start()
    done = threading.Event()
    loop.post(done.set)
    assert done.wait(5.0)
    loop.stop()
    thread.join(5.0)
    assert not thread.is_alive() and turns in ([], [0])


def test_an_idle_loop_waits_and_a_busy_one_only_looks(llm: LLM) -> None:
    """The bell may bring work itself, so it is asked in every turn, but never made to wait while there is some."""

    class Asked:
        def __init__(self) -> None:
            self.times: list[float | None] = []

        def ring(self) -> None: ...

        def wait(self, seconds: float | None) -> None:
            self.times.append(seconds)
            if len(self.times) == 1:
                loop.post(lambda: front.submit([1, 2, 3], three, id="one"))  # type: ignore[arg-type, return-value]
            elif seconds is None:
                loop.stop()

    front, bell = llm.loaded.frontend, Asked()
    three = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    loop = EngineLoop(front, lambda deltas: None, bell)
    loop.run()
    front.take("one")
    # Idle; the submit itself; a look before each of the other steps; idle again.
    assert bell.times[0] is None and bell.times[-1] is None
    assert bell.times[1:-1] and set(bell.times[1:-1]) == {0.0}


@pytest.mark.parametrize(("batching", "pauses"), [("static", False), ("dynamic", True)])
def test_a_loop_whose_batch_is_not_complete_sleeps(batching: str, pauses: bool) -> None:
    """It wakes up for the second request, or at the time at which the first one has waited long enough."""
    options: dict[str, object] = {"batching": batching, "batch_size": 2}
    if pauses:
        options["batch_timeout"] = 60.0
    front = LLM(str(speaking_folder()), memory="1MiB", page_tokens=4, rows=2, **options).loaded.frontend
    three = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)

    class Arrivals:
        """A bell that brings one request after the other, when the loop sleeps."""

        def __init__(self) -> None:
            self.slept: list[float | None] = []

        def ring(self) -> None: ...

        def wait(self, seconds: float | None) -> None:
            if seconds == 0.0:
                return
            self.slept.append(seconds)
            assert len(self.slept) <= 3, "the loop wakes up without a reason"
            if len(self.slept) == 3:
                loop.stop()
            else:
                name = f"request {len(self.slept)}"
                loop.post(lambda: front.submit([1, 2, 3], three, id=name))  # type: ignore[arg-type, return-value]

    bell = Arrivals()
    loop = EngineLoop(front, lambda deltas: None, bell)
    loop.run()
    nothing, incomplete, ended = bell.slept
    assert nothing is None and ended is None
    assert 0 < incomplete <= 60.0 if pauses and incomplete is not None else incomplete is None
    assert front.take("request 1").finished and front.take("request 2").finished


def test_a_stream_does_not_wait_for_a_batch_that_nobody_completes() -> None:
    llm = LLM(str(speaking_folder()), memory="1MiB", page_tokens=4, rows=2, batching="static", batch_size=2)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=3)
    assert sum(len(delta.token_ids) for delta in llm.stream([1, 2, 3], params)) == 3


def test_a_flood_of_actions_leaves_time_for_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MOST_ACTING_SECONDS", 0.0)
    front = llm.loaded.frontend
    events: list[str] = []

    def tell(deltas: list[Delta]) -> None:
        events.append("step")
        if events.count("action") == 5:
            loop.stop()

    loop = EngineLoop(front, tell)
    for _ in range(5):
        loop.post(lambda: events.append("action"))
    loop.run()
    assert events == ["action", "step"] * 5


def test_a_flood_of_one_owner_does_not_keep_another_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a thousand posted actions, the next one of somebody else runs after one of them at most."""
    monkeypatch.setattr(loop_module, "MOST_ACTING_SECONDS", 0.0)
    events: list[str] = []

    def tell(deltas: list[Delta]) -> None:
        if len(events) == 3:
            loop.post(lambda: events.append("first of another"), "honest")
            loop.post(lambda: events.append("second of another"), "honest")
        if len(events) == 10:
            loop.stop()

    loop = EngineLoop(llm.loaded.frontend, tell)
    for number in range(1000):
        loop.post(lambda number=number: events.append(str(number)), "greedy")  # type: ignore[misc]
    loop.run()
    assert events[:8] == ["0", "1", "2", "3", "first of another", "4", "second of another", "5"]
