"""The loop: plan -> step -> settle. One loop for every device, strategy and depth.

At depth 0 the host waits for each step. At depth 1 it plans and enqueues step t while the device still runs t - 1, then
settles t - 1, then enqueues sampling for t with the grammar masks that follow from t - 1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future as HostFuture
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bankfull.decode.draft_counts import DraftCounts
from bankfull.decode.speculating import Speculating
from bankfull.decode.strategy import Strategy
from bankfull.errors import BankfullError
from bankfull.runtime.device import Future
from bankfull.runtime.exhausted import lacks_memory, needs_more_memory
from bankfull.runtime.runner import Runner
from bankfull.sched.scheduler import Drafts, Scheduler
from bankfull.types import Finish, Guess, Output, Request, StepPlan, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from bankfull.decode.drafting import Drafting
    from bankfull.decode.speculating import Chooser
    from bankfull.runtime.device_runner import DeviceRunner
    from bankfull.sample.grammar import MaskPool, Matcher
    from bankfull.sample.params import SamplingParams

Key = tuple[Hashable, int]
"""A request's id and the number of its sample."""
RunnerKind = TypeVar("RunnerKind", bound=Runner[Any])


@dataclass(slots=True)
class Totals(DraftCounts):
    """Running totals, for meters and for the summary of a run."""

    steps: int = 0
    tokens: int = 0
    """Tokens computed, drafts included."""
    sampled: int = 0
    """Tokens generated."""
    busy: float = 0.0
    """Seconds inside `step`."""
    drafting: float = 0.0
    """Seconds in which the host looked for draft tokens."""


