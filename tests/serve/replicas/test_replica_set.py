"""Several engines as one backend: routing, admission, sums, joining and leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bankfull import SamplingParams
from bankfull.cluster.local_replicas import local_replicas
from bankfull.errors import ConfigError, ModelError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import Candidate
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.console.state import ConsoleState
from bankfull.serve.console.timelines import TimeLines
from bankfull.serve.engine.backend import Busy, Unavailable
from bankfull.serve.engine.wire import Facts, Load
from bankfull.serve.replicas.replica_set import DRAFTS, ReplicaSet
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.submit import Submit
from tests.serve.replicas.fake_links import FACTS, FakeLink, read, replica_set
from tests.serve.replicas.test_resume import FIVE, PROMPT, run, settled
from tests.serve.scripted import settings


def load_of(**changes: Any) -> Load:
    numbers = [name for name in Load.__struct_fields__ if name not in (*DRAFTS, "tiers", "moves", "queues", "optional")]
    return Load(**{**dict.fromkeys(numbers, 0), **changes})


class Fixed:
    """A policy that always prefers the last replica, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool, list[Candidate]]] = []

    def choose(self, prompt_tokens: int, batch: bool, candidates: Sequence[Candidate]) -> int:
        self.asked.append((prompt_tokens, batch, list(candidates)))
        return len(candidates) - 1


def test_the_policy_chooses_and_sees_what_is_under_way() -> None:
    async def check() -> None:
        links = {"a": FakeLink(load=load_of(running=3)), "b": FakeLink()}
        policy = Fixed()
        replicas = ReplicaSet(links, policy)
        first = replicas.generate(Submit(PROMPT, FIVE))
        second = replicas.generate(
            Submit([1] * 40, FIVE, priority=BATCH_PRIORITY, tenant="t", deadline=time.monotonic() + 9.0)
        )
        assert len(links["b"].sent) == 2 and not links["a"].sent
        assert (links["b"].sent[1].submit.tenant, links["b"].sent[1].submit.priority) == ("t", BATCH_PRIORITY)
        (tokens, batch, before), (_, later_batch, after) = policy.asked
        assert (tokens, batch, later_batch) == (3, False, True)
        assert before[0].load == load_of(running=3) and before[0].rows == FACTS.rows
        assert [c.inflight for c in before] == [0, 0] and [c.inflight for c in after] == [0, 1]
        assert [c.inflight_tokens for c in after] == [0, 3]
        links["b"].step()
        await anext(first)
        third = replicas.generate(Submit(PROMPT, FIVE))
        assert [c.inflight_tokens for c in policy.asked[2][2]] == [0, 0], "its prompt has run"
        assert [c.batch_inflight for c in policy.asked[2][2]] == [0, 1]
        for stream in (first, second, third):
            await stream.aclose()  # type: ignore[attr-defined]
        assert all(view.requests == 0 for view in replicas.views())

    run(check())


def test_busy_only_when_no_replica_admits() -> None:
    async def check() -> None:
        links = [FakeLink(most=1, retry_after=9.0), FakeLink(most=1, retry_after=4.0)]
        replicas = replica_set(*links)
        streams = [replicas.generate(Submit(PROMPT, FIVE))]
        replicas.expect(1)
        streams.append(replicas.generate(Submit(PROMPT, FIVE)))
        assert [len(link.streams) for link in links] == [1, 1]
        for refused in (lambda: replicas.expect(1), lambda: replicas.generate(Submit(PROMPT, FIVE))):
            with pytest.raises(Busy) as caught:
                refused()  # type: ignore[no-untyped-call]
            assert caught.value.retry_after == 4.0, "the wait of the replica that has room first"

    run(check())


def test_a_full_queue_does_not_refuse_a_request_that_was_admitted_elsewhere() -> None:
    async def check() -> None:
        links = [FakeLink(most=1), FakeLink(most=1)]
        replicas = replica_set(*links)
        reading = [asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE)))) for _ in range(2)]
        await settled()
        links[0].kill()
        await settled()
        assert len(links[1].streams) == 2
        for _ in range(5):
            links[1].step()
        for one in reading:
            (await one).assert_whole(PROMPT, FIVE)

    run(check())


