"""Background tasks: none ends in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.testclient import TestClient

from bankfull.serve.app import create_app
from bankfull.serve.supervise import CALM_SECONDS, FIRST_PAUSE, LONGEST_PAUSE, Supervisor
from bankfull.serve.telemetry.metrics import ServiceMetrics
from tests.serve.scripted import Scripted, scripted_texts, settings


class Time:
    """Passes only while somebody sleeps, or is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def supervised(scenario: Callable[[Supervisor, Time], Coroutine[Any, Any, None]]) -> tuple[Supervisor, Time]:
    async def whole() -> tuple[Supervisor, Time]:
        time = Time()
        supervisor = Supervisor(clock=lambda: time.now, sleep=time.sleep)
        await asyncio.wait_for(scenario(supervisor, time), 30)
        await supervisor.close()
        assert not supervisor._kept, "a closed supervisor has no tasks"
        return supervisor, time

    return asyncio.run(whole())


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["raises", "returns", "is cancelled"])
def test_a_task_that_ends_begins_again_whatever_ended_it(how: str, caplog: pytest.LogCaptureFixture) -> None:
    begun: list[int] = []

    async def work() -> None:
        begun.append(len(begun))
        if len(begun) == 3:
            await asyncio.Event().wait()
        if how == "raises":
            raise RuntimeError("the database disk image is malformed")
        if how == "is cancelled":
            raise asyncio.CancelledError

    async def scenario(supervisor: Supervisor, time: Time) -> None:
        supervisor.keep("worker", work)
        await turns(20)
        assert [task.get_name() for task in supervisor.running["worker"]] == ["worker"]

    with caplog.at_level(logging.ERROR):
        supervisor, _ = supervised(scenario)
    assert len(begun) == 3 and supervisor.restarts["worker"] == 2
    told = [record.getMessage() for record in caplog.records if "the task worker" in record.getMessage()]
    assert len(told) == 2
    assert (how != "raises") or "malformed" in told[0]


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_calm_time() -> None:
    async def scenario(supervisor: Supervisor, time: Time) -> None:
        async def work() -> None:
            if len(time.slept) == 10:
                time.now += CALM_SECONDS
            if len(time.slept) == 12:
                await asyncio.Event().wait()
            raise OSError("no")

        supervisor.keep("worker", work)
        await turns(60)

    _, time = supervised(scenario)
    assert time.slept[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert max(time.slept) == time.slept[9] == LONGEST_PAUSE
    assert time.slept[10:] == [FIRST_PAUSE, 2 * FIRST_PAUSE]


def test_one_that_fails_again_and_again_never_looks_well_and_one_that_runs_does() -> None:
    async def scenario(supervisor: Supervisor, time: Time) -> None:
        healed = asyncio.Event()

        async def work() -> None:
            if healed.is_set():
                await asyncio.Event().wait()
            raise OSError("no")

        supervisor.keep("good", asyncio.Event().wait)  # type: ignore[arg-type]
        supervisor.keep("bad", work)
        for _ in range(20):
            await turns(1)
            assert "bad" in supervisor.troubled or not supervisor.restarts["bad"]
            assert supervisor.up["good"]
        healed.set()
        await turns()
        assert supervisor.troubled == ["bad"], "it has only just begun"
        time.now += LONGEST_PAUSE
        assert supervisor.up == {"bad": True, "good": True}

    supervised(scenario)


def test_work_that_may_end_ends_and_is_forgotten() -> None:
    async def scenario(supervisor: Supervisor, time: Time) -> None:
        failures = [OSError("once")]

        async def work() -> None:
            if failures:
                raise failures.pop()

        task = supervisor.keep("job", work, ends=True, about="number 5")
        await task
        assert supervisor.restarts["job"] == 1 and supervisor.running == {"job": []} and not supervisor.troubled

    supervised(scenario)


def test_the_end_of_a_keeper_is_the_end_of_its_work() -> None:
    ended: list[str] = []

    async def scenario(supervisor: Supervisor, time: Time) -> None:
        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await turns(3)
                ended.append("work")

        task = supervisor.keep("worker", work)
        await turns()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended == ["work"] and not supervisor.restarts

    supervised(scenario)


def test_readiness_and_metrics_tell_of_a_failing_task() -> None:
    async def for_ever(seconds: float) -> None:
        await asyncio.Event().wait()

    backend, supervisor = Scripted(), Supervisor(sleep=for_ever)
    metrics = ServiceMetrics("tiny", supervisor=supervisor)
    app = create_app(backend, scripted_texts(), settings(), supervisor=supervisor)
    with TestClient(app) as client:
        assert client.get("/ready").status_code == 200

        async def fail() -> None:
            raise OSError("/secret/path is gone")

        async def begin() -> None:
            supervisor.keep("worker", fail)
            await turns()

        assert client.portal is not None
        client.portal.call(begin)
        answer = client.get("/ready")
        assert answer.status_code == 503 and "worker" in answer.text and "secret" not in answer.text
        assert client.get("/live").status_code == 200
        page = metrics.write(backend)
        assert 'bankfull:background_task_up{model_name="tiny",task="worker"} 0' in page
        assert 'bankfull:background_task_restarts_total{model_name="tiny",task="worker"} 1' in page
        client.portal.call(supervisor.close)
