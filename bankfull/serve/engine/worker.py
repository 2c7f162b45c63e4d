"""The engine process: `python -m bankfull.serve.engine.worker FD [FILE]`. FD is its end of a private socket pair, FILE
where it writes its progress.

The main thread runs the engine's loop and reads, between steps, what the API says: no other thread has to be woken
before an idle engine begins. What takes long to prepare (grammars, long prompts, tables of many stop strings) has
threads of its own (`desk`), and is dropped there when it is aborted. Each step is answered by one message. The process
keeps nothing that must survive it: when the socket ends, it ends.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from bankfull.errors import BankfullError, RequestError
from bankfull.progress import PROGRESS
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.desk import Desk, Job
from bankfull.serve.engine.backend import Busy
from bankfull.serve.engine.outbox import ApiGone, Outbox
from bankfull.serve.engine.wire import (
    HEADER,
    Abort,
    Configure,
    Done,
    Facts,
    Failed,
    Forgotten,
    FromEngine,
    Later,
    Phase,
    Piece,
    Ready,
    Refused,
    ResetCache,
    Step,
    Stop,
    Submit,
    ToEngine,
    body_length,
    decoder,
    pack,
    preparation,
    unpacked,
)

if TYPE_CHECKING:
    from bankfull.frontend import Pending, Prepared
    from bankfull.llm import LLM
    from bankfull.outputs import Delta, Logprob

NICENESS = 5
"""Beside the API's: the engine would take every core that there is."""
MAX_PREPARING, MAX_PREPARING_PER_KEY = 32 << 20, 8 << 20
"""Characters and tokens of requests that wait to be prepared; more are refused with 429."""
MAX_JOBS_PER_KEY = 32
READ_BYTES = 64 << 10
READING_SECONDS = 0.002
"""Of a turn of the engine's loop, for messages: those who are being answered wait for the next step."""
SWITCH_SECONDS = 0.0005
"""How long the engine's thread waits at most for another one to give up the interpreter."""
STEP_MS = 250.0
"""That those who are being answered wait at most for somebody else's prompt, where the options do not say."""
WARM_PROMPT, WARM_TOKENS = 64, 4


class Head(msgspec.Struct):
    """What is left of a message that cannot be understood."""

    type: str = ""
    id: int | None = None


class Nonsense(Exception):
    """What the socket brought is no message."""


