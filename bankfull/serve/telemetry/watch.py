"""The outermost layer of the API, where a request gets its id and its `Trace`, and the innermost one, where the work of
the engine is counted.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from bankfull.errors import BankfullError
from bankfull.fleet.attainment import RequestGoals
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.serve.api.errors import Refusal
from bankfull.serve.api.sse import SEND_BODY
from bankfull.serve.console.pages import PAGES, STATE_PATH, TABLES_PATH
from bankfull.serve.console.timelines import OpenLine, TimeLines
from bankfull.serve.engine.backend import Backend, Busy
from bankfull.serve.engine.wire import Facts, Load, PageTables, RequestDone
from bankfull.serve.guard.checks import App, Message, Receive, Scope, Send
from bankfull.serve.guard.keys import Keyring, TokenBucket
from bankfull.serve.guard.pin_quota import PinsExceeded
from bankfull.serve.telemetry.log import log_trace
from bankfull.serve.telemetry.metrics import ServiceMetrics
from bankfull.serve.telemetry.trace import Trace, current_trace, during
from bankfull.submit import Submit

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
QUIET_PATHS = frozenset({"/live", "/ready", "/health", "/metrics", STATE_PATH, TABLES_PATH, *PAGES})
"""Paths that machines poll, or a browser loads a dozen at once: counted, but logged only on errors."""


class Watch:
    """The outermost layer of plain ASGI."""

    def __init__(self, app: App, metrics: ServiceMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        identity = request_id(scope["headers"])
        trace = Trace(identity.decode(), scope["method"], scope["path"], time.monotonic())

        # No layer adds anything to a body, and a stream sends one for every token.
        scope[SEND_BODY] = send

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", identity)]
            await send(message)

        try:
            with during(trace):
                await self._app(scope, receive, echoing)
        finally:
            self._tell(trace, scope)

    def _tell(self, trace: Trace, scope: Scope) -> None:
        trace.route = route_of(scope)
        # A client that leaves before it was answered is 499 in the logs of many servers.
        trace.status = trace.status or 499
        self._metrics.http_requests.add(
            1, trace.method if trace.route else "", trace.route or "none", str(trace.status)
        )
        if trace.status >= 400 or trace.problem is not None or trace.route not in QUIET_PATHS:
            log_trace(trace, time.monotonic() - trace.arrived)


def request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The client's own id if it is safe in logs and headers, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return b"req-" + secrets.token_hex(12).encode()


def route_of(scope: Scope) -> str:
    """The path with every id replaced by its name; empty where no route matches."""
    if "endpoint" not in scope:
        return ""
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():
        path = path.replace(str(value), f"{{{name}}}", 1)
    return path


class WatchedBackend:
    """The engine as endpoints see it. Counts the work of each request, and charges it to the caller's key."""

    def __init__(self, inner: Backend, metrics: ServiceMetrics, keyring: Keyring) -> None:
        self._inner, self._metrics, self._keyring = inner, metrics, keyring
        self.lines = TimeLines(inner)

    @property
    def ready(self) -> bool:
        return self._inner.ready

    @property
    def facts(self) -> Facts | None:
        return self._inner.facts

    @property
    def load(self) -> Load | None:
        return self._inner.load

    @property
    def optional(self) -> Mapping[str, str]:
        return self._inner.optional

    @property
    def says(self) -> str:
        return self._inner.says

    @property
    def restarts(self) -> int:
        return self._inner.restarts

    @property
    def failed_loads(self) -> int:
        return self._inner.failed_loads

    async def page_tables(self) -> dict[str, PageTables]:
        return await self._inner.page_tables()

    async def reset_cache(self) -> int:
        return await self._inner.reset_cache()

    def expect(self, samples: int, priority: int = 0, tenant: str = "") -> None:
        with self._counting_refusals():
            self._inner.expect(samples, priority, tenant or self._tenant_of(current_trace()))

    def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        trace, params, length = current_trace(), submit.params, len(submit.prompt)
        batch = submit.priority >= BATCH_PRIORITY
        asked = time.monotonic()  # before the request is sent: the engine may run at once, on this very core
        with self._counting_refusals():
            most = length if submit.pool is not None else self._most_tokens(length, params)
            reserved = None if trace is None else self._reserve(trace, most, may_overdraw=batch)
            unpin: Callable[[], None] | None = None
            try:
                if trace is not None:
                    unpin = self._charge_pins(trace, submit)
                if not submit.tenant and (tenant := self._tenant_of(trace)):
                    submit = replace(submit, tenant=tenant)
                steps = self._inner.generate(submit)
            except BaseException:
                if reserved is not None:
                    reserved.settle(0)
                if unpin is not None:
                    unpin()
                raise
        line = None if trace is None else self.lines.open(trace, length, batch=batch)
        slo = self._metrics.slo
        goals = None if slo is None or batch or submit.pool is not None else slo.begin(asked)
        counted = self._metrics, trace, reserved, length, params.n, asked
        return CountedSteps(steps, *counted, batch=batch, line=line, goals=goals)

    def _tenant_of(self, trace: Trace | None) -> str:
        """The owner of the call's key; empty with at most one key, where there is nothing to share."""
        return "" if trace is None or trace.key is None or len(self._keyring) < 2 else trace.key.name

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except BankfullError as error:
            self._metrics.failures.add(1, type(error).__name__)
            raise

    def _most_tokens(self, prompt: int, params: SamplingParams) -> int:
        """The most tokens a request can cost: its prompt, and the longest answer of each sample."""
        facts = self._inner.facts
        room = 0 if facts is None else max(0, facts.max_len - prompt)
        return prompt + params.n * (room if params.max_tokens is None else min(params.max_tokens, room))

    def _reserve(self, trace: Trace, most: int, *, may_overdraw: bool) -> ReservedTokens | None:
        """None without a token budget. Lines of batches have waited before they began, and may overdraw."""
        if trace.key is None or (tokens := self._keyring.rate_limits(trace.key).tokens) is None:
            return None
        if not may_overdraw:
            if most > tokens.per_minute:
                raise Refusal(
                    f"This call may need {most} tokens, its prompt and all that may follow, and the key "
                    f"{trace.key.name} has {tokens.per_minute} per minute: set a smaller max_tokens, or send less.",
                    param="max_tokens",
                    code="token_budget_exceeded",
                )
            if (seconds := tokens.wait(most)) > 0:
                raise Busy(
                    f"This call may need {most} tokens, and the key {trace.key.name} has {tokens.left} left of its "
                    f"{tokens.per_minute} per minute; try again in {seconds:.1f} s, or with a smaller max_tokens.",
                    seconds,
                )
        return ReservedTokens(tokens, most)

    def _charge_pins(self, trace: Trace, submit: Submit) -> Callable[[], None] | None:
        """Count what the call pins against its key's quota; a function that takes it back. None without a quota."""
        if trace.key is None or (pins := self._keyring.rate_limits(trace.key).pins) is None:
            return None
        try:
            return pins.charge(submit.salt, submit.prompt, submit.keeps)
        except PinsExceeded as problem:
            name, most = trace.key.name, pins.most
            if problem.seconds is None:
                raise Refusal(
                    f"cache_control would pin {problem.wanted} tokens more, and the key {name} may pin {most}: set it "
                    "on a shorter prefix, or leave it out.",
                    param="cache_control",
                    code="pin_quota_exceeded",
                ) from None
            raise Busy(
                f"cache_control would pin {problem.wanted} tokens more, and the key {name} has pinned {problem.held} "
                f"of its {most}; try again in {problem.seconds:.1f} s, or leave cache_control out.",
                problem.seconds,
            ) from None


