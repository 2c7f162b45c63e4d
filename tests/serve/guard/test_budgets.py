"""The token bucket of a key: a call reserves all that it may need before it starts, so concurrent calls never use more
than the limit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.api.errors import Refusal
from bankfull.serve.app import create_app
from bankfull.serve.engine.backend import Busy, EngineDied
from bankfull.serve.engine.wire import RequestDone
from bankfull.serve.guard.checks import access_policy
from bankfull.serve.guard.keys import Keyring, new_key
from bankfull.serve.guard.layers import protect
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Trace, during
from bankfull.serve.telemetry.watch import WatchedBackend
from bankfull.submit import Submit
from tests.quick import examples
from tests.serve.listening import listening
from tests.serve.scripted import FACTS, Scripted, scripted_texts, settings

BUDGET = 60


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class ScriptedSteps:
    """Steps that the test sends one by one."""

    samples: int
    queue: asyncio.Queue[list[Delta | RequestDone] | Exception] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> ScriptedSteps:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class Engine(Scripted):
    """Accepts every request and generates only what the test sends."""

    def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        return ScriptedSteps(submit.params.n)


@dataclass
class Call:
    steps: Any
    told: ScriptedSteps
    prompt: int
    left: list[int]
    """Tokens that each sample may still generate."""
    used: int

    @property
    def worst(self) -> int:
        return self.used + sum(self.left)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 25), st.integers(0, 30), st.integers(1, 3)),
        st.tuples(st.just("tokens"), st.integers(0, 30), st.integers(1, 6), st.integers(0, 2)),
        st.tuples(st.sampled_from(["end", "leave", "die", "let go"]), st.integers(0, 30), st.just(0), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 40), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(ACTIONS)
@examples(300, deadline=None)
def test_concurrent_calls_never_exceed_the_token_bucket(actions: list[tuple[str, int, int, int]]) -> None:
    async def run() -> None:
        clock = Clock()
        _, key = new_key("alice", tokens=BUDGET)
        backend = WatchedBackend(Engine(), ServiceMetrics(), Keyring((key,), clock=clock))
        running: list[Call] = []
        spent = 0
        for action, first, second, third in actions:
            call = running[first % len(running)] if running else None
            if action == "wait":
                clock.now += first
            elif action == "ask":
                params = SamplingParams(max_tokens=second, n=third)
                try:
                    with during(Trace("id", "POST", "/x", 0.0, key=key)):
                        steps = backend.generate(Submit([1] * first, params))
                except (Busy, Refusal):
                    continue
                running.append(Call(steps, steps._steps, first, [second] * third, first))  # type: ignore[attr-defined]
            elif call is not None and action == "tokens":
                index = third % len(call.left)
                count = min(second, call.left[index])
                call.told.queue.put_nowait([Delta(1, index, "", [1] * count)])
                await anext(call.steps)
                call.left[index] -= count
                call.used += count
            elif call is not None:
                running.remove(call)
                spent += call.used
                if action == "end":
                    call.told.queue.put_nowait([RequestDone(1, 0.0, 0.0, 0.0, 0, call.used - call.prompt)])
                    await anext(call.steps)
                elif action == "leave":
                    await call.steps.aclose()
                elif action == "die":
                    call.told.queue.put_nowait(EngineDied("dead"))
                    with pytest.raises(EngineDied):
                        await anext(call.steps)
                del call
            # Even if all running calls generate all they may.
            most = spent + sum(one.worst for one in running)
            assert most <= BUDGET * (1 + (clock.now - 100.0) / 60) + 1e-6

        for call in running:
            spent += call.used
            await call.steps.aclose()
        running.clear()
        call = None
        gc.collect()
        # And nothing stays reserved: a minute after the last use the bucket is full again.
        clock.now += 60
        with during(Trace("id", "POST", "/x", 0.0, key=key)):
            backend.generate(Submit([1] * BUDGET, SamplingParams(max_tokens=0)))

    asyncio.run(run())


def test_unused_tokens_are_returned_to_the_bucket_at_once() -> None:
    async def run() -> None:
        _, key = new_key("alice", tokens=BUDGET)
        backend = WatchedBackend(Scripted(["ab"]), ServiceMetrics(), Keyring((key,), clock=Clock()))
        with during(Trace("id", "POST", "/x", 0.0, key=key)):
            for _ in range(10):  # each uses 3 + 2 of the 45 tokens that it reserves, while they last
                try:
                    async for _ in backend.generate(Submit([1, 2, 3], SamplingParams(max_tokens=42))):
                        pass
                except Busy as busy:
                    assert "40 left of its 60" in str(busy) and 0 < busy.retry_after <= 60
                    break
            else:
                raise AssertionError("45 of 40 tokens were reserved")

    asyncio.run(run())


def test_a_call_that_exceeds_the_limit_of_a_minute_is_refused_by_name() -> None:
    _, key = new_key("alice", tokens=BUDGET)
    backend = WatchedBackend(Engine(), ServiceMetrics(), Keyring((key,)))
    for params in (SamplingParams(max_tokens=58), SamplingParams(max_tokens=20, n=3), SamplingParams()):
        with during(Trace("id", "POST", "/x", 0.0, key=key)), pytest.raises(Refusal, match="max_tokens") as refused:
            backend.generate(Submit([1, 2, 3], params))
        assert refused.value.status == 400 and refused.value.code == "token_budget_exceeded"
    assert FACTS.max_len > BUDGET, "a call without max_tokens may need the whole context"


def test_a_refused_call_costs_nothing() -> None:
    class Full(Scripted):
        def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
            raise Busy("full", 1.0)

    _, key = new_key("alice", tokens=BUDGET)
    keyring = Keyring((key,), clock=Clock())
    with during(Trace("id", "POST", "/x", 0.0, key=key)), pytest.raises(Busy, match="full"):
        WatchedBackend(Full(), ServiceMetrics(), keyring).generate(Submit([1], SamplingParams(max_tokens=50)))
    tokens = keyring.rate_limits(key).tokens
    assert tokens is not None and tokens.left == BUDGET


def test_batch_lines_may_overdraw_and_then_wait_for_the_refill() -> None:
    _, key = new_key("alice", tokens=BUDGET)
    keyring = Keyring((key,), clock=Clock())
    backend = WatchedBackend(Engine(), ServiceMetrics(), keyring)
    with during(Trace("id", "POST", "/x", 0.0, key=key)):
        held = [backend.generate(Submit([1], SamplingParams(max_tokens=49), priority=BATCH_PRIORITY)) for _ in range(2)]
        assert keyring.batch_wait("alice") == pytest.approx(70.0)
        with pytest.raises(Busy):
            backend.generate(Submit([1], SamplingParams(max_tokens=1)))
    assert len(held) == 2


def test_twenty_concurrent_calls_stay_within_sixty_tokens() -> None:
    secret, key = new_key("alice", tokens=BUDGET)
    keyring, metrics = Keyring((key,), clock=Clock()), ServiceMetrics()
    inner = Scripted(["x"] * 8, pause=0.05)
    backend = WatchedBackend(inner, metrics, keyring)
    app = create_app(backend, scripted_texts(), settings())
    with (
        listening(protect(app, backend, access_policy(keyring, host="127.0.0.1"), metrics)) as server,
        httpx.Client(base_url=server.url, headers={"x-api-key": secret}, timeout=60) as client,
        ThreadPoolExecutor(20) as pool,
    ):
        body = {"prompt": "ab", "max_tokens": 8}
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(20)))
    statuses = [answer.status_code for answer in answers]
    used = sum(answer.json()["usage"]["total_tokens"] for answer in answers if answer.status_code == 200)
    assert set(statuses) == {200, 429} and 0 < used <= BUDGET, statuses
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    assert len(inner.asked) == statuses.count(200)