def test_without_a_ready_replica_requests_are_refused_with_the_reason() -> None:
    async def check() -> None:
        link = FakeLink(ready=False, facts=None)
        replicas = replica_set(link)
        assert not replicas.ready and replicas.facts is None and replicas.load is None
        for empty, reason in ((replicas, "being loaded"), (replica_set(), "No replica is running")):
            assert reason in empty.says
            with pytest.raises(Unavailable, match=reason):
                empty.expect(1)
            with pytest.raises(Unavailable, match=reason):
                empty.generate(Submit(PROMPT, FIVE))
        link.facts = FACTS
        link.revive()
        assert replicas.ready and replicas.says == ""

    run(check())


def test_each_request_without_a_seed_gets_its_own() -> None:
    async def check() -> None:
        link = FakeLink()
        replicas = replica_set(link)
        for _ in range(2):
            replicas.generate(Submit(PROMPT, SamplingParams(max_tokens=1, top_p=0.5, stop=("x",))))
        replicas.generate(Submit(PROMPT, SamplingParams(max_tokens=1, seed=4)))
        seeds = [stream.submit.params.seed for stream in link.sent]
        assert None not in seeds and seeds[0] != seeds[1] and seeds[2] == 4
        assert link.sent[0].submit.params == SamplingParams(max_tokens=1, top_p=0.5, stop=("x",), seed=seeds[0])

    run(check())


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"name": "other"}, "model other"), ({"vocab": 5}, "vocabulary of size 5"), ({"max_len": 9}, "tokens of 9")],
)
def test_a_replica_that_does_not_fit_gets_no_requests(
    changes: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check() -> None:
        good = FakeLink()
        replicas = replica_set(good)
        odd = FakeLink(facts=Facts(**{**{name: getattr(FACTS, name) for name in FACTS.__struct_fields__}, **changes}))
        await replicas.add("odd", odd)
        view = replicas.views()[1]
        assert view.state == "refused" and named in view.problem and named in caplog.text
        assert replicas.facts == FACTS
        for _ in range(4):
            replicas.generate(Submit(PROMPT, FIVE))
        assert len(good.sent) == 4 and not odd.sent
        await replicas.remove("r0")
        assert replicas.ready and replicas.facts == odd.facts, "it is the only one now"

    run(check())


def test_sums_cover_all_replicas_and_counters_never_fall() -> None:
    async def check() -> None:
        first = FakeLink(
            load=load_of(
                running=1,
                waiting=2,
                pages_used=3,
                pages_total=10,
                pages_cached=2,
                steps=100,
                prefix_hits=7,
                drafted=[3, 2],
                accepted=[2],
            )
        )
        second = FakeLink(
            load=load_of(
                running=4,
                waiting=0,
                pages_used=1,
                pages_total=10,
                pages_cached=4,
                steps=50,
                busy=1.5,
                drafted=[1, 1, 1],
                accepted=[1, 1],
            )
        )
        replicas = replica_set(first, second)
        facts, load = replicas.facts, replicas.load
        assert facts is not None and (facts.rows, facts.pages, facts.max_len) == (16, 200, 512)
        expected = load_of(
            running=5,
            waiting=2,
            pages_used=4,
            pages_total=20,
            pages_cached=6,
            steps=150,
            prefix_hits=7,
            busy=1.5,
            drafted=[4, 3, 1],
            accepted=[3, 1],
        )
        assert load == expected
        first.kill()
        load = replicas.load
        assert load is not None and (load.running, load.steps, load.prefix_hits, load.pages_total) == (4, 150, 7, 10)
        assert (load.drafted, load.accepted) == ([4, 3, 1], [3, 1])
        first.load = load_of(steps=5)
        first.revive()
        assert replicas.load is not None and replicas.load.steps == 155
        await replicas.remove("r1")
        assert replicas.load is not None and replicas.load.steps == 155 and replicas.restarts == 1
        assert replicas.facts is not None and replicas.facts.rows == 8

    run(check())


def test_a_replica_joins_and_leaves_and_its_streams_go_on() -> None:
    async def check() -> None:
        old, new = FakeLink(), FakeLink()
        replicas = replica_set(old)
        await replicas.start()
        reading = asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE))))
        await settled()
        old.step()
        await settled()
        await replicas.add("new", new)
        with pytest.raises(ConfigError, match="'new' already"):
            await replicas.add("new", FakeLink())
        await replicas.remove("r0", grace=0.0)
        await settled()
        assert old.closed and [view.name for view in replicas.views()] == ["new"] and len(new.streams) == 1
        for _ in range(4):
            new.step()
        (await reading).assert_whole(PROMPT, FIVE)
        with pytest.raises(ConfigError, match="no replica 'r0'; there are new"):
            await replicas.remove("r0")

    run(check())


