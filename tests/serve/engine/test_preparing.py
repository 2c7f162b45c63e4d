"""What one request costs before it runs: never on the engine's loop, once for all samples, and not at all when its
client has left."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bankfull import frontend
from bankfull.sample import grammar, params
from bankfull.sample.params import SamplingParams, StructuredOutput
from bankfull.sched.scheduler import FORKS_PER_STEP
from bankfull.serve.engine import worker as worker_module
from bankfull.serve.engine.process import EngineProcess
from bankfull.serve.engine.wire import Abort, Configure, Enqueue, Refused, postponed, preparation
from bankfull.serve.engine.worker import Worker
from bankfull.submit import Submit
from bankfull.text.stop import StopTable
from bankfull.types import StepPlan
from tests.serve.engine_kit import OPTIONS, PROMPT
from tests.tiny import speaking_folder

MANY_STOPS = [f"{number:03d}" + "x" * 125 for number in range(64)]


class Engine:
    """A worker in this process, whose loop is turned by hand."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.front, self.said = worker, worker._front, list[Any]()
        worker._say = self.said.append  # type: ignore[method-assign]

    def take(self, *messages: Any) -> None:
        for message in messages:
            self.worker._take(Enqueue(message) if isinstance(message, Submit) else message)

    def act(self) -> None:
        """All that was posted."""
        loop = self.worker._loop
        while loop._sorted():
            loop._act()

    def until(self, true: Callable[[], bool]) -> None:
        ends = time.monotonic() + 60
        while not true():
            self.act()
            assert time.monotonic() < ends, "it never came true"
            time.sleep(0.001)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Worker]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs)
        worker._load(Configure(str(speaking_folder()), {**OPTIONS, "rows": 32}, threads=1))
        yield worker