class Engine(Generic[RunnerKind]):
    def __init__(
        self,
        scheduler: Scheduler,
        runner: RunnerKind,
        strategy: Strategy,
        depth: int,
        clock: Callable[[], float] = time.monotonic,
        drafting: Drafting | None = None,
        adaptive: Chooser | None = None,
    ) -> None:
        """`drafting`: finds draft tokens on the host, if any. `adaptive`: chooses the rows that the strategy drafts
        for, and how many of its drafts are verified; without it, as many as it proposes."""
        self.scheduler, self.runner, self.strategy, self.depth = scheduler, runner, strategy, depth
        self.drafting, self.adaptive = drafting, None if adaptive is None else Speculating(adaptive, strategy)
        self.started: dict[Hashable, float] = {}
        """Request id -> time at which it first got a row; the caller removes entries."""
        self.totals = Totals()
        self.on_launch: list[Callable[[StepPlan], None]] = []
        """Called with every planned step just before it is launched."""
        self.on_settle: list[Callable[[StepPlan, StepResult], None]] = []
        """Called with every step and its results when they have arrived, before they are processed."""
        self.draft_ways: Mapping[str, bool | None] = {}
        """Ways of drafting that a request may choose (`SpeculativeChoice.ways`)."""
        self.no_drafts = "it is off" if drafting is None and strategy.idle else ""
        if strategy.canvas is not None:
            self.no_drafts = "the model denoises blocks of tokens"
        """Why no draft tokens are verified, as a clause; empty if they may be."""
        self._clock = clock
        self._inflight: deque[tuple[StepPlan, Future[StepResult], float, dict[int, Key]]] = deque()
        """Launched steps that are not settled, with the time of their launch and the owners of their rows."""
        self._free_at = 0.0
        """Time at which the last step settled: from then on the device runs only the next one."""
        self._owner: dict[int, Key] = {}
        """Row -> the sequence that runs there."""
        self._grammars = Grammars()
        self._owed: list[Output] = []
        """Outputs of steps that settled between two calls of `step`."""
        self._guessed: dict[Key, tuple[Guess, int]] = {}
        """Guesses and numbers of drafts of the newest plan, for sequences under a grammar."""

    def add(self, request: Request, matchers: Sequence[Matcher] = ()) -> None:
        """Queue a request; `matchers`: its grammar, once for each sample, at the position of the sample's tokens."""
        self.scheduler.add(request)
        # Masks of drafts would come too late for the stages of a pipeline, which run several steps ahead.
        drafts = request.drafts != 0 and not (matchers and self.scheduler.stages > 1)
        if self.drafting is not None and drafts and request.lookup is not False:
            open_samples = request.samples - len(request.finished)
            self.drafting.expect(request.id, open_samples, request.reference, request.lookup is True)
        if self.adaptive is not None:
            self.adaptive.expect(request)
        for child, matcher in enumerate(matchers):
            if child not in request.finished:
                self._grammars.add((request.id, child), matcher)

    def check_sampling(self: Engine[DeviceRunner], params: SamplingParams, stop_ids: Collection[int] = ()) -> None:
        """Raises RequestError where a token id is outside of the model's vocabulary."""
        self.runner.rows.sampling.check(params, stop_ids)

    def allowed_mask(self: Engine[DeviceRunner], params: SamplingParams) -> Tensor | None:
        """The request's allowed tokens as a packed mask, for its `Job`; None if it may use all."""
        return self.runner.rows.sampling.allowed_mask(params)

    def abort(self, request_id: Hashable, reason: Finish = Finish.ABORT, child: int | None = None) -> list[Output]:
        """End a request, or one of its samples; allowed at any moment between two steps."""
        outputs = self.scheduler.abort(request_id, reason, child)
        self._drop(outputs)
        return outputs

    @property
    def generation(self) -> int:
        """How often the model's weights were written since it was loaded."""
        return self.scheduler.state.generation

    def change_weights(self, commit: Callable[[], None], weights: str, restarts: bool) -> float:
        """Call `commit` between two steps, with none in flight: from then on the model has other weights. `weights`:
        their identity. `restarts`: running sequences are computed anew. Returns the seconds that it took."""
        while self._inflight:
            self._owed += self.settle()
        begun = self._clock()
        commit()
        self.scheduler.generations.begin(weights, restarts)
        self.scheduler.stuck = False
        return self._clock() - begun

    @property
    def busy(self) -> bool:
        """Whether there is anything to run, to settle or to move between tiers."""
        return bool(self._inflight or self._owed) or self.scheduler.unfinished > 0 or self.scheduler.state.moving

    def step(self) -> list[Output]:
        """Plan, run and settle once; the outputs of the settled step. Empty when nothing could run: see `wake_at`."""
        begun = self._clock()
        outputs, self._owed = self._owed, []
        plan = self.scheduler.plan(self._drafts())
        if plan is None:
            if self._inflight:
                self._guessed = {}  # no planned step has these drafts
                outputs += self._settle()
        else:
            self._note(plan)
            if self.drafting is not None:
                self._guess(self.drafting, plan)
            if self.adaptive is not None:
                self.adaptive.choose(plan, self._owner)
            outputs += self._run(plan)
        if not self.busy:
            self.scheduler.state.check()
        self.totals.busy += self._clock() - begun
        return outputs

    def _run(self, plan: StepPlan) -> list[Output]:
        """Launch a step, and settle the one that is due. A launch that lacks memory gives up this step alone."""
        launched, outputs, lacking = self._clock(), list[Output](), ""
        try:
            step = self.runner.forward(plan)
        except (MemoryError, RuntimeError) as error:
            lacking = self._lacking(error)
        if lacking:  # outside of the handler, whose traceback holds what the step had allocated
            while self._inflight:
                outputs += self._settle()
            return outputs + self._give_up([plan])
        rows = (*(work.row for work in plan.work), *(enter.row for enter in plan.enter))
        owners = {row: self._owner[row] for row in rows} if self._grammars else {}
        self._inflight.append((plan, step, launched, owners))
        if len(self._inflight) > max(1, self.depth):
            outputs = self._settle()
        if not self._inflight:  # the step before it has failed, and this one with it
            return outputs
        try:
            self.runner.finish(step, self._grammars.masks(plan, self._owner))
        except (MemoryError, RuntimeError) as error:
            lacking = self._lacking(error)
        if lacking:
            del self._inflight[-1]
            return outputs + self._give_up([plan])
        self.scheduler.name_ahead()
        return outputs + self._settle() if self.depth == 0 else outputs

    def _lacking(self, error: Exception) -> str:
        """What the error says, if memory was lacking and the step can be given up; else the error is raised."""
        if not lacks_memory(error) or getattr(self.runner, "followers", None) is not None:
            raise error  # other ranks would run another step than this one
        return str(error) or type(error).__name__

    def _give_up(self, plans: Sequence[StepPlan]) -> list[Output]:
        """Abandon launched steps, the oldest first in `plans`, whose results do not count: their requests run again,
        one at a time, and the one that fails alone ends."""
        cause, first = None, plans[0]
        for plan in reversed(plans):
            cause = self.scheduler.abandon(plan)
        if not first.work:
            raise MemoryError("A step without work lacks memory.")
        if cause is None:
            return []
        tokens = sum(work.count for work in first.work)
        outputs = self.abort(cause, Finish.ERROR)
        for output in outputs:
            output.error = needs_more_memory(tokens)
        return outputs

    def _drafts(self) -> Drafts:
        drafting = self.drafting
        usual: Drafts = 0 if self.strategy.idle else self.strategy.width(self.scheduler.running)
        if self.adaptive is not None:
            usual = self.adaptive.verifies
        if drafting is None:
            return usual
        begun = self._clock()
        rows = self.scheduler.decoding()
        widths = drafting.widths({row: self._owner[row] for row in rows}, self.scheduler.config.step_tokens - len(rows))
        self.totals.drafting += self._clock() - begun
        if isinstance(usual, int):
            return {row: widths.get(row, usual) for row in rows} if usual else widths
        return {**usual, **widths}

    def _guess(self, drafting: Drafting, plan: StepPlan) -> None:
        """Send the host's guesses with the plan. A grammar needs a mask after each draft: with a step in flight, the
        drafts are known when that has settled."""
        for enter in plan.enter:
            drafting.open(enter.request, enter.child, enter.tokens)
        plan.guesses = drafting.guesses(plan)
        self._guessed = {}
        if self._grammars and plan.guesses:
            counts = {work.row: work.drafts for work in plan.work}
            self._guessed = {self._owner[guess.row]: (guess, counts[guess.row]) for guess in plan.guesses}
            if not self._inflight:
                for key in self._guessed:
                    self._grammars.draft(key, self._host_drafts(key))

    def _host_drafts(self, key: Key) -> tuple[list[int], list[int]]:
        """Tokens and parents of the drafts that the newest plan guesses for a sequence."""
        assert self.drafting is not None
        guess, count = self._guessed[key]
        return guess.drafts(self.drafting.known(key), count), list(range(-1, count - 1))

    def wake_at(self) -> float | None:
        """The time at which a step may find work although nothing arrives; None if only an arrival helps."""
        return self.scheduler.wake_at()

    @property
    def launched(self) -> list[StepPlan]:
        """Steps that have not settled, the oldest first."""
        return [plan for plan, *_ in self._inflight]

    def settle(self) -> list[Output]:
        """Settle the oldest launched step without planning another one."""
        begun = self._clock()
        self._guessed = {}  # no planned step has these drafts
        outputs = self._settle()
        self.totals.busy += self._clock() - begun
        return outputs

    def _settle(self) -> list[Output]:
        plan, step, launched, owners = self._inflight[0]
        lacking, result = "", None
        try:
            result = step.wait()
        except (MemoryError, RuntimeError) as error:
            lacking = self._lacking(error)
        if result is None:
            assert lacking, "a step has a result, or lacks memory for it"
            plans = self.launched
            self._inflight.clear()
            return self._give_up(plans)
        del self._inflight[0]
        now = self._clock()
        seconds = now - max(launched, self._free_at)
        self.scheduler.took(plan, seconds)
        self._free_at = now
        for work, tokens in zip(plan.work, result.tokens, strict=True) if not self.no_drafts else ():
            if work.drafts and not work.block:
                self.totals.verified(work.drafts, max(0, len(tokens) - 1))
        if self.adaptive is not None:
            self.adaptive.observe(plan, result, seconds)
        for observe in self.on_settle:
            observe(plan, result)
        outputs = self.scheduler.settle(plan, result)
        if self.drafting is not None:
            begun = self._clock()
            self.drafting.observe(plan, seconds)
            self.drafting.extend([((output.request, output.child), output.tokens) for output in outputs])
            self.totals.drafting += self._clock() - begun
        drafts = {owners[row]: drafts for row, drafts in result.drafts.items() if row in owners}
        if self._guessed and self.depth > 0:
            drafts.update({key: self._host_drafts(key) for key in self._guessed})
        for output in outputs if self._grammars else ():
            ended = output.finish is not None
            try:
                # A complete grammar ends its sequence: only an end token could follow, and those may be ignored. So
                # does whatever drafts behind it have led to: an end token, the limit, or no token at all.
                if self._grammars.advance(output, drafts):
                    output.finish, output.error = Finish.STOP, None
            except BankfullError as error:
                output.finish, output.error = Finish.ERROR, str(error)
            if output.finish is not None and not ended:
                self.scheduler.abort(output.request, output.finish, output.child)
        self.totals.sampled += sum([len(output.tokens) for output in outputs])
        # A sequence that has sampled nothing yet may verify drafts with its last prompt token, as siblings do.
        silent = drafts.keys() - {(output.request, output.child) for output in outputs if output.tokens}
        for key in silent:
            self._grammars.draft(key, drafts[key])
        self._drop(outputs)
        return outputs

    def _drop(self, outputs: list[Output]) -> None:
        """Forget the sequences that have ended."""
        if self._grammars:
            self._grammars.drop(outputs)
        if self.adaptive is not None:
            self.adaptive.drop(outputs)
        if self.drafting is not None:
            for output in outputs:
                if output.finish is not None:
                    self.drafting.close(output.request, output.child)

    def _note(self, plan: StepPlan) -> None:
        self.totals.steps += 1
        self.totals.tokens += plan.tokens
        for observe in self.on_launch:
            observe(plan)
        for enter in plan.enter:
            self._owner[enter.row] = (enter.request, enter.child)
            self.started.setdefault(enter.request, self._clock())


