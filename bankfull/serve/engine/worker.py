"""The engine process: `python -m bankfull.serve.engine.worker FD [FILE [SECRETS]]`. FD is its end of a private socket
pair, FILE where it writes its progress, SECRETS a file for `handshake.inherited`.

The main thread runs the engine's loop and reads the API's messages between steps, so that no other thread has to be
woken before an idle engine starts. Requests that take long to prepare (grammars, long prompts, tables of many stop
strings) are prepared by threads of their own (`desk`), and dropped there when they are aborted. Each step is answered
by one message. The process has no state that must survive it: it exits when the socket is closed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from bankfull.collector import garbage_collector_off
from bankfull.errors import BankfullError, RankLost, RequestError
from bankfull.fleet.page_tables import page_tables_of
from bankfull.fleet.prefix_report import PrefixReporter
from bankfull.handshake.inherited import inherit, inherited
from bankfull.handshake.proof import Seal
from bankfull.outputs import Delta
from bankfull.progress import PROGRESS
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.desk import Desk, DeskJob
from bankfull.serve.engine.backend import Busy
from bankfull.serve.engine.begin_report import BeginReporter
from bankfull.serve.engine.engine_end import ApiGone, Inbox, MessageHead, NotAMessage, Outbox
from bankfull.serve.engine.exchange_end import ExchangeEnd, own_host, told_facts
from bankfull.serve.engine.gauge import Gauge
from bankfull.serve.engine.loaded_weights import LoadedWeights
from bankfull.serve.engine.wire import (
    Abort,
    Arrived,
    Configure,
    Enqueue,
    Expect,
    Facts,
    Failed,
    Forgotten,
    FromEngine,
    Later,
    LoadingPhase,
    PagesShown,
    Ready,
    Refused,
    RequestDone,
    ResetCache,
    Ship,
    ShowPages,
    StepMessage,
    ToEngine,
    pack,
    preparation,
    unpacked,
)
from bankfull.submit import Submit
from bankfull.torch_parts import leave_out

if TYPE_CHECKING:
    from bankfull.frontend import Pending
    from bankfull.llm import LLM

NICENESS = 5
"""Added to the API's niceness: the engine uses all cores."""
MAX_PREPARING, MAX_PREPARING_PER_KEY = 32 << 20, 8 << 20
"""Characters and tokens of requests that wait to be prepared, in total and per key; more are refused with 429."""
MAX_JOBS_PER_KEY = 32
SWITCH_SECONDS = 0.0005
"""Seconds the engine's thread waits at most for another thread to release the interpreter."""
STEP_MS = 250.0
"""Milliseconds that running requests wait at most for the prefill of another one; the default of step_ms."""
WARM_PROMPT, WARM_TOKENS = 64, 4


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        keys = inherited().link
        self._inbox = Inbox(connection, self._take, None if keys is None else Seal(keys.of_caller))
        self._outbox = Outbox(connection, _give_up, None if keys is None else Seal(keys.of_listener))
        self._configured: Configure | None = None
        self._desk = Desk(
            "bankfull-prepare",
            most_size=MAX_PREPARING,
            most_size_per_key=MAX_PREPARING_PER_KEY,
            most_jobs_per_key=MAX_JOBS_PER_KEY,
            what="requests with grammars or long prompts",
        )
        self._coming: dict[int, DeskJob | None] = {}
        """Requests that are not queued in the engine yet, without those that were aborted."""
        self._pools: dict[int, str] = {}
        self._explained: set[int] = set()
        """Requests whose steps are timed, because their clients want to know where the time went."""
        self._told: tuple[int, ...] = ()
        self._prefixes: PrefixReporter | None = None
        self._begins: BeginReporter | None = None
        self._exchange: ExchangeEnd | None = None
        self._handing: dict[int, set[int]] = {}
        """Requests that leave when they have tokens, and their samples that have none."""

    def run(self) -> None:
        threading.Thread(target=self._until_gone, name="bankfull-watcher", daemon=True).start()
        try:
            while self._configured is None:
                self._inbox.wait(None)
            try:
                facts = garbage_collector_off()(self._load)(self._configured)
            except BankfullError as error:
                self._say(Failed(str(error)))
                _leave(2)
            give_way()
            self._say(Ready(facts))
            self._loop.run()
        except ApiGone:
            _leave(0)
        except NotAMessage as error:
            print(f"bankfull: the engine stops: the data on its socket is not a message: {error}", file=sys.stderr)
            _leave(1)

    def _until_gone(self) -> None:
        """Runs on a thread: the process exits with its API, even in the middle of a step. Nothing else wakes the
        thread."""
        try:
            poll = select.poll()
            poll.register(self._connection, getattr(select, "POLLRDHUP", select.POLLHUP))
            poll.poll()
        except BaseException as error:
            _give_up("bankfull-watcher", error)
        _leave(0)

    def _load(self, wanted: Configure) -> Facts:
        self._say(LoadingPhase(f"loading {wanted.model}"))
        from bankfull.choices import SEPARATE
        from bankfull.familiar import configure
        from bankfull.llm import LLM, load
        from bankfull.loop import EngineLoop
        from bankfull.ops.native import set_threads
        from bankfull.serve.engine.accounts import Explainer, known_ceilings

        if wanted.threads is not None:
            set_threads(wanted.threads)
        files = LoadedWeights(wanted)
        options: dict[str, Any] = {"step_ms": STEP_MS, **wanted.options}
        if not {"policy", "scheduling_policy", "schedule_policy", "batching"} & options.keys():
            options["policy"] = "priority"  # batch work yields to online requests
        also = () if wanted.exchange is None else (("--separate", SEPARATE),)
        llm = LLM(wanted.model, loaded=load(wanted.model, *configure(options), also=also))
        if (followers := llm.loaded.engine.runner.followers) is not None:
            threading.Thread(
                target=_until_lost, args=(followers.wait_lost,), name="bankfull-ranks", daemon=True
            ).start()
        self._front = llm.loaded.frontend
        self._front.collects = False  # the API has the deltas
        self._loop = EngineLoop(self._front, self._tell, self._inbox)
        if wanted.exchange is not None:
            self._exchange = ExchangeEnd(llm, wanted.exchange, self._say, own_host(self._connection))
        start = llm.loaded.start
        self._say(LoadingPhase("warming up" if start is None else f"warming up, loaded in {start}"))
        warm_up(llm)
        known = known_ceilings(llm)
        self._accounts, engine, loaded = Explainer(llm), self._front.engine, llm.loaded
        self._gauge = Gauge(engine, known[0] if known is not None else None, paced=wanted.tells_prefixes)
        scheduler, state = engine.scheduler, engine.scheduler.state
        if wanted.tells_prefixes:
            self._prefixes = PrefixReporter(state)
            self._begins = BeginReporter(engine, self._say)
        return Facts(
            name=wanted.model,
            max_len=llm.max_model_len,
            vocab=self._front.vocab,
            rows=scheduler.config.rows,
            pages=state.pages.size,
            page_tokens=loaded.layout.block_tokens,
            step_tokens=scheduler.config.step_tokens,
            dtype=str(loaded.build.dtype).removeprefix("torch."),
            device=loaded.device.kind,
            ceilings=known[1] if known is not None else None,
            groups=[(group.page_tokens, group.extent or 0) for group in loaded.layout.paged],
            snapshots=state.snapshots.block if state.snapshots is not None else 0,
            weights=files.fingerprint(),
            static_batch=scheduler.config.batch_size if scheduler.config.batching == "static" else 0,
            state={} if self._exchange is None else told_facts(state.facts.all(), loaded.layout),
            exchange_at=None if self._exchange is None else self._exchange.address,
            optional=self._gauge.load().optional,
        )

    def _say(self, message: FromEngine) -> None:
        try:
            self._outbox.send(pack(message))
        except ApiGone:
            _leave(0)

    # -- on the loop's thread

    def _take(self, message: ToEngine | MessageHead) -> None:
        match message:
            case Enqueue(submit=wanted):
                if size := preparation(wanted):
                    batch = wanted.priority >= BATCH_PRIORITY
                    work = DeskJob(wanted.tenant, size, batch, lambda: self._prepared(wanted), _untold)
                    self._prepare(wanted.id, work)
                else:
                    self._coming[wanted.id] = None
                    self._loop.post(lambda: self._check(wanted), wanted.tenant)
            case Later():
                job = DeskJob(
                    message.tenant, message.size, message.batch, lambda: self._prepared(unpacked(message)), _untold
                )
                self._prepare(message.id, job)
            case Abort():
                for request in message.ids:  # at once: it may be in preparation
                    if (left := self._coming.pop(request, None)) is not None:
                        self._desk.drop(left)
                self._loop.post(lambda: self._abort(message.ids))
            case Expect() | Ship() | Arrived():  # at once, on the loop's thread: a request that follows needs it
                self._exchanged(message)
            case ResetCache():
                self._loop.post(lambda: self._reset(message.id))
            case ShowPages():
                self._loop.post(lambda: self._show_pages(message.id))
            case Configure():
                self._configured = message
            case MessageHead(id=int(request)):
                self._say(Refused(request, "internal", "The engine cannot decode this request."))

    def _check(self, wanted: Submit) -> None:
        """Prepare it on the loop's thread, in its tenant's turn."""
        if wanted.id not in self._coming:
            return  # its client has left
        try:
            prepared = self._prepared(wanted)
        except Exception as error:
            self._refuse(_refusal(wanted.id, error))
        else:
            self._queue(*prepared)

    def _prepare(self, request: int, job: DeskJob) -> None:
        """Prepare it on a thread of the desk."""

        def tell(made: tuple[Submit, Pending], error: BaseException | None) -> None:
            if error is None:
                self._loop.post(lambda: self._queue(*made), job.owner)
            else:
                refusal = _refusal(request, error)
                self._loop.post(lambda: self._refuse(refusal), job.owner)

        job.tell = tell
        if self._begins is not None:
            job.work = self._begins.preparing(request, job.work)
        self._coming[request] = job
        try:
            self._desk.put(job)
        except Busy as error:
            self._refuse(Refused(request, "busy", str(error)))

    def _prepared(self, wanted: Submit) -> tuple[Submit, Pending]:
        """Prepare a request, on any thread."""
        if wanted.explain:
            self._accounts.prepare()
        return wanted, self._front.prepare(wanted)

    def _queue(self, wanted: Submit, pending: Pending) -> None:
        if wanted.id not in self._coming:
            return  # its client has left
        del self._coming[wanted.id]
        try:
            self._front.queue(pending)
        except Exception as error:
            self._say(_refusal(wanted.id, error))
            return
        resumed = sum(len(tokens) for i, tokens in enumerate(wanted.generated) if i not in wanted.finished)
        self._gauge.queued(wanted.id, len(wanted.prompt) + resumed)
        if wanted.explain:
            self._explained.add(wanted.id)
            self._accounts.follow(wanted.id, pending)
        if wanted.pool is not None:
            self._pools[wanted.id] = wanted.pool
        if wanted.hands_over:
            self._handing[wanted.id] = set(range(len(pending.samples))) - set(wanted.finished)
        if self._exchange is not None:
            self._exchange.queued(wanted.id, wanted.expected)

    def _exchanged(self, message: Expect | Ship | Arrived) -> None:
        if self._exchange is None:
            return
        match message:
            case Expect():
                self._exchange.expect(message)
            case Ship():
                self._exchange.ship(message)
            case Arrived():
                self._exchange.arrived(message)

    def _refuse(self, refusal: Refused) -> None:
        if refusal.id in self._coming:  # else its client has left
            del self._coming[refusal.id]
            self._say(refusal)

    def _abort(self, requests: list[int]) -> None:
        for request in requests:
            if request in self._front.pending:
                self._front.abort(request)
                self._front.pending.pop(request, None)
                self._forget(request)
            if self._exchange is not None:
                self._exchange.drop(request)

    def _forget(self, request: int) -> None:
        self._gauge.gone(request)
        self._pools.pop(request, None)
        self._handing.pop(request, None)
        if self._exchange is not None:
            self._exchange.gone(request)
        if request in self._explained:
            self._explained.discard(request)
            self._accounts.forget(request)

    def _reset(self, question: int) -> None:
        state = self._front.engine.scheduler.state
        freed = state.pages.census().cached
        state.forget(everywhere=True)
        self._say(Forgotten(question, freed))

    def _show_pages(self, question: int) -> None:
        self._say(PagesShown(question, page_tables_of(self._front.engine.scheduler)))

    def _tell(self, deltas: list[Delta]) -> None:
        # Several samples of a request may end in one step.
        ended = dict.fromkeys(delta.request_id for delta in deltas if delta.finish_reason is not None)
        done = [self._done(request) for request in ended if self._front.pending[request].result.finished]
        if self._handing:
            done += self._hand_over(deltas)
        load = self._gauge.load()
        told = (load.running, load.waiting, load.waiting_tokens, load.pages_used, load.steps)
        prefixes = None if self._prefixes is None else self._prefixes.report(idle=not self._front.engine.busy)
        if deltas or told != self._told or prefixes is not None:
            self._told = told
            step = StepMessage(deltas, done, load, prefixes)
            try:
                self._say(step)
            except ValueError:
                self._send_in_parts(step)

    def _send_in_parts(self, step: StepMessage) -> None:
        """Prompt logprobs may be too large for one message, or even for one per request."""
        if step.prefixes is not None:
            self._say(StepMessage([], [], step.load, step.prefixes))
        parts = [(delta.request_id, StepMessage([delta], [], step.load)) for delta in step.deltas]
        parts += [(done.id, StepMessage([], [done], step.load)) for done in step.done]
        for request, part in parts:
            try:
                self._say(part)
            except ValueError:
                self._abort([request])
                self._say(Refused(request, "request", "The answer is too long to be sent; ask for fewer logprobs."))

    def _hand_over(self, deltas: list[Delta]) -> list[RequestDone]:
        """Requests whose samples all have a token leave the engine, before the next step."""
        left = []
        for delta in deltas:
            lacking = self._handing.get(delta.request_id)
            if lacking is not None and (delta.token_ids or delta.finish_reason is not None):
                lacking.discard(delta.index)
                if not lacking:
                    self._front.abort(delta.request_id)
                    left.append(self._done(delta.request_id, handed=True))
        return left

    def _done(self, request: int, handed: bool = False) -> RequestDone:
        pending: Pending = self._front.pending[request]
        pool = self._pools.get(request)
        embedding = None
        if pool is not None and pending.pooled and pending.samples[0].output.error is None:
            from bankfull.llm import embedding_of

            embedding = embedding_of(pending, pool, normalize=True)
        account = self._accounts.finish(request, pending) if request in self._explained else None
        self._forget(request)
        result = self._front.take(request)
        metrics = result.metrics
        lines = None
        if pending.params.prompt_logprobs is not None:
            from bankfull.serve.engine.prompt_lines import pack_lines

            lines = pack_lines(result.prompt_token_ids, pending.prompt_logprobs)
        return RequestDone(
            request,
            metrics.queue,
            metrics.ttft,
            metrics.finished or 0.0,
            metrics.cached_tokens,
            metrics.output_tokens,
            lines,
            embedding,
            account,
            pending.request.kept,
            handed,
        )