class ReservedTokens:
    """Tokens set aside for one request: the most it may need."""

    __slots__ = ("_bucket", "_most")

    def __init__(self, bucket: TokenBucket, most: int) -> None:
        self._bucket, self._most = bucket, most
        bucket.take(most)

    def settle(self, used: int) -> None:
        """Once, however the request ended: unused tokens are given back."""
        most, self._most = self._most, used
        self._bucket.give_back(most - used)


class CountedSteps:
    """A request's steps, counted as they pass. This runs for every token of every stream."""

    __slots__ = (
        "_asked",
        "_batch",
        "_ended",
        "_goals",
        "_last",
        "_line",
        "_metrics",
        "_prompt",
        "_reserved",
        "_samples",
        "_steps",
        "_trace",
        "_used",
    )

    def __init__(
        self,
        steps: AsyncIterator[list[Delta | RequestDone]],
        metrics: ServiceMetrics,
        trace: Trace | None,
        reserved: ReservedTokens | None,
        prompt: int,
        samples: int,
        asked: float,
        *,
        batch: bool = False,
        line: OpenLine | None = None,
        goals: RequestGoals | None = None,
    ) -> None:
        self._steps, self._metrics, self._trace = steps, metrics, trace
        self._reserved, self._used = reserved, prompt
        self._prompt, self._samples, self._batch, self._line = prompt, samples, batch, line
        self._asked = asked
        self._last: float | None = None
        self._ended = False
        self._goals = goals
        metrics.prompt_tokens.add(prompt)
        if batch:
            metrics.batch_prompt_tokens.add(prompt)
        if trace is not None:
            trace.prompt_tokens += prompt

    def __aiter__(self) -> CountedSteps:
        return self

    async def __anext__(self) -> list[Delta | RequestDone]:
        try:
            items = await self._steps.__anext__()
        except StopAsyncIteration:
            self._ended = True
            self._settle()
            raise
        except BaseException as error:
            self._fail(self._reason(error))
            raise
        fresh = 0
        for item in items:
            if isinstance(item, Delta):
                fresh += len(item.token_ids)
                if item.finish_reason is not None:
                    self._metrics.success.add(1, item.finish_reason)
                    if self._line is not None:
                        self._line.finish = item.finish_reason
            else:  # always the last item: the end needs all tokens counted
                if fresh:
                    self._count(fresh)
                    fresh = 0
                self._end(item)
        if fresh:
            self._count(fresh)
        return items

    async def aclose(self) -> None:
        self._fail("left")
        close = getattr(self._steps, "aclose", None)
        if close is not None:
            await close()

    def _count(self, fresh: int) -> None:
        now, metrics, line = time.monotonic(), self._metrics, self._line
        metrics.generation_tokens.add(fresh)
        if self._batch:
            metrics.batch_generation_tokens.add(fresh)
        if self._last is None:
            self._begin(fresh, now)
        elif not self._batch:
            metrics.between_tokens.observe(now - self._last)
        self._last = now
        if self._goals is not None:
            self._goals.tokens(now)
        if line is not None:
            line.tokens += fresh  # the trace gets the sum at the end
        self._used += fresh

    def _begin(self, fresh: int, now: float) -> None:
        """The first tokens have come."""
        if not self._batch:  # no client waits for those of a batch
            self._metrics.first_token.observe(now - self._asked)
            if self._trace is not None and self._trace.ttft is None:
                self._trace.ttft = now - self._trace.arrived
        if self._line is not None:
            self._line.begin(fresh, now)

    def __del__(self) -> None:
        self._settle()  # dropped without `aclose`

    def _settle(self) -> None:
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.settle(self._used)
        if self._goals is not None:
            self._goals.leave()

    def _end(self, done: RequestDone) -> None:
        self._ended = True
        self._metrics.observe_sizes(self._prompt, done.output_tokens, self._samples)
        if not self._batch:
            now = time.monotonic()
            self._metrics.observe_latency(done, now - self._asked)
            if self._goals is not None:
                self._goals.end(now, done.output_tokens, self._samples)
        self._settle()
        if self._trace is not None:
            self._trace.cached_tokens += done.cached_tokens
        if self._line is not None:
            self._line.end(done)

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, Exception):
            return type(error).__name__
        ended = None if self._trace is None else self._trace.ended
        return "left" if ended is None else type(ended).__name__

    def _fail(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._settle()
            self._metrics.failures.add(1, reason)
            if self._trace is not None:
                self._trace.problem = reason
            if self._line is not None:
                self._line.fail(reason)
