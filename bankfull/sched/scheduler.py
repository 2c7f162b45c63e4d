"""Plans each step. There are no phases: each sequence gets some of its missing tokens.

Prefill, chunked prefill, a prefix hit, decode, verification of drafts and resuming after preemption are one rule:
`computed` tokens catch up with `known` ones within the step's token budget, decodes first. The policy decides the order
and who gives way to whom (`policies`). Batch work comes after everything else, and gets nothing in a step that carries
an online prompt. Where several tenants want more than there is, each gets an equal share (`shares`). Facts may be one
step old (loop depth 1): lengths are lower bounds, and pages are reserved for the worst case.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import count

from bankfull.config import SchedConfig
from bankfull.errors import RequestError
from bankfull.sched.admission import AdmissionRoom
from bankfull.sched.blocked import Blocking
from bankfull.sched.canvas import Canvas
from bankfull.sched.gates import WaitingQueue, check_request
from bankfull.sched.generations import Generations
from bankfull.sched.isolation import Isolation
from bankfull.sched.pace import Pace, kinds_of
from bankfull.sched.parking import Parking
from bankfull.sched.policies import policy_of
from bankfull.sched.preemption import Preemption
from bankfull.sched.queue_facts import QueueFacts
from bankfull.sched.sequence import OrderedSequences, Sequence, adopt, settle_sequence, share_of, siblings_of, unsampled
from bankfull.sched.shares import COMPANY_STEPS, Tenants, batch_share
from bankfull.sched.step_builder import StepBuilder
from bankfull.state.manager import StateManager
from bankfull.state.sequence_state import Reserved, SequenceState
from bankfull.types import Finish, Output, PageEdit, Request, StepPlan, StepResult, Work

Drafts = int | Mapping[int, int]
"""The most draft tokens of each decoding row, or of single rows by their number."""
FORKS_PER_STEP = 8
"""Samples of one request that enter in one step, beside the first."""


class Scheduler:
    def __init__(
        self,
        config: SchedConfig,
        state: StateManager,
        clock: Callable[[], float] = time.monotonic,
        ahead: int = 0,
        canvas: Canvas | None = None,
    ) -> None:
        """`ahead`: KV slots that a proposer of drafts writes after the tokens of a step, for each row that samples.
        `canvas`: set for a diffusion model."""
        self._ahead, self.canvas, self.stages = ahead, canvas, 1
        self.config = config = config.suited()
        self.state, self.policy = state, policy_of(config)
        self._sealed, self.preemptions, self._prompt_limits = False, 0, config.prompt_limits
        self.stuck = False
        """Whether the last `plan` found nothing to run, and only an arrival or the time of `wake_at` changes that."""
        self.pace, self._clock = Pace(config.step_ms / 1e3), clock
        self.parking = Parking(state, self.pace, clock)
        self.pace.measured |= self.predicts
        self._waiting = WaitingQueue(self.policy.gate)
        self.parking.next_turn = self.policy.next_turn
        state.pins.clock = clock
        self._seconds = 0.0  # the device's time for the step that settles next
        self._running = OrderedSequences()
        self._room = AdmissionRoom(config, state, self.policy, self.parking, self._running, canvas)
        self._free_rows = list(range(config.rows - 1, -1, -1))
        self._leaving: list[int] = []
        self._inflight: deque[tuple[int, list[Sequence]]] = deque()
        self._by_request: dict[Hashable, list[Sequence]] = {}
        self._isolation = Isolation(self._by_request, canvas is not None)
        self._filling: list[Sequence] = []  # those of which the newest step computes several tokens
        self._tenants, self._blocking = Tenants(self.policy.fair), Blocking(clock)
        lists = self._waiting, self._running, self._free_rows
        self.facts = self.policy.facts = QueueFacts(state, self.parking, self._tenants, *lists)
        self._preemption = Preemption(config, state, self.policy, self._room, self._tenants, *lists, self.pace)
        self._preemption.preempt = self._preempt
        self.generations = Generations(state, self.parking, self._waiting, self._running, self._preempt)
        self._arrivals, self._steps = count(), count()
        self._company = -COMPANY_STEPS  # the last step at which there was online work

    def successor(self, config: SchedConfig, clock: Callable[[], float] | None = None) -> Scheduler:
        """A scheduler with another configuration over the same state; this one must be idle."""
        assert not self.unfinished and not self._inflight, "sequences would be lost"
        heir = Scheduler(config, self.state, clock or self._clock, self._ahead, self.canvas)
        heir._steps, heir._leaving = self._steps, self._leaving  # the state and the runner know the steps so far
        return heir

    # -- requests

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request, whose sequences are returned; raises RequestError if it can never run."""
        if request.id in self._by_request:
            raise RequestError(f"Request id {request.id!r} is already in use; give every request an id of its own.")
        check_request(request, self.waiting, self.config, self.state)
        if self.canvas is not None:
            self.canvas.check(request, self.config.step_tokens, self.state)
        now, batch = self._clock(), self.policy.is_batch(request)
        siblings = siblings_of(request, self.state, now, batch, self._arrivals)
        self.stuck = False
        for seq in siblings:
            seq.order = (batch, self.policy.rank(seq, now), seq.order[-1])
            self._waiting.arrive(seq)
        self._by_request[request.id] = siblings
        self._tenants.add(request.tenant, len(siblings), now)
        if self.canvas is None:  # else they share the prompt through the prefix cache, where it has one
            adopt(siblings)
        self._expect(siblings)
        return siblings

    def _expect(self, siblings: list[Sequence]) -> None:
        """Siblings that do not wait for another one may run from now on."""
        for seq in siblings:
            if seq.parent is None:
                self._blocking.begin(seq)

    def abort(self, request_id: Hashable, reason: Finish = Finish.ABORT, child: int | None = None) -> list[Output]:
        """End a request, or one of its samples, at any moment; launched work for it is dropped when it settles."""
        outputs = []
        for seq in list(self._by_request.get(request_id, ())):
            if child is None or seq.child == child:
                self._end(seq)
                self.stuck = False
                outputs.append(Output(request_id, seq.child, [], reason, cached=seq.cached, blocked=seq.blocked))
        return outputs

    @property
    def predicts(self) -> bool:
        """Whether it asks for prefill times that were not measured yet: of the policy, or to compare with copies."""
        return self.policy.predicts or self.state.tiers is not None

    @property
    def sealed(self) -> bool:
        """No more requests will come before the queued ones have ended: an incomplete static batch need not wait."""
        return self._sealed

    @sealed.setter
    def sealed(self, value: bool) -> None:
        self._sealed, self.stuck = value, False

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
        """When `plan` may find work although nothing has arrived since; None if only an arrival helps."""
        times = (self._waiting.wake_at() if self._waiting else None, self.state.wake_at())
        return min((time for time in times if time is not None), default=None)

    # -- planning

    def decoding(self) -> list[int]:
        """Rows of which only the newest token is missing: the next step may verify drafts there."""
        return [seq.row for seq in self._running if seq.missing <= 1]

    def plan(self, drafts: Drafts = 0) -> StepPlan | None:
        """The next step with up to `drafts` draft tokens per decoding row; None when nothing can run now."""
        quota = self._waiting.quota(self.running, self._clock(), self.sealed) if self._waiting else 0
        alone = self._waiting.only = self._isolation.alone
        tokens = self._isolation.budget(self.config.step_tokens)
        step = StepBuilder(StepPlan(next(self._steps)), tokens, quota, *self._prompt_limits)
        able = self._running if alone is None else [seq for seq in self._running if seq.request.id == alone]
        self._filling.clear()
        preemptions = self.preemptions
        if self.state.windowed:
            for seq in self._running:
                assert seq.state is not None
                self.state.forget_before(seq.state, seq.start)
        if self.state.pins.all:
            self.state.pins.advance()
        if self.state.tiers is not None:
            self.parking.advance(self._waiting, len(self._free_rows))
        if alone is None:
            self._preemption.for_waiting(step)
        if any(not line[0].batch for line in (self._running, self._waiting) if line):
            self._company = step.plan.step
        if not any(line[-1].batch for line in (self._running, self._waiting) if line):  # batch work is last in order
            self._fill(able, step, drafts)
        elif self._fill([s for s in able if not s.batch], step, drafts) and not step.prompts:
            step.batch = True
            self._fill([s for s in able if s.batch], step, drafts)
        plan = step.plan
        plan.transfers = self.state.moves.take_planned() if self.state.moves.under_way else []
        if not (plan.work or plan.enter or plan.transfers or (self.state.moves.under_way and not self._inflight)):
            # A sequence gave way to one that may start only now that it has gone, or others run before one that cannot.
            if self.preemptions != preemptions or (not self._inflight and self._isolation.skip()):
                return self.plan(drafts)
            self.stuck = not self._inflight
            return None
        plan.leave, self._leaving, self.stuck = self._leaving, [], False
        self.state.launch(plan.step)
        self._inflight.append((plan.step, step.served))
        return plan

    def name_ahead(self) -> None:
        """Hash the blocks that the newest step fills while the device works; otherwise `settle` would do it."""
        for seq in self._filling if self.state.prefix_cache else ():
            if seq.state is not None:  # else it has ended since
                seq.state.chain.extend(seq.tokens, min(seq.start, len(seq.tokens)))
        self._filling.clear()

    def _fill(self, running: list[Sequence], step: StepBuilder, drafts: Drafts) -> bool:
        """Serve these, decodes first, then admit more of their kind; False when one of them lacks memory."""
        decoding, filling = list[Sequence](), list[Sequence]()
        for seq in running if self.stages == 1 else unsampled(running):
            decodes = seq.missing <= 1 if self.canvas is None else self.canvas.decodes(seq)
            (decoding if decodes else filling).append(seq)
        rows = len(decoding)
        most = min(self.config.decode_rows or rows, -(-len(running) // self.stages))  # a step of each stage has a part
        if 0 < most < rows:
            decoding.sort(key=lambda seq: seq.turn)  # in turns
            rows = most
        if step.batch:
            left = self.config.decode_rows - step.decodes if self.config.decode_rows else rows
            rows, tokens = batch_share(self.config.step_tokens, rows, step.plan.step - self._company < COMPANY_STEPS)
            rows = max(0, min(rows, left))
            if self.canvas is not None:  # a block, or a sequence, runs as a whole or not at all
                tokens = max(tokens, 0, *map(self.canvas.least, running))
            decoding.sort(key=lambda seq: seq.turn)  # the one that has waited longest first
            step.budget = min(step.budget, tokens)
        step.spare = step.budget - min(rows, len(decoding))
        if self.pace.bound:
            online = len(step.served)  # batch work comes after it, and no user waits for batch work
            awaited = online if step.batch else len(decoding)
            shared = not step.batch and self._tenants.alternate(self._clock())
            step.room = self.pace.room(online + min(rows, len(decoding)), awaited > 0, shared)
        before = len(step.served)
        stalled = not self._serve_each(decoding, step, drafts, rows)
        step.decodes += len(step.served) - before
        if not self._tenants.compete:
            stalled |= not self._serve_each(filling, step, drafts)
            if not stalled:
                self._admit(step)
            return not stalled
        with step.budget_of(step.budget if step.room is None else step.room.tokens(False)):
            return self._fill_fairly(filling, step, drafts, stalled)

    def _fill_fairly(self, filling: list[Sequence], step: StepBuilder, drafts: Drafts, stalled: bool) -> bool:
        """Continue running prompts and admit others so that each tenant gets its share of the step's tokens."""
        decodes = len(step.served)
        waiting = [seq for seq in self._waiting if seq.parent is None and seq.batch == step.batch]
        shares = self._tenants.shares(filling, waiting, step.budget)
        for tenant, share in shares.items():
            with step.budget_of(share):
                stalled |= not self._serve_each([seq for seq in filling if seq.tenant == tenant], step, drafts)
                shares[tenant] = max(0, step.budget)
        claims = {seq.tenant: seq for seq in step.claims if seq.batch == step.batch}
        unserved = [seq for seq in filling if seq.turn != step.plan.step]
        self._admit_in_turn({tenant: shares.pop(tenant, 0) for tenant in claims}, step, unserved)
        if not stalled and all(seq.state is not None for seq in claims.values()):
            self._admit_in_turn(shares, step, unserved)
        # Tokens kept for a sequence that could not be admitted go to those whose share was zero.
        stalled |= not self._serve_each([seq for seq in filling if seq.turn != step.plan.step], step, drafts)
        for seq in step.served[decodes:]:
            self._tenants.served(seq.tenant, step.plan.step)
        return not stalled

    def _admit_in_turn(self, shares: dict[str, int], step: StepBuilder, unserved: list[Sequence]) -> None:
        """Each tenant gets its share of the budget and what those before it have left, then what all have left. Its
        running sequences come first: an admitted one could take the memory that they wait for."""
        later = sum(shares.values())
        for tenant, share in (*shares.items(), *((tenant, 0) for tenant in shares)):
            later -= share
            with step.budget_of(step.budget - later):
                of_tenant = [seq for seq in unserved if seq.tenant == tenant and seq.turn != step.plan.step]
                if self._serve_each(of_tenant, step, 0):
                    self._admit(step, tenant)

    def _serve_each(self, line: list[Sequence], step: StepBuilder, drafts: Drafts, most: int | None = None) -> bool:
        """Serve sequences of the line until the budget or `most` is reached; False when one of them lacks memory."""
        able = True
        last = len(step.served) + (len(line) if most is None else most)
        for seq in line:
            if step.budget <= 0 or len(step.served) >= last:
                break
            if seq.state is not None:  # else it was preempted for one before it in order
                able &= self._serve(seq, step, drafts)
        return able

    def _serve(self, seq: Sequence, step: StepBuilder, drafts: Drafts) -> bool:
        """Give `seq` its share of the step; False when it could use one but memory is short."""
        if self.canvas is not None:
            return self.canvas.serve(seq, step, self._insist)
        if seq.children:
            self._fork_children(seq, step)
        request, missing, budget = seq.request, seq.missing, step.budget
        timed, scored = (step.room, seq.scored) if missing > 1 else (None, False)
        if missing > 1:
            budget = min(budget, step.prompt_budget, budget if timed is None else timed.tokens(scored))
        size = share_of(seq, missing, budget, self.state)
        if size <= 0:
            return True
        assert seq.state is not None
        sample = size == missing and request.generates
        most = drafts if isinstance(drafts, int) else drafts.get(seq.row, 0)
        if most:
            # Even if every draft in flight and every new one is accepted, the limit holds.
            room, asked = request.limit - seq.known - seq.drafted - 1, request.drafts
            most = max(0, min(most, step.spare, room, most if asked is None else asked)) if sample and size == 1 else 0
        upto = seq.start + seq.drafted + size
        ahead = max(0, min(self._ahead, request.limit - upto - most)) if self._ahead and sample else 0
        reserved = self.state.reserve(seq.state, upto + most, 1 + most, ahead)
        if reserved is None:
            most = 0  # draft tokens are worth neither waiting nor preempting
            reserved = self._insist(seq, upto, step)
            if reserved is None:
                return False
        step.prompts |= not seq.batch and (missing > 1 or seq.start < seq.prompt_len)
        step.give(seq, Work(seq.row, seq.start, size, most, sample), reserved)
        if size > 1:
            self._filling.append(seq)
        if timed is not None:
            timed.take(size, scored)
        return True

    def _insist(self, seq: Sequence, upto: int, step: StepBuilder) -> Reserved | None:
        """Pages and slots for `seq`, by preemption if need be; None when it has to wait."""
        assert seq.state is not None
        while (reserved := self.state.reserve(seq.state, upto)) is None:
            pages, slots = self.state.shortage(seq.state, upto, 1)
            if self._preemption.coming(pages, slots):
                return None
            if self.parking.yield_memory(self._waiting):
                continue
            if self.state.pins.all and self.state.pins.relieve(pages, slots):
                continue
            able = [s for s in self._running if s.row not in step.fixed]
            contested = self._tenants.compete and not slots
            victim = self.policy.victim(seq, able, self._preemption.holdings(self._running) if contested else None)
            if victim is None:
                return None
            self._preempt(victim, for_memory=True)
        return reserved

    # -- admission

    def _admit(self, step: StepBuilder, tenant: str | None = None) -> None:
        """Admit waiting sequences, of this tenant or of any, in their order. The first that does not fit ends it: no
        sequence overtakes another."""
        if step.batch and any(not seq.batch and seq.parent is None for seq in self._waiting):
            return
        index, overtakes = 0, False
        while step.budget > 0 and self._free_rows:
            place = self._waiting.admissible(index, step.quota, tenant)
            if place is None:
                return
            index, seq = place, self._waiting[place]
            if seq.batch and not step.batch:
                return
            if step.room is not None and step.room.tokens(seq.request.scored) <= 0:
                return
            if self.state.tiers is not None and self.parking.awaits(seq):  # others may overtake it
                self._blocking.end(seq)
                index, overtakes = index + 1, True
                continue
            self._blocking.begin(seq)
            if (match := self._room.fitting(seq, self._waiting, overtakes)) is None:
                return
            if not seq.admitted:
                seq.cached = min(match.length, seq.prompt_len)
            if self.state.pins.all:
                self.state.pins.used(seq.chain, match.length)
            self._enter(seq, self.state.open(seq.chain, match), match.length, step)
            if not self._serve(seq, step, 0):
                return

    def _enter(self, seq: Sequence, state: SequenceState, computed: int, step: StepBuilder) -> None:
        """Give `seq` a row, and describe it to the runner."""
        self._waiting.leave(seq)
        self._blocking.end(seq)
        if not self._running:
            self._blocking.occupied()
        if seq.parked is not None or seq.fetch is not None:
            self.parking.forget(seq)
        if not seq.admitted:
            seq.admitted = True
            step.quota -= 1
            self.policy.gate.admitted()
        seq.begin(self._free_rows.pop(), state, computed)
        self._running.enter(seq)
        plan = step.plan
        plan.enter.append(seq.entry(state.slot))
        plan.pages.extend(PageEdit(g, seq.row, 0, tuple(table)) for g, table in enumerate(state.tables) if table)
        step.fixed.add(seq.row)

    def _fork_children(self, seq: Sequence, step: StepBuilder) -> None:
        """When all but the last prompt token has settled, siblings start on copies; those without room are scheduled
        on their own. Only a few start in each step: each costs the runner time that all other rows wait for."""
        if seq.computed != seq.prompt_len - 1:  # no work is in flight then: with children, none goes beyond that token
            return
        assert seq.state is not None
        entered = 0
        while seq.children and self._free_rows and (forked := self.state.fork(seq.state, seq.computed)) is not None:
            child = seq.children.pop(0)
            child.parent, child.cached, child.chain, child.kept = None, seq.cached, forked.chain, seq.kept
            self._enter(child, forked, seq.computed, step)
            entered += 1
            if entered == FORKS_PER_STEP and seq.children:
                return
        adopt(seq.children)
        self._expect(seq.children)
        seq.children = []

    # -- preemption and ends

    def _preempt(self, seq: Sequence, for_memory: bool = False, kept: bool = True) -> None:
        self.parking.park(seq, kept and self.canvas is None and not self._ahead, for_memory)  # a drafter may lag
        self._leave_row(seq)
        self._waiting.enter(seq)
        self._blocking.begin(seq)
        self.preemptions += 1

    def _leave_row(self, seq: Sequence) -> None:
        self._running.leave(seq)
        self._free_rows.append(seq.row)
        self._leaving.append(seq.row)
        seq.give_up()
        if not self._running:
            self._blocking.idle()

    def _end(self, seq: Sequence) -> None:
        if seq.state is not None:
            self.state.release(seq.state)
            self._leave_row(seq)
        else:
            self._waiting.leave(seq)
            self._blocking.end(seq)
            self.parking.forget(seq)
        adopt(seq.children)
        self._expect(seq.children)
        if seq.parent is not None:
            seq.parent.children.remove(seq)
        self._tenants.end(seq.tenant)
        self.policy.ended(seq)
        siblings = self._by_request[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.id]

    # -- settling

    def took(self, plan: StepPlan, seconds: float) -> None:
        """The oldest launched step has finished; `seconds`: the time the device spent on it alone."""
        self._seconds = seconds
        if self.pace.measured and plan.work:
            parts = zip(plan.work, self._inflight[0][1], strict=True)
            kinds = kinds_of([(w.count, s.request.scored and w.start < s.prompt_len - 1) for w, s in parts])
            self.pace.observe(*kinds, seconds)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """The oldest launched step has finished: its tokens become known, sequences end, pages are released."""
        step, served = self._inflight.popleft()
        assert step == plan.step == result.step, f"step {result.step} settles where {step} is due"
        self.state.settle(step, result.completed, result.failed)
        self.stuck = False
        outputs = []
        for i, (work, seq, tokens) in enumerate(zip(plan.work, served, result.tokens, strict=True)):
            if not seq.flying or seq.flying[0] is not work:
                continue  # aborted, ended or preempted since: the token is dropped
            extra = result.extras[i] if result.extras else None
            output = Output(seq.request.id, seq.child, [], None, None, extra, seq.cached, seq.blocked)
            if i not in result.errors:
                settle_sequence(seq, step, tokens, output, self.state)
            else:
                seq.fail(result.errors[i], step, tokens, output, self.state)
            if output.finish is not None:
                self._end(seq)
            if output.tokens or output.finish is not None or output.extra is not None:
                outputs.append(output)
        now = self._clock()
        self.rank_again(self.policy.after(plan, served, now, self._seconds), now)
        return outputs

    def abandon(self, plan: StepPlan) -> Hashable | None:
        """The newest launched step has failed: nothing of it has happened. Returns the cause, if that is certain."""
        step, served = self._inflight.pop()
        cause = self._isolation.suspect(zip(plan.work, served, strict=True))
        entered = {enter.row for enter in plan.enter}  # their state may be a copy that was never made
        for seq in [seq for seq in self._running if seq.row in entered or seq in served]:
            self._preempt(seq, kept=seq.row not in entered)
        self._leaving = list(dict.fromkeys((*plan.leave, *self._leaving)))
        self.state.settle(step, (), [transfer.id for transfer in plan.transfers if transfer.in_step])
        return cause

    def rank_again(self, changed: Iterable[Sequence], now: float) -> None:
        for seq in changed:
            if seq in self._by_request.get(seq.request.id, ()):  # else it has ended
                order = (seq.batch, self.policy.rank(seq, now), seq.order[-1])
                if order != seq.order:
                    (self._waiting if seq.state is None else self._running).reorder(seq, order)
