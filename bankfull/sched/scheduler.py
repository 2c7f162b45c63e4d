"""What runs in the next step. There are no phases: each sequence gets some of its missing tokens.

Prefill, its chunks, a prefix hit, decoding, verifying drafts and resuming after preemption are one rule: `computed`
tokens chase `known` ones within the step's token budget, decodes first. The scheduler plans from facts that may be one
step old (loop depth 1): lengths are lower bounds, pages are reserved for the worst case.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from itertools import count

from bankfull.config import SchedConfig
from bankfull.errors import RequestError
from bankfull.sched.policy import gate_of, rank_of
from bankfull.sched.sequence import Sequence
from bankfull.state.manager import Match, Reserved, SequenceState, StateManager
from bankfull.state.prefix import Chain
from bankfull.types import Enter, Finish, Output, PageEdit, Request, StepPlan, StepResult, Work


@dataclass(slots=True)
class Draft:
    """A step while it is being planned."""

    plan: StepPlan
    budget: int
    served: list[Sequence] = field(default_factory=list)
    """In the order of plan.work."""
    fixed: set[int] = field(default_factory=set)
    """Orders of sequences that this step already tells the runner about: too late to preempt them."""


class Scheduler:
    def __init__(
        self, config: SchedConfig, state: StateManager, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.state = state
        self.sealed = False
        """No more requests will come: an incomplete static batch need not wait."""
        self.preemptions = 0
        self._clock = clock
        self._rank = rank_of(config.policy)
        self._gate = gate_of(config)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._free_rows = list(range(config.rows - 1, -1, -1))
        self._leaving: list[int] = []
        self._inflight: deque[tuple[int, list[tuple[Sequence, int]]]] = deque()
        self._by_request: dict[Hashable, list[Sequence]] = {}
        self._orders = count()
        self._steps = count()

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it at once when it can never run."""
        if request.id in self._by_request:
            raise RequestError(f"Request id {request.id!r} is already in use; give every request an id of its own.")
        if not request.prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        if len(self._waiting) + request.samples > self.config.max_waiting:
            raise RequestError(f"{len(self._waiting)} requests are waiting already; try again later.")
        if request.generates and request.limit <= len(request.prompt):
            raise RequestError(
                f"The prompt has {len(request.prompt)} tokens and the limit is {request.limit}; shorten the prompt or "
                "raise the limit so that at least one token can follow."
            )
        need = self.state.frames_for(request.limit, self.config.step_tokens)
        if need > self.state.pages.size:
            raise RequestError(
                f"The request may grow to {request.limit} tokens, which need {need} pages of state, but the pool has "
                f"{self.state.pages.size}; lower max_tokens, shorten the prompt, or give the pool more memory."
            )
        now = self._clock()
        first: Sequence | None = None
        for child in range(request.samples):
            chain = Chain(request.salt, self.state.layout.block_tokens)
            seq = Sequence(request, child, next(self._orders), now, chain, list(request.prompt), parent=first)
            if first is None:
                first = seq
            else:
                first.children.append(seq)
            self._by_request.setdefault(request.id, []).append(seq)
            self._waiting.append(seq)

    def abort(self, request_id: Hashable, reason: Finish = Finish.ABORT, child: int | None = None) -> list[Output]:
        """End a request, or one of its samples, at any moment; launched work for it is dropped when it settles."""
        outputs = []
        for seq in list(self._by_request.get(request_id, ())):
            if child is None or seq.child == child:
                self._end(seq, reason)
                outputs.append(Output(request_id, seq.child, [], reason, cached=seq.cached))
        return outputs

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def wake_at(self) -> float | None:
        """The clock's time at which `plan` may find work although nothing has arrived since."""
        fresh = [s for s in self._waiting if not s.admitted]
        return self._gate.wake_at(len(fresh), min((s.queued_at for s in fresh), default=0.0))

    # -- planning

    def plan(self, drafts: int = 0) -> StepPlan | None:
        """The next step with up to `drafts` guesses per decoding row; None when nothing can run now."""
        step = Draft(StepPlan(next(self._steps)), self.config.step_tokens)
        stalled = False
        in_rank = sorted(self._running, key=self._rank)
        for seq in sorted(in_rank, key=lambda s: s.known - s.start > 1):
            if seq.state is not None:  # else it was preempted for one that ranks before it
                stalled |= not self._serve(seq, step, drafts)
        if not stalled:
            self._admit(step)
        plan = step.plan
        if not (plan.work or plan.enter or (self.state.pinned and not self._inflight)):
            return None
        plan.leave, self._leaving = self._leaving, []
        self.state.launch(plan.step)
        self._inflight.append((plan.step, [(seq, seq.generation) for seq in step.served]))
        return plan

    def _serve(self, seq: Sequence, step: Draft, drafts: int) -> bool:
        """Give `seq` its share of the step; False when it could use one but memory is short."""
        self._fork_children(seq, step)
        work = self._share_of(seq, step.budget, drafts)
        if work is None:
            return True
        reserved = self._reserve(seq, work, step)
        if reserved is None:
            return False
        step.plan.pages.extend(PageEdit(group, seq.row, first, pages) for group, first, pages in reserved.pages)
        work = replace(work, slots=reserved.slots)
        step.plan.work.append(work)
        step.served.append(seq)
        step.fixed.add(seq.order)
        step.budget -= work.count + work.drafts
        seq.flying.append(work)
        return True

    def _share_of(self, seq: Sequence, budget: int, drafts: int) -> Work | None:
        """The share of a step that `seq` can use, before memory is asked; None when it has to wait or has enough."""
        missing = seq.known - seq.start
        request = seq.request
        if missing <= 0 or budget <= 0 or (request.serial and seq.sampled):
            return None
        if request.generates and seq.known >= request.limit:
            return None  # the token that ends it is already on its way
        size = min(missing, budget)
        if seq.start < seq.prompt_len:
            size = self.state.cut(seq.start, size, seq.prompt_len)
        if seq.children:
            # Siblings fork where all but the last prompt token has run; until they have, nobody goes past that point.
            size = min(size, seq.prompt_len - 1 - seq.start)
            if size <= 0:
                return None
        sample = request.generates and size == missing
        guesses = 0
        if sample and size == 1:
            # Even if every draft in flight and every new one is accepted, the limit holds.
            guesses = max(0, min(drafts, budget - 1, request.limit - seq.known - seq.drafted - 1))
        return Work(seq.row, seq.start, size, guesses, sample)

    def _reserve(self, seq: Sequence, work: Work, step: Draft) -> Reserved | None:
        """Places for `work`, at the cost of sequences that rank after `seq` if need be; None = not this time."""
        assert seq.state is not None
        self.state.forget_before(seq.state, seq.start)
        upto = seq.start + seq.drafted + work.count + work.drafts
        while (reserved := self.state.reserve(seq.state, upto, 1 + work.drafts)) is None:
            pages, slots = self.state.shortage(seq.state, upto, 1 + work.drafts)
            if pages <= self.state.pages.coming and slots <= self.state.slots.coming:
                return None  # quarantine ends soon: waiting is cheaper than throwing work away
            victim = self._last_running(step)
            if victim is None or self._rank(victim) <= self._rank(seq):
                return None
            self._preempt(victim)
        return reserved

    def _admit(self, step: Draft) -> None:
        """Take in waiting sequences in rank order. The first that does not fit ends it: nobody overtakes."""
        self._waiting.sort(key=self._rank)
        fresh = [s for s in self._waiting if not s.admitted]
        first_queued = min((s.queued_at for s in fresh), default=0.0)
        quota = self._gate.open(len(fresh), first_queued, self.running, self._clock(), self.sealed)
        for seq in list(self._waiting):
            if step.budget <= 0:
                return
            if seq.parent is not None or seq.row >= 0:
                continue  # waits for its sibling's prompt, or was forked from it a moment ago
            if not seq.admitted and quota <= 0:
                continue
            match = self._place_for(seq, step)
            if match is None:
                return
            quota -= not seq.admitted
            if not seq.admitted:
                seq.cached = match.length
            self._enter(seq, self.state.open(seq.chain, match), match.length, step)
            if not self._serve(seq, step, 0):
                return

    def _place_for(self, seq: Sequence, step: Draft) -> Match | None:
        """The cached prefix (maybe empty) to start from, once a row and pages for all known tokens are there."""
        limit = len(seq.tokens) - 1 if seq.request.reuse else 0
        while True:
            match = self.state.match(seq.chain, seq.tokens, limit)
            # The headroom keeps the newcomer from being preempted, or preempting, with the very next token.
            if self._free_rows and self.state.fits(match, len(seq.tokens), self.config.step_tokens, self.running):
                return match
            victim = self._last_running(step)
            if self.config.policy != "priority" or victim is None or victim.priority <= seq.priority:
                return None
            self._preempt(victim)

    def _enter(self, seq: Sequence, state: SequenceState, computed: int, step: Draft) -> None:
        """Give `seq` a row, and tell the runner all about it."""
        if not seq.admitted:
            self._gate.admitted()
        seq.admitted = True
        seq.state = state
        seq.computed = computed
        seq.row = self._free_rows.pop()
        self._waiting.remove(seq)
        self._running.append(seq)
        plan = step.plan
        plan.enter.append(
            Enter(seq.row, tuple(seq.tokens), computed, seq.prompt_len, seq.child, state.slot, seq.request.payload)
        )
        plan.pages.extend(PageEdit(g, seq.row, 0, tuple(table)) for g, table in enumerate(state.tables) if table)
        step.fixed.add(seq.order)

    def _fork_children(self, seq: Sequence, step: Draft) -> None:
        """Where all but the last prompt token has settled, siblings start on copies; one without room goes alone."""
        if not seq.children or seq.flying or seq.computed != seq.prompt_len - 1:
            return
        assert seq.state is not None
        for child in seq.children:
            child.parent = None
            forked = self.state.fork(seq.state, seq.computed) if self._free_rows else None
            if forked is not None:
                child.cached = seq.cached
                state, transfers = forked
                self._enter(child, state, seq.computed, step)
                step.plan.transfers.extend(transfers)
        seq.children = []

    def _last_running(self, step: Draft) -> Sequence | None:
        """Whom to preempt first."""
        return max((s for s in self._running if s.order not in step.fixed), key=self._rank, default=None)

    def _preempt(self, seq: Sequence) -> None:
        """Give up row and state; the tokens stay, and will be computed again."""
        self._give_up(seq)
        self._waiting.append(seq)
        self.preemptions += 1

    def _give_up(self, seq: Sequence) -> None:
        assert seq.state is not None
        self.state.release(seq.state)
        self._running.remove(seq)
        self._free_rows.append(seq.row)
        self._leaving.append(seq.row)
        seq.state = None
        seq.row = -1
        seq.computed = 0
        seq.flying.clear()
        seq.generation += 1

    # -- settling

    def settle(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """The oldest launched step has finished: its tokens become known, ends are found, places are let go."""
        step, served = self._inflight.popleft()
        assert step == plan.step == result.step, f"step {result.step} settles where {step} is due"
        self.state.settle(step, result.completed)
        outputs = []
        for i, (work, (seq, generation)) in enumerate(zip(plan.work, served, strict=True)):
            if seq.generation != generation:
                continue  # aborted, ended or preempted since: a token nobody waits for
            extra = result.extras[i] if result.extras else None
            output = self._settle_one(seq, work, step, result.tokens[i], result.errors.get(i))
            output.extra = extra
            if output.tokens or output.finish or extra is not None:
                outputs.append(output)
        return outputs

    def _settle_one(self, seq: Sequence, work: Work, step: int, tokens: list[int], error: str | None) -> Output:
        assert seq.state is not None
        output = Output(seq.request.id, seq.child, [], cached=seq.cached)
        seq.flying.pop(0)
        if error is not None:
            output.finish, output.error = Finish.ERROR, error
            self._end(seq, Finish.ERROR)
            return output
        accepted = max(0, len(tokens) - 1)
        seq.computed += work.count + accepted
        self.state.commit(seq.state, step, accepted)
        for token in tokens:
            seq.tokens.append(token)
            output.tokens.append(token)
            if token in seq.request.stop_ids:
                output.finish = Finish.STOP
            elif len(seq.tokens) >= seq.request.limit:
                output.finish = Finish.LENGTH
            if output.finish:
                break
        if not seq.request.generates and seq.computed >= seq.prompt_len:
            output.finish = Finish.STOP
        self.state.publish(seq.state, seq.tokens, min(seq.computed, len(seq.tokens)), seq.prompt_len)
        if output.finish:
            self._end(seq, output.finish)
        return output

    def _end(self, seq: Sequence, finish: Finish) -> None:
        seq.finish = finish
        if seq.state is not None:
            self._give_up(seq)
        else:
            self._waiting.remove(seq)
        for child in seq.children:
            child.parent = None  # nobody computes its prompt any more: it goes alone
        seq.children = []
        if seq.parent is not None:
            seq.parent.children.remove(seq)
        siblings = self._by_request[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.id]