class Grammars:
    """Masks of constrained sequences, computed on threads while the device runs."""

    def __init__(self) -> None:
        self._matchers: dict[Key, Matcher] = {}
        self._pending: dict[Key, HostFuture[Any]] = {}
        self._pool: MaskPool | None = None

    def add(self, key: Key, matcher: Matcher) -> None:
        self._matchers[key] = matcher
        self._prepare(key)

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def _prepare(self, key: Key, drafts: tuple[list[int], list[int]] | None = None) -> None:
        from bankfull.sample.grammar import DraftTokens, MaskPool

        if self._pool is None:
            self._pool = MaskPool()
        self._pending[key] = self._pool.submit(self._matchers[key], None if drafts is None else DraftTokens(*drafts))

    def draft(self, key: Key, drafts: tuple[list[int], list[int]]) -> None:
        """The drafts of a sequence's next step, if it has a grammar: tokens and parents."""
        if key in self._matchers:
            self._finish_mask(key)
            self._prepare(key, drafts)

    def _finish_mask(self, key: Key) -> None:
        """Wait for the sequence's mask: a matcher is used by one thread at a time."""
        if (pending := self._pending.pop(key, None)) is not None:
            pending.exception()

    def masks(self, plan: StepPlan, owner: dict[int, Key]) -> dict[int, Any]:
        """Row -> mask, for the rows of this step that sample under a grammar; with drafts one for each of its lines."""
        if not self._matchers:
            return {}
        masks = {}
        for row, key in ((work.row, owner[work.row]) for work in plan.work if work.sample):
            if key in self._pending:
                try:
                    masks[row] = self._pending[key].result()
                except BankfullError:
                    masks[row] = 0  # allows no token: this request ends with an error, the others continue
        return masks

    def advance(self, output: Output, drafts: Mapping[Key, tuple[list[int], list[int]]]) -> bool:
        """Advance the matcher by a sequence's new tokens; True when the grammar allows no more. Tokens after that are
        removed: drafts behind a complete grammar are verified without one. `drafts`: of the sequences' next step."""
        key = (output.request, output.child)
        matcher = self._matchers.get(key)
        if matcher is None or not output.tokens:
            return False
        self._finish_mask(key)
        for i, token in enumerate(output.tokens):
            matcher.advance(token)
            if matcher.finished:
                del output.tokens[i + 1 :]
                if output.extra is not None:
                    del output.extra.logprobs[i + 1 :]
                return True
        if output.finish is None:
            self._prepare(key, drafts.get(key))
        return False

    def drop(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._matchers.pop((output.request, output.child), None)
                self._pending.pop((output.request, output.child), None)