def test_a_replica_that_is_removed_twice_is_counted_once() -> None:
    async def check() -> None:
        links = [FakeLink(restarts=3), FakeLink()]
        replicas = replica_set(*links)
        await asyncio.gather(replicas.remove("r0"), replicas.remove("r0"))
        assert [view.name for view in replicas.views()] == ["r1"] and replicas.restarts == 3

    run(check())


def test_the_server_ends_only_when_every_replica_is_given_up() -> None:
    async def check() -> None:
        links = [FakeLink(ready=False, facts=None), FakeLink(ready=False, facts=None)]
        replicas = replica_set(*links)
        waiting = [asyncio.ensure_future(replicas.wait_ready()), asyncio.ensure_future(replicas.wait_failed())]
        links[0].failure = "The file is not there."
        links[0].kill()
        await settled()
        assert not any(task.done() for task in waiting) and replicas.views()[0].state == "failed"
        links[1].failure = "Neither is this one."
        links[1].kill()
        for task in waiting:
            with pytest.raises(ModelError, match="not there"):
                await task

    run(check())


def test_the_caches_of_all_replicas_are_reset() -> None:
    async def check() -> None:
        links = [FakeLink(), FakeLink(), FakeLink()]
        replicas = replica_set(*links)
        links[2].kill()
        assert await replicas.reset_cache() == 10 and [link.resets for link in links] == [1, 1, 0]

    run(check())


def test_metrics_and_console_show_each_replica() -> None:
    async def check() -> None:
        links = [FakeLink(load=load_of(running=2, prefix_queries=10, prefix_hits=4, steps=1)), FakeLink()]
        replicas = replica_set(*links)
        replicas.generate(Submit(PROMPT, FIVE))
        links[1].kill()
        metrics = ServiceMetrics("tiny", replicas=replicas.views)
        text = metrics.write(replicas)
        for line in (
            'replica_ready{model_name="tiny",replica="r0"} 1',
            'replica_ready{model_name="tiny",replica="r1"} 0',
            'replica_state{model_name="tiny",replica="r1",state="restarting"} 1',
            'replica_num_requests_running{model_name="tiny",replica="r0"} 2',
            'replica_prefix_cache_hits_total{model_name="tiny",replica="r0"} 4',
        ):
            assert f"bankfull:{line}\n" in text
        assert 'running{model_name="tiny",replica="r1"}' not in text
        await replicas.remove("r1")
        assert 'replica="r1"' not in metrics.write(replicas)
        console = ConsoleState(replicas, metrics, TimeLines(replicas), settings(), replicas.views)
        [shown] = console.after(0).replicas
        assert (shown["name"], shown["state"], shown["hit_rate"]) == ("r0", "ready", 0.4)
        assert shown["load"]["running"] == 2 and "problem" not in shown
        alone = ConsoleState(replicas, metrics, TimeLines(replicas), settings())
        assert alone.after(0).replicas == [] and "replica" not in ServiceMetrics("tiny").write(replicas)

    run(check())


@pytest.mark.parametrize("count", [0, -1, 1000])
def test_a_machine_runs_a_possible_number_of_replicas(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} replicas"):
        local_replicas(ReplicaRange(count, count))