class Inbox:
    """What the API says, read on the engine's own thread: the bell of its loop. Other threads ring it by a pipe."""

    def __init__(self, connection: socket.socket, take: Callable[[ToEngine | Head], None]) -> None:
        self._connection, self._take = connection, take
        self._owner = threading.get_ident()
        self._rung, self._rings = os.pipe()
        for end in (self._rung, self._rings):
            os.set_blocking(end, False)
        self._news, self._more = select.poll(), select.poll()
        self._news.register(connection, select.POLLIN)
        self._news.register(self._rung, select.POLLIN)
        self._more.register(connection, select.POLLIN)
        self._read = bytearray()
        self._decode = decoder(ToEngine).decode
        self._decode_head = decoder(Head).decode

    def ring(self) -> None:
        if threading.get_ident() != self._owner:  # who posts from within `wait` is seen when that returns
            with suppress(BlockingIOError):  # rung often enough
                os.write(self._rings, b"!")

    def wait(self, seconds: float | None) -> None:
        """Takes what has come. Raises ApiGone, or Nonsense."""
        if self._whole() is not None:
            seconds = 0.0
        for file, _ in self._news.poll(None if seconds is None else math.ceil(1e3 * seconds)):
            if file == self._rung:
                os.read(self._rung, 4096)
            else:
                self._fill()
        ends = time.monotonic() + READING_SECONDS
        while (body := self._next()) is not None:
            self._take(self._understood(body))
            if time.monotonic() > ends:
                break

    def _fill(self) -> None:
        """At least one whole message, unless its end is slow to come."""
        while self._whole() is None:
            try:
                got = self._connection.recv(READ_BYTES)
            except OSError as error:
                raise ApiGone from error
            if not got:
                raise ApiGone
            self._read += got
            if self._whole() is None and not self._more.poll(math.ceil(1e3 * READING_SECONDS)):
                return

    def _whole(self) -> int | None:
        """Where the first message ends, if it is here."""
        if len(self._read) < HEADER:
            return None
        try:
            end = HEADER + body_length(self._read[:HEADER])
        except ValueError as error:
            raise Nonsense(error) from None
        return end if len(self._read) >= end else None

    def _next(self) -> bytearray | None:
        end = self._whole()
        if end is None:
            return None
        body = self._read[HEADER:end]
        del self._read[:end]
        return body

    def _understood(self, body: bytearray) -> ToEngine | Head:
        try:
            message: ToEngine = self._decode(body)
            return message
        except msgspec.ValidationError as error:
            head = self._head(body)
            if head is None or head.id is None:
                raise Nonsense(error) from None
            print(f"bankfull: a message of the API is not understood: {error}", file=sys.stderr)
            return head
        except msgspec.MsgspecError as error:
            raise Nonsense(error) from None

    def _head(self, body: bytearray) -> Head | None:
        try:
            head: Head = self._decode_head(body)
            return head
        except msgspec.MsgspecError:
            return None


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox = Inbox(connection, self._take)
        self._outbox = Outbox(connection, _give_up)
        self._configured: Configure | None = None
        self._desk = Desk(
            "bankfull-prepare",
            most_size=MAX_PREPARING,
            most_size_per_key=MAX_PREPARING_PER_KEY,
            most_jobs_per_key=MAX_JOBS_PER_KEY,
            what="requests with grammars or long prompts",
        )
        self._coming: dict[int, Job | None] = {}
        """Requests on their way into the engine, until they are queued; what was aborted is here no more."""
        self._pools: dict[int, str] = {}
        self._told: tuple[int, ...] = ()

    def run(self) -> None:
        threading.Thread(target=self._until_gone, name="bankfull-watcher", daemon=True).start()
        try:
            while self._configured is None:
                self._inbox.wait(None)
            try:
                facts = self._load(self._configured)
            except BankfullError as error:
                self._say(Failed(str(error)))
                _leave(2)
            give_way()
            self._say(Ready(facts))
            self._loop.run()
        except ApiGone:
            _leave(0)
        except Nonsense as error:
            print(f"bankfull: the engine stops, because its socket brought nonsense: {error}", file=sys.stderr)
            _leave(1)

    def _until_gone(self) -> None:
        """On a thread: the process ends with its API, in the middle of a step too. It is woken by nothing else."""
        try:
            poll = select.poll()
            poll.register(self._connection, getattr(select, "POLLRDHUP", select.POLLHUP))
            poll.poll()
        except BaseException as error:
            _give_up("bankfull-watcher", error)
        _leave(0)

    def _load(self, wanted: Configure) -> Facts:
        self._say(Phase(f"loading {wanted.model}"))
        from bankfull.llm import LLM
        from bankfull.loop import EngineLoop
        from bankfull.ops.native import set_threads
        from bankfull.serve.engine.accounts import Accounts
        from bankfull.serve.engine.gauge import Gauge, known_ceilings

        if wanted.threads is not None:
            set_threads(wanted.threads)
        options: dict[str, Any] = {"step_ms": STEP_MS, **wanted.options}
        if not {"policy", "scheduling_policy"} & options.keys():
            options["policy"] = "priority"  # batch work gives way
        llm = LLM(wanted.model, **options)
        self._front = llm.loaded.frontend
        self._front.names_prompts = False  # the API does
        self._loop = EngineLoop(self._front, self._tell, self._inbox)
        start = llm.loaded.start
        self._say(Phase("warming up" if start is None else f"warming up, loaded in {start}"))
        warm_up(llm)
        known = known_ceilings(llm)
        self._accounts = Accounts(llm)
        self._gauge = Gauge(llm, known[0] if known is not None else None)
        loaded = llm.loaded
        scheduler = self._front.engine.scheduler
        return Facts(
            name=wanted.model,
            max_len=llm.max_model_len,
            vocab=self._front.vocab,
            rows=scheduler.config.rows,
            pages=scheduler.state.pages.size,
            page_tokens=loaded.layout.block_tokens,
            step_tokens=scheduler.config.step_tokens,
            dtype=str(loaded.build.dtype).removeprefix("torch."),
            device=loaded.device.kind,
            ceilings=known[1] if known is not None else None,
        )

    def _say(self, message: FromEngine) -> None:
        try:
            self._outbox.send(pack(message))
        except ApiGone:
            _leave(0)

    # -- on the loop's thread

    def _take(self, message: ToEngine | Head) -> None:
        match message:
            case Submit():
                size = preparation(message)
                if size:
                    batch = message.priority >= BATCH_PRIORITY
                    work = Job(message.tenant, size, batch, lambda: self._prepared(message), _nobody)
                    self._prepare(message.id, work)
                else:
                    self._check(message)
            case Later():
                job = Job(
                    message.tenant, message.size, message.batch, lambda: self._prepared(unpacked(message)), _nobody
                )
                self._prepare(message.id, job)
            case Abort():
                for request in message.ids:  # at once: it may be prepared right now, or wait for that
                    if (left := self._coming.pop(request, None)) is not None:
                        self._desk.drop(left)
                self._loop.post(lambda: self._abort(message.ids))
            case ResetCache():
                self._loop.post(lambda: self._reset(message.id))
            case Configure():
                self._configured = message
            case Stop():
                _leave(0)
            case Head(id=int(request)):
                self._say(Refused(request, "internal", "The engine does not understand this request."))

    def _check(self, wanted: Submit) -> None:
        """Prepare it here and now."""
        self._coming[wanted.id] = None
        try:
            made = self._prepared(wanted)
        except Exception as error:
            refusal = _refusal(wanted.id, error)
            self._loop.post(lambda: self._refuse(refusal), wanted.tenant)
        else:
            self._loop.post(lambda: self._queue(*made), wanted.tenant)

    def _prepare(self, request: int, job: Job) -> None:
        """By a thread, when its turn comes."""

        def tell(made: tuple[Submit, Prepared], error: BaseException | None) -> None:
            if error is None:
                self._loop.post(lambda: self._queue(*made), job.owner)
            else:
                refusal = _refusal(request, error)
                self._loop.post(lambda: self._refuse(refusal), job.owner)

        job.tell = tell
        self._coming[request] = job
        try:
            self._desk.put(job)
        except Busy as error:
            self._refuse(Refused(request, "busy", str(error)))

    def _prepared(self, wanted: Submit) -> tuple[Submit, Prepared]:
        """On any thread."""
        if wanted.explain:
            self._accounts.prepare()
        return wanted, self._front.prepare(
            wanted.prompt,
            wanted.params,
            priority=wanted.priority,
            salt=wanted.salt,
            pool=wanted.pool,
            tenant=wanted.tenant,
        )

    def _queue(self, wanted: Submit, prepared: Prepared) -> None:
        if wanted.id not in self._coming:
            return  # its client has left
        del self._coming[wanted.id]
        try:
            self._front.queue(prepared, wanted.id)
        except Exception as error:
            self._say(_refusal(wanted.id, error))
            return
        self._gauge.queued(wanted.id, len(prepared.ids))
        if wanted.explain:
            self._accounts.follow(wanted.id, self._front.pending[wanted.id])
        if wanted.pool is not None:
            self._pools[wanted.id] = wanted.pool

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

    def _forget(self, request: int) -> None:
        self._gauge.gone(request)
        self._accounts.forget(request)
        self._pools.pop(request, None)

    def _reset(self, question: int) -> None:
        state = self._front.engine.scheduler.state
        freed = state.pages.census().cached
        state.forget()
        self._say(Forgotten(question, freed))

    def _tell(self, deltas: list[Delta]) -> None:
        pieces = [_piece(delta) for delta in deltas]
        # Several samples of a request may end in one step.
        ended = dict.fromkeys(delta.request_id for delta in deltas if delta.finish_reason is not None)
        done = [self._done(request) for request in ended if self._front.pending[request].result.finished]
        load = self._gauge.load()
        told = (load.running, load.waiting, load.waiting_tokens, load.pages_used, load.steps)
        if deltas or told != self._told:
            self._told = told
            step = Step(pieces, done, load)
            try:
                self._say(step)
            except ValueError:
                self._send_in_parts(step)

    def _send_in_parts(self, step: Step) -> None:
        """Log-probabilities of long prompts may be too much for one message, or even for one each."""
        parts = [(piece.id, Step([piece], [], step.load)) for piece in step.pieces]
        parts += [(done.id, Step([], [done], step.load)) for done in step.done]
        for request, part in parts:
            try:
                self._say(part)
            except ValueError:
                self._abort([request])
                self._say(Refused(request, "request", "The answer is too long to be sent; ask for fewer logprobs."))

    def _done(self, request: int) -> Done:
        from bankfull.llm import embedding_of
        from bankfull.serve.engine.prompt_lines import pack_lines

        pending: Pending = self._front.pending[request]
        pool = self._pools.get(request)
        embedding = None
        if pool is not None and pending.pooled:
            embedding = embedding_of(pending, pool, normalize=True)
        account = self._accounts.finish(request, pending)
        self._forget(request)
        result = self._front.take(request)
        metrics = result.metrics
        lines = None
        if pending.params.prompt_logprobs is not None:
            lines = pack_lines(result.prompt_token_ids, pending.prompt_logprobs)
        return Done(
            request,
            metrics.queue,
            metrics.ttft,
            metrics.finished or 0.0,
            metrics.cached_tokens,
            metrics.output_tokens,
            lines,
            embedding,
            account,
        )


