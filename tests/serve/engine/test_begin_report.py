"""A real engine reports a request before it works on it, and only then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bankfull import SamplingParams
from bankfull.sample.params import StructuredOutput
from bankfull.serve.engine.wire import Begun, Configure, Enqueue, Ready, StepMessage, pack
from bankfull.submit import Submit
from tests.serve.engine.test_worker import Process
from tests.serve.engine_kit import OPTIONS
from tests.tiny import speaking_folder

PROMPT = list(range(40, 61))
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
GRAMMAR = SamplingParams(temperature=0.0, max_tokens=6, structured=StructuredOutput(regex="[ab]{40}"))


def begun(reports: bool) -> Process:
    process = Process()
    process.send(Configure(str(speaking_folder()), {**OPTIONS, "rows": 2}, threads=1, tells_prefixes=reports))
    process.until(Ready)
    return process


@pytest.fixture(scope="module")
def worker() -> Iterator[Process]:
    made = begun(reports=True)
    yield made
    made.process.kill()
    made.process.wait()
    made.socket.close()


def until_done(worker: Process, requests: set[int]) -> list[Begun | StepMessage]:
    read: list[Begun | StepMessage] = []
    while requests:
        message = worker.next()
        read.append(message)
        if isinstance(message, StepMessage):
            requests -= {done.id for done in message.done}
    return read


def first_delta(read: list[Begun | StepMessage], request: int) -> int:
    return next(
        at
        for at, one in enumerate(read)
        if isinstance(one, StepMessage) and any(delta.request_id == request for delta in one.deltas)
    )


def test_a_request_is_reported_before_its_first_token(worker: Process) -> None:
    worker.send(Submit(PROMPT, GREEDY, id=1))
    read = until_done(worker, {1})
    assert [one for one in read if isinstance(one, Begun)] == [Begun([1], runs=True)]
    assert read.index(Begun([1], runs=True)) < first_delta(read, 1)


def test_a_request_in_the_queue_is_not_reported(worker: Process) -> None:
    """Two rows: the third request waits for one of the others."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    worker.socket.sendall(b"".join(pack(Enqueue(Submit(PROMPT, long, id=number))) for number in (11, 12, 13)))
    read = until_done(worker, {11, 12, 13})
    reported = [one.ids for one in read if isinstance(one, Begun)]
    assert sorted(number for ids in reported for number in ids) == [11, 12, 13]
    at = next(at for at, one in enumerate(read) if isinstance(one, Begun) and 13 in one.ids)
    assert first_delta(read, 11) < at < first_delta(read, 13)


def test_the_preparation_of_a_grammar_is_reported(worker: Process) -> None:
    worker.send(Submit(PROMPT, GRAMMAR, id=21))
    read = until_done(worker, {21})
    begun = [Begun([21]), Begun([21], waits=True), Begun([21], runs=True)]
    assert [one for one in read if isinstance(one, Begun)] == begun


def test_an_engine_without_other_replicas_reports_nothing() -> None:
    alone = begun(reports=False)
    try:
        alone.send(Submit(PROMPT, GREEDY, id=1))
        alone.send(Submit(PROMPT, GRAMMAR, id=2))
        assert not any(isinstance(one, Begun) for one in until_done(alone, {1, 2}))
    finally:
        alone.process.kill()
        alone.process.wait()
        alone.socket.close()