def warm_up(llm: LLM) -> None:
    """Run what a first request would: a prompt, greedy and sampled tokens. Then reset the counters and the cache."""
    from bankfull.engine import Totals
    from bankfull.sample.params import SamplingParams

    length = min(WARM_PROMPT, llm.max_model_len - WARM_TOKENS)
    if length < 1:
        return
    how = {"max_tokens": WARM_TOKENS, "ignore_eos": True, "detokenize": True}
    prompts = [[(number + offset) % llm.loaded.frontend.vocab for number in range(length)] for offset in range(2)]
    for temperature in (0.0, 1.0):
        llm.generate(prompts, SamplingParams(temperature=temperature, seed=1, **how))  # type: ignore[arg-type]
    engine = llm.loaded.frontend.engine
    engine.scheduler.state.forget()
    engine.totals = Totals()


def give_way() -> None:
    """Lower the priority of the process: the API and the clients go first. Where each thread has a priority of its own,
    of all threads: those of the kernels exist already."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [0]
    wanted = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    for thread in threads:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread, wanted)


def _untold(made: Any, error: BaseException | None) -> None:
    """Placeholder for `tell` until the job is queued."""


def _refusal(request: int, error: BaseException) -> Refused:
    """An error in the preparation of a request fails only that request."""
    if isinstance(error, RequestError):
        return Refused(request, "request", str(error))
    print(f"bankfull: request {request} could not be prepared: {error!r}", file=sys.stderr)
    return Refused(request, "internal", "The engine could not prepare this request.")


def _give_up(thread: str, error: BaseException) -> NoReturn:
    """A thread that the process needs has failed: it exits with the reason, and the API starts another one."""
    print(f"bankfull: the engine stops, because its thread {thread} has failed: {error!r}", file=sys.stderr)
    _leave(1)


def _until_lost(wait_lost: Callable[[], str]) -> None:
    """Runs on a thread: the process exits as soon as a rank of the model is lost, idle or in the middle of a step, so
    that the API starts another one at once."""
    print(f"bankfull: the engine stops: {wait_lost()}", file=sys.stderr)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """Exit at once, from any thread: nothing needs an orderly end."""
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    # Signals are for the API: it ends after the running requests and then closes the socket, or reloads its files.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    leave_out()
    try:
        if len(sys.argv) > 2:
            PROGRESS.share(int(sys.argv[2]))
        if len(sys.argv) > 3:
            inherit(int(sys.argv[3]))
        Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except RankLost as error:  # no fault of this process: the API starts another one
        print(f"bankfull: the engine stops: {error}", file=sys.stderr)
        _leave(1)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _leave(1)


if __name__ == "__main__":
    main()