def warm_up(llm: LLM) -> None:
    """Touch everything that a first request would: a prompt, greedy and sampled tokens. Leaves no trace."""
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
    """From here on the API and the clients go first. Where threads have priorities of their own, all of them: the
    kernels' threads are there already."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [0]
    wanted = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
    for thread in threads:
        with suppress(OSError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, thread, wanted)


def _nobody(made: Any, error: BaseException | None) -> None:
    """Listens to a job until it is put on the desk."""


def _refusal(request: int, error: BaseException) -> Refused:
    """Whatever happens while one request is prepared is that request's own trouble."""
    if isinstance(error, RequestError):
        return Refused(request, "request", str(error))
    print(f"bankfull: request {request} could not be prepared: {error!r}", file=sys.stderr)
    return Refused(request, "internal", "The engine could not prepare this request.")


def _piece(delta: Delta) -> Piece:
    logprobs = None
    if delta.logprobs is not None:
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        logprobs = [_chosen_first(token, line) for token, line in pairs]
    return Piece(
        delta.request_id,
        delta.index,
        delta.text,
        delta.token_ids,
        logprobs,
        delta.finish_reason,
        delta.stop_reason,
        delta.error,
    )


def _chosen_first(token: int, line: dict[int, Logprob]) -> dict[int, tuple[float, str]]:
    order = sorted(line, key=lambda other: other != token)
    return {other: (line[other].logprob, line[other].token) for other in order}


def _give_up(thread: str, error: BaseException) -> NoReturn:
    """A thread that the others rely on has failed: the process ends with the reason, and the API starts another."""
    print(f"bankfull: the engine stops, because its thread {thread} has failed: {error!r}", file=sys.stderr)
    _leave(1)


def _leave(status: int) -> NoReturn:
    """At once, from any thread: nothing here needs an orderly end."""
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    # Whoever stops the service stops the API, which lets running requests finish and then closes the socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent to the whole group, it is for the API to read its files again
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        if len(sys.argv) > 2:
            PROGRESS.share(int(sys.argv[2]))
        Worker(socket.socket(fileno=int(sys.argv[1]))).run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _leave(1)


if __name__ == "__main__":
    main()
