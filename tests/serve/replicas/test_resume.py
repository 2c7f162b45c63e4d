"""A stream goes on, token by token, when its replica ends, wherever that happens."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable
from random import Random
from typing import Any, TypeVar

import pytest

from bankfull import SamplingParams
from bankfull.serve.engine.backend import Busy, DeadlineExceeded, EngineDied, EngineFault, Unavailable
from bankfull.serve.replicas import resume
from bankfull.submit import Submit
from tests.serve.engine_kit import until
from tests.serve.replicas.fake_links import FakeLink, Received, read, replica_set, tokens_of

T = TypeVar("T")
PROMPT = [1, 2, 3]
FIVE = SamplingParams(seed=7, max_tokens=5)
TWO_SAMPLES = SamplingParams(seed=7, max_tokens=5, n=2)


def run(what: Awaitable[T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(what, 60)

    return asyncio.run(bounded())


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def settled() -> None:
    """Let all tasks run that can."""
    await turns(20)


@pytest.mark.parametrize("params", [FIVE, TWO_SAMPLES], ids=["n=1", "n=2"])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("seen", ["all read", "unread"])
def test_a_stream_survives_the_end_of_its_replica_at_every_step(params: SamplingParams, steps: int, seen: str) -> None:
    """`unread`: tokens have arrived that the client has not read when the replica ends."""

    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        replicas = replica_set(first, second)
        stream, received = replicas.generate(Submit(PROMPT, params)), Received()
        assert len(first.streams) == 1
        reading = asyncio.ensure_future(read(stream, received)) if seen == "all read" else None
        for _ in range(steps):
            first.step()
            if reading is not None:
                await settled()
        over = not first.streams
        first.kill()
        reading = reading or asyncio.ensure_future(read(stream, received))
        await settled()
        for _ in range(8):
            second.step()
            await settled()
        await reading
        received.assert_whole(PROMPT, params)
        assert len(second.sent) == (0 if over else 1)
        if not over:
            assert sum(map(len, second.sent[0].submit.generated)) == steps * params.n
        assert [view.requests for view in replicas.views()] == [0, 0]
        assert replicas.views()[0].resumed == (0 if over else 1)

    run(check())


def test_a_sample_that_has_ended_is_not_continued() -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        received = Received()
        reading = asyncio.ensure_future(
            read(replica_set(first, second).generate(Submit(PROMPT, TWO_SAMPLES)), received)
        )
        await settled()
        for _ in range(5):  # the first sample has five tokens, the second one six
            first.step()
        await settled()
        assert received.finished == [0]
        first.kill()
        await settled()
        rest = second.sent[0].submit
        assert rest.generated == [tokens_of(PROMPT, TWO_SAMPLES, 0), tokens_of(PROMPT, TWO_SAMPLES, 1)[:5]]
        assert rest.finished == [0] and rest.admitted
        second.step()
        (await reading).assert_whole(PROMPT, TWO_SAMPLES)

    run(check())


def test_a_stream_survives_many_ends_while_tokens_come() -> None:
    async def check() -> None:
        links = [FakeLink(), FakeLink(), FakeLink()]
        params = SamplingParams(seed=1, max_tokens=12)
        reading = asyncio.ensure_future(read(replica_set(*links).generate(Submit(PROMPT, params))))
        for _ in range(12):
            await settled()
            [runs] = [link for link in links if link.streams]
            runs.step()
            if not runs.streams:
                break
            await settled()
            runs.kill()
            runs.revive()
        (await reading).assert_whole(PROMPT, params)
        assert sum(len(link.sent) for link in links) == 12

    run(check())


def test_one_replica_that_comes_back_continues_its_own_stream() -> None:
    async def check() -> None:
        link = FakeLink()
        reading = asyncio.ensure_future(read(replica_set(link).generate(Submit(PROMPT, FIVE))))
        await settled()
        link.step()
        await settled()
        link.kill()
        await asyncio.sleep(0.05)
        assert not reading.done(), "it waits for a replica"
        link.revive()
        await settled()
        for _ in range(4):
            link.step()
        (await reading).assert_whole(PROMPT, FIVE)

    run(check())


def test_a_request_that_ends_every_engine_is_given_up() -> None:
    async def check() -> None:
        links = [FakeLink(), FakeLink()]
        reading = asyncio.ensure_future(read(replica_set(*links).generate(Submit(PROMPT, FIVE))))
        for _ in range(20):
            await settled()
            for link in links:
                if link.streams:
                    link.kill()
                    link.revive()
        with pytest.raises(EngineDied, match="not tried again"):
            await reading
        assert sum(len(link.sent) for link in links) == resume.MOST_BARREN

    run(check())


def test_engines_that_end_while_a_request_waits_in_their_queue_are_not_counted() -> None:
    async def check() -> None:
        links = [FakeLink(works=False), FakeLink(works=False)]
        reading = asyncio.ensure_future(read(replica_set(*links).generate(Submit(PROMPT, FIVE))))
        for _ in range(4 * resume.MOST_BARREN):
            await settled()
            [runs] = [link for link in links if link.streams]
            runs.kill()
            runs.revive()
        await settled()
        for _ in range(5):
            for link in links:
                link.step()
        (await reading).assert_whole(PROMPT, FIVE)

    run(check())


def test_no_request_is_queued_for_ever() -> None:
    async def check() -> None:
        links = [FakeLink(works=False), FakeLink(works=False)]
        reading = asyncio.ensure_future(read(replica_set(*links).generate(Submit(PROMPT, FIVE))))
        for _ in range(2 * resume.MOST_DEATHS):
            await settled()
            for link in links:
                if link.streams:
                    link.kill()
                    link.revive()
        with pytest.raises(EngineDied, match=f"{resume.MOST_DEATHS} engines have ended"):
            await reading

    run(check())


def test_only_the_request_that_ends_its_engines_is_given_up() -> None:
    """All requests enter the first engine together. Which one has ended it shows when each runs without the others."""
    killer = [9, 9, 9]

    async def check() -> None:
        links = [FakeLink(), FakeLink(), FakeLink()]
        replicas = replica_set(*links)
        prompts = [[number] for number in range(6)] + [killer]
        reading = [asyncio.ensure_future(read(replicas.generate(Submit(prompt, FIVE)))) for prompt in prompts]
        for _ in range(400):
            await turns(5)
            for link in links:
                if any(stream.submit.prompt == killer for stream in link.streams):
                    link.kill()
                    link.revive()
                elif link.streams:
                    link.step()
            if all(task.done() for task in reading):
                break
            await asyncio.sleep(resume.TURN_SECONDS / 4)
        for prompt, task in zip(prompts[:-1], reading, strict=False):
            (await task).assert_whole(prompt, FIVE)
        with pytest.raises(EngineDied, match="not tried again"):
            await reading[-1]
        assert [replica.meter.suspects for replica in replicas._replicas.values()] == [0, 0, 0]

    run(check())


def test_suspects_run_one_by_one() -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink(ready=False)
        replicas = replica_set(first, second, patience=0.01)
        reading = [asyncio.ensure_future(read(replicas.generate(Submit([number], FIVE)))) for number in range(3)]
        await settled()
        first.kill()
        first.revive()
        for expected in (1, 2, 3):
            await until(lambda expected=expected: len(first.streams) >= expected)  # type: ignore[misc]
            await asyncio.sleep(4 * resume.TURN_SECONDS)
            assert len(first.streams) == expected, "longer than the patience, which is for a set without a replica"
            first.step()
        for _ in range(5):
            first.step()
        for number, task in enumerate(reading):
            (await task).assert_whole([number], FIVE)

    run(check())


def test_without_any_replica_a_stream_waits_and_then_ends_with_one_clear_error() -> None:
    async def check() -> None:
        link = FakeLink()
        replicas = replica_set(link, patience=0.05)
        received = Received()
        reading = asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE)), received))
        await settled()
        link.step()
        await settled()
        link.kill()
        with pytest.raises(EngineDied, match=r"no other one was ready within 0\.05 seconds; ask again"):
            await reading
        assert received.tokens == {0: tokens_of(PROMPT, FIVE)[:1]}
        link.revive()
        assert not link.streams and replicas.views()[0].requests == 0

    run(check())


def test_the_deadline_goes_on_while_a_stream_waits() -> None:
    async def check() -> None:
        link = FakeLink()
        reading = asyncio.ensure_future(
            read(replica_set(link).generate(Submit(PROMPT, FIVE, deadline=time.monotonic() + 0.05)))
        )
        await settled()
        link.kill()
        with pytest.raises(DeadlineExceeded):
            await reading
        link.revive()
        await settled()
        assert not link.streams

    run(check())


def test_another_replica_gets_the_rest_of_the_deadline() -> None:
    async def check() -> None:
        first, second, deadline = FakeLink(), FakeLink(), time.monotonic() + 100.0
        stream = replica_set(first, second).generate(Submit(PROMPT, FIVE, deadline=deadline))
        reading = asyncio.ensure_future(read(stream))
        await asyncio.sleep(0.02)
        first.kill()
        await settled()
        [sent] = second.sent
        assert sent.submit.deadline == deadline
        reading.cancel()

    run(check())


@pytest.mark.parametrize("how", ["cancel", "aclose"])
def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing_behind(how: str) -> None:
    async def check() -> None:
        link = FakeLink()
        replicas = replica_set(link, patience=60.0)
        stream = replicas.generate(Submit(PROMPT, FIVE))
        reading = asyncio.ensure_future(read(stream))
        await settled()
        link.kill()
        await settled()
        if how == "cancel":
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        else:
            await stream.aclose()  # type: ignore[attr-defined]
        link.revive()
        await settled()
        assert reading.done() and len(link.sent) == 1 and replicas.views()[0].requests == 0

    run(check())


@pytest.mark.parametrize("how", ["cancel", "aclose", "drop"])
def test_a_client_that_leaves_aborts_its_request_on_the_replica_that_runs_it_now(how: str) -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        replicas = replica_set(first, second)
        stream: Any = replicas.generate(Submit(PROMPT, FIVE))
        first.step()
        await anext(stream)
        first.kill()
        waiting = asyncio.ensure_future(anext(stream))
        await settled()
        second.step()
        await waiting
        if how == "cancel":
            waiting = asyncio.ensure_future(anext(stream))
            await settled()
            waiting.cancel()
            await asyncio.wait({waiting})
        elif how == "aclose":
            await stream.aclose()
        else:
            del stream, waiting
            gc.collect()
            await settled()
        assert [view.requests for view in replicas.views()] == [0, 0]
        if how != "drop":  # a real link's stream ends with its last reference
            assert second.sent[0].left

    run(check())


def test_an_embedding_is_begun_anew() -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        reading = asyncio.ensure_future(read(replica_set(first, second).generate(Submit(PROMPT, FIVE, pool="last"))))
        await settled()
        first.kill()
        await settled()
        assert second.sent[0].submit.admitted and not second.sent[0].submit.begun
        second.step()
        [done] = (await reading).done
        assert done.embedding == [1.0]

    run(check())


def test_an_explained_request_continues_only_before_its_first_token() -> None:
    async def check() -> None:
        links = [FakeLink(), FakeLink()]
        replicas = replica_set(*links)
        reading = asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE, explain=True))))
        await settled()
        links[0].kill()
        await settled()
        assert links[1].sent[0].submit.explain
        links[1].step()
        await settled()
        links[0].revive()
        links[1].kill()
        with pytest.raises(EngineDied, match="explain cannot continue"):
            await reading

    run(check())


def test_a_request_that_only_misses_its_end_gets_one() -> None:
    """A large step is sent in several messages, and the replica may end between them."""

    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        received = Received()
        stream = replica_set(first, second).generate(Submit(PROMPT, FIVE))
        [runs] = first.streams
        for _ in range(5):
            runs.step()
        last = [runs.queue.get_nowait() for _ in range(5)]
        for items in last:
            assert isinstance(items, list)
            runs.queue.put_nowait([item for item in items if not hasattr(item, "output_tokens")])
        runs.queue.put_nowait(EngineDied("It ended."))
        await read(stream, received)
        received.assert_whole(PROMPT, FIVE)
        assert not second.sent

    run(check())


@pytest.mark.parametrize("error", [EngineFault("A defect."), Busy("No room.", 1.0)], ids=["fault", "busy"])
def test_an_error_of_the_request_itself_is_not_tried_elsewhere(error: Exception) -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        stream = replica_set(first, second).generate(Submit(PROMPT, FIVE))
        first.streams[0].fail(error)  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            await read(stream)
        assert not second.sent

    run(check())


def test_a_closing_server_resumes_nothing() -> None:
    async def check() -> None:
        first, second = FakeLink(), FakeLink()
        replicas = replica_set(first, second)
        reading = asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE))))
        await settled()
        await replicas.drain(0.0)
        with pytest.raises(Unavailable, match="shut down"):
            await reading
        await replicas.close()
        assert not second.sent and first.closed and second.closed

    run(check())


def test_a_stream_that_waits_for_a_replica_ends_with_the_server() -> None:
    async def check() -> None:
        link = FakeLink()
        replicas = replica_set(link, patience=1000.0)
        reading = asyncio.ensure_future(read(replicas.generate(Submit(PROMPT, FIVE))))
        await settled()
        link.kill()
        await settled()
        await replicas.drain(0.0)
        with pytest.raises(Unavailable, match="shut down"):
            await reading

    run(check())


def test_a_storm_of_ends_loses_no_token_and_doubles_none() -> None:
    """Four hundred requests, each with its own pace of reading, on four replicas that end again and again. Time is
    counted in turns of the event loop, so that every run is the same."""

    async def check() -> None:
        random = Random(20)
        links = [FakeLink() for _ in range(4)]
        replicas = replica_set(*links, patience=30.0)
        ends = 0

        async def client(number: int) -> None:
            pace = Random(number)
            prompt = [pace.randrange(1000) for _ in range(pace.randint(1, 9))]
            params = SamplingParams(seed=number, max_tokens=pace.randint(1, 40), n=pace.choice([1, 1, 1, 3]))
            await turns(pace.randrange(600))
            while True:
                try:
                    stream = replicas.generate(Submit(prompt, params))
                    break
                except Unavailable:
                    await turns(2)
            received = Received()
            async for items in stream:
                received.take(items)
                if pace.random() < 0.2:
                    await turns(pace.randrange(5))
            received.assert_whole(prompt, params)

        clients = [asyncio.ensure_future(client(number)) for number in range(400)]
        while not all(one.done() for one in clients):
            for link in links:
                if random.random() < 0.7:
                    link.step()
                if link.ready and random.random() < 0.01:
                    link.kill()
                    ends += 1
                elif not link.ready and random.random() < 0.2:
                    link.revive()
            await turns(2)
        await asyncio.gather(*clients)
        views = replicas.views()
        assert ends > 10 and sum(view.resumed for view in views) > 100
        assert all(view.requests == 0 for view in views)

    run(check())