@pytest.fixture
def engine(loaded: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    made = Engine(loaded)
    yield made
    for request in list(made.front.pending):
        loaded._abort([request])
    made.act()


def submitted(request: int, **how: Any) -> Submit:
    return Submit(PROMPT, SamplingParams(**{"temperature": 1.0, "max_tokens": 8, **how}), id=request)


def later(submit: Submit, tenant: str = "") -> Any:
    size = preparation(submit)
    assert size
    submit.tenant = tenant
    return postponed(submit, size, batch=False)


def test_stop_tables_are_built_once_per_request_and_never_on_the_loop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    unpacked: list[int] = []

    def table(stops: Any) -> StopTable:
        built.append(threading.get_ident())
        return StopTable(stops)

    monkeypatch.setattr(frontend, "StopTable", table)
    real = worker_module.unpacked
    monkeypatch.setattr(
        worker_module, "unpacked", lambda message: (unpacked.append(threading.get_ident()), real(message))[1]
    )
    engine.take(submitted(1, n=100, stop=MANY_STOPS), later(submitted(2, n=100, stop=MANY_STOPS)))
    engine.until(lambda: {1, 2} <= engine.front.pending.keys())
    assert len(built) == 2 and len(unpacked) == 1
    assert threading.get_ident() not in built + unpacked
    pending = engine.front.pending[1]
    assert len({id(sample.stop._table) for sample in pending.samples if sample.stop is not None}) == 1


def test_samples_enter_the_steps_gradually(engine: Engine) -> None:
    entered: list[int] = []

    def watch(plan: StepPlan) -> None:
        entered.append(len(plan.enter))

    engine.front.engine.on_launch.append(watch)
    try:
        engine.take(submitted(5, n=30, max_tokens=40, ignore_eos=True))
        engine.act()
        engine.until(lambda: engine.front.step() is not None and engine.front.engine.scheduler.running == 30)
    finally:
        engine.front.engine.on_launch.remove(watch)
    assert sum(entered) == 30 and max(entered) <= FORKS_PER_STEP + 1


def test_what_prepares_at_once_is_little(engine: Engine) -> None:
    light = SamplingParams(temperature=1.0, n=128, stop=["\n\n", "END"], bad_words=["no"], max_tokens=5)
    assert preparation(Submit(PROMPT, light, id=1)) == 0
    assert preparation(Submit(PROMPT, light, id=1, generated=[[1] * 500, [2] * 500])) == 0
    for heavy in (
        Submit(PROMPT, light, id=1, generated=[[1] * 600, [2] * 600]),
        Submit([1] * 4097, light, id=1),
        Submit(PROMPT, SamplingParams(stop=["x" * 257]), id=1),
        Submit(PROMPT, SamplingParams(bad_words=["x" * 257]), id=1),
        Submit(PROMPT, light, id=1, explain=True),
        Submit(PROMPT, SamplingParams(allowed_token_ids=range(4097)), id=1),
        Submit(PROMPT, SamplingParams(structured=StructuredOutput(regex="a")), id=1),
    ):
        assert preparation(heavy) > 0


def test_work_of_clients_that_left_is_dropped_before_it_is_done(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[str, ...]] = []
    hold, begun = threading.Event(), threading.Event()
    real = engine.front.prepare

    def prepare(submit: Submit) -> Any:
        prepared.append(tuple(submit.params.stop))
        begun.set()
        assert hold.wait(60)
        return real(submit)

    monkeypatch.setattr(engine.front, "prepare", prepare)
    # So large that the thread for short work leaves them alone.
    jobs = [later(Submit([1] * 20_000, SamplingParams(stop=[f"{i:300d}"], max_tokens=1), id=i)) for i in range(10, 22)]
    engine.take(jobs[0])
    assert begun.wait(60)
    engine.take(*jobs[1:], *(Abort([job.id]) for job in jobs[:-1]))
    assert engine.worker._desk.waiting == 2, "the one that is under way, and the last"
    hold.set()
    engine.until(lambda: any(isinstance(said, Refused) for said in engine.said))
    assert [int(stops[0]) for stops in prepared] == [10, 21]
    # It is longer than the context, which is the last one's own trouble; nobody hears of the first any more.
    assert [said.id for said in engine.said if isinstance(said, Refused)] == [21]
    assert not engine.worker._coming


def test_a_request_that_was_taken_and_aborted_in_one_turn_reaches_no_queue(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queued: list[Any] = []
    monkeypatch.setattr(engine.front, "queue", lambda pending: queued.append(pending.request.id))
    engine.take(submitted(31), submitted(32), Abort([31]))
    monkeypatch.setattr(engine.worker._gauge, "queued", lambda *given: None)
    engine.act()
    assert queued == [32]


def test_one_key_may_have_so_much_prepared_and_is_told_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.worker._desk, "_most_jobs_per_key", 2)
    hold = threading.Event()
    monkeypatch.setattr(engine.front, "prepare", lambda *given, **how: hold.wait(60) and None)
    sent = [later(submitted(40 + i, stop=["x" * 300]), tenant) for i, tenant in enumerate(["a", "a", "a", "b"])]
    try:
        engine.take(*sent)
        refused = [said for said in engine.said if isinstance(said, Refused)]
        assert [(said.id, said.kind) for said in refused] == [(42, "busy")]
    finally:
        engine.take(Abort([40, 41, 43]))
        hold.set()


def test_all_stop_strings_together_are_bounded() -> None:
    assert SamplingParams(stop=["x" * 128] * 64).stop
    for name in ("stop", "bad_words"):
        with pytest.raises(Exception, match=f"{name} has 8256 characters in all: give at most 8192"):
            SamplingParams(**{name: ["x" * 129] * 64})
    assert params.MAX_TOTAL_CHARS == 8192


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def test_a_request_that_the_engine_has_not_read_can_be_withdrawn() -> None:
    async def run() -> list[bytes]:
        engine, transport = EngineProcess(lambda message: None), Transport()
        engine.connection_made(transport)  # type: ignore[arg-type]
        engine.send(b"first", 1)
        engine.pause_writing()
        for number in (2, 3, 4):
            engine.send(b"%d" % number, number)
        assert [engine.withdraw(number) for number in (1, 3, 3)] == [False, True, False]
        engine.resume_writing()
        engine.send(b"last", 5)
        return transport.written

    assert asyncio.run(run()) == [b"first", b"2", b"4", b"last"]


def test_grammars_are_forgotten_by_what_they_cost_and_their_first_mask_is_computed_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = iter(range(0, 10**12, 100 << 20))  # each looks at it twice
    monkeypatch.setattr(grammar, "_resident_bytes", lambda: next(grown))
    compiler = grammar.GrammarCompiler(engine.front.tokenizer, engine.front.vocab)
    kept = []
    for number in range(5):
        compiler.compile(StructuredOutput(regex=f"a{number}"))
        kept.append(len(compiler._made))
    assert kept == [1, 2, 2, 2, 2], "256 MiB hold two of 100"
    pool = grammar.MaskPool()
    submitted: list[Any] = []
    monkeypatch.setattr(pool._threads, "submit", lambda work: submitted.append(work))
    first = compiler.compile(StructuredOutput(regex="ab"))
    samples = [first, *(first.copy() for _ in range(20))]
    assert len({pool.submit(sample).result().tobytes() for sample in samples}) == 1 and not submitted
    samples[0].advance(engine.front.tokenizer.encode("a", add_bos=False)[0])
    pool.submit(samples[0])
    assert len(submitted) == 1 and samples[1].known
    pool.close()
