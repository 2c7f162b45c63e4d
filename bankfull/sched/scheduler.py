"""What runs in the next step. There are no phases: each sequence gets some of its missing tokens.

Prefill, its chunks, a prefix hit, decoding, verifying drafts and resuming after preemption are one rule: `computed`
tokens chase `known` ones within the step's token budget, decodes first. Batch work comes after all that, and in a step
that carries an online prompt not at all. Where several tenants want more than there is, each gets an equal part
(`shares`). The scheduler plans from facts that may be one step old (loop depth 1):
lengths are lower bounds, pages are reserved for the worst case.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from bankfull.config import SchedConfig
from bankfull.errors import RequestError
from bankfull.sched.pace import Pace, Room, kinds_of
from bankfull.sched.policy import COMPANY_STEPS, Rank, batch_share, gate_of, rank_of, yields_of
from bankfull.sched.sequence import Sequence
from bankfull.sched.shares import Holdings, first_of_each, parts_of, wants_of
from bankfull.state.manager import Match, Reserved, SequenceState, StateManager
from bankfull.state.prefix import Chain
from bankfull.types import Enter, Finish, Output, PageEdit, Request, StepPlan, StepResult, Work

FORKS_PER_STEP = 8
"""Samples of one request that enter in one step, beside the first."""

_rank = attrgetter("rank")


@dataclass(slots=True)
class Sketch:
    """A step while it is being planned."""

    plan: StepPlan
    budget: int
    """Tokens that may still be given out."""
    quota: int
    """Newcomers that the gate lets in."""
    room: Room | None = None
    """What prompts may take of the step's time; None: all that the budget gives."""
    spare: int = 0
    """What drafts may take of the budget without delaying a decode."""
    batch: bool = False
    """Is it the turn of batch work?"""
    claims: list[Sequence] = field(default_factory=list)
    """Waiting sequences of tenants that have less than their part: until these are in, nobody else comes in."""
    prompts: bool = False
    """Does the step carry an online prompt, whose first token somebody waits for?"""
    served: list[Sequence] = field(default_factory=list)
    """In the order of plan.work."""
    fixed: set[int] = field(default_factory=set)
    """Rows that this step already tells the runner about: too late to preempt them."""

    @contextmanager
    def budget_of(self, tokens: int) -> Iterator[None]:
        """No more than so many tokens are given out in here."""
        kept = max(0, self.budget - tokens)
        self.budget -= kept
        try:
            yield
        finally:
            self.budget += kept


class Scheduler:
    def __init__(self, config: SchedConfig, state: StateManager, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config = config.suited()
        self.state = state
        self.sealed = False
        """No more requests will come: an incomplete static batch need not wait."""
        self.preemptions = 0
        self.pace = Pace(config.step_ms / 1e3)
        self._clock = clock
        self._gate = gate_of(config)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # both in the order of rank
        self._fresh: OrderedDict[Sequence, None] = OrderedDict()
        """Waiting sequences that never ran, in the order of arrival."""
        self._free_rows = list(range(config.rows - 1, -1, -1))
        self._leaving: list[int] = []
        self._inflight: deque[tuple[int, list[Sequence]]] = deque()
        self._by_request: dict[Hashable, list[Sequence]] = {}
        self._filling: list[Sequence] = []
        """Those of which the newest step computes several tokens."""
        self._tenants: Counter[str] = Counter()
        """Sequences of each tenant that have not ended."""
        self._turns: dict[str, int] = {}
        """The last step that carried prompts of a tenant; kept only while several tenants are there."""
        self._arrivals = count()
        self._steps = count()
        self._company = -COMPANY_STEPS
        """The last step that there was online work for."""

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request, or refuse it at once when it can never run."""
        self._refuse(request)
        now = self._clock()
        siblings = []
        for child in range(request.samples):
            chain = Chain(request.salt, self.state.layout.block_tokens)
            rank = rank_of(self.config.policy, request.priority, next(self._arrivals))
            yields = yields_of(self.config.policy, request.priority)
            seq = Sequence(request, child, rank, now, chain, list(request.prompt), yields)
            siblings.append(seq)
            self._fresh[seq] = None
            insort(self._waiting, seq, key=_rank)
        self._by_request[request.id] = siblings
        self._tenants[request.tenant] += len(siblings)
        _adopt(siblings)

    def _refuse(self, request: Request) -> None:
        if request.id in self._by_request:
            raise RequestError(f"Request id {request.id!r} is already in use; give every request an id of its own.")
        if not request.prompt:
            raise RequestError("The prompt is empty; give at least one token.")
        if request.samples < 1:
            raise RequestError(f"samples={request.samples!r} must be a whole number of at least 1.")
        if self.waiting + request.samples > self.config.max_waiting:
            raise RequestError(
                f"{self.waiting} sequences are waiting and {request.samples} more would exceed max_waiting="
                f"{self.config.max_waiting}; try again later."
            )
        if request.generates and request.limit <= len(request.prompt):
            raise RequestError(
                f"The prompt has {len(request.prompt)} tokens and the limit is {request.limit}; shorten the prompt or "
                "raise the limit so that at least one token can follow."
            )
        length = request.limit if request.generates else len(request.prompt)
        need = self.state.frames_for(length, self.config.step_tokens)
        if need > self.state.pages.size:
            raise RequestError(
                f"The request may grow to {length} tokens, which need {need} pages of state, but the pool has "
                f"{self.state.pages.size}; lower max_tokens, shorten the prompt, or give the pool more memory."
            )

    def abort(self, request_id: Hashable, reason: Finish = Finish.ABORT, child: int | None = None) -> list[Output]:
        """End a request, or one of its samples, at any moment; launched work for it is dropped when it settles."""
        outputs = []
        for seq in list(self._by_request.get(request_id, ())):
            if child is None or seq.child == child:
                self._end(seq)
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
        return self._gate.wake_at(len(self._fresh), self._first_queued())

    def _first_queued(self) -> float:
        return next(iter(self._fresh)).queued_at if self._fresh else 0.0

    @property
    def _contested(self) -> bool:
        """Is there more than one tenant to be fair to?"""
        return len(self._tenants) > 1 and self.config.policy == "priority"

    # -- planning

    def plan(self, drafts: int = 0) -> StepPlan | None:
        """The next step with up to `drafts` guesses per decoding row; None when nothing can run now."""
        step = Sketch(StepPlan(next(self._steps)), self.config.step_tokens, self._quota())
        self._filling.clear()
        if self.state.windowed:
            for seq in self._running:
                assert seq.state is not None
                self.state.forget_before(seq.state, seq.start)
        self._make_way(step)
        if any(not line[0].yields for line in (self._running, self._waiting) if line):
            self._company = step.plan.step
        if not self._has_batch():
            self._fill(self._running, step, drafts)
        elif self._fill([s for s in self._running if not s.yields], step, drafts) and not step.prompts:
            step.batch = True
            self._fill([s for s in self._running if s.yields], step, drafts)
        plan = step.plan
        if not (plan.work or plan.enter or (self.state.pinned and not self._inflight)):
            return None
        plan.leave, self._leaving = self._leaving, []
        self.state.launch(plan.step)
        self._inflight.append((plan.step, step.served))
        return plan

    def name_ahead(self) -> None:
        """Name the blocks that the newest step fills, which `settle` would otherwise do: now the device is working."""
        if self.state.prefix_cache:
            for seq in self._filling:
                if seq.state is not None:  # else it has ended since
                    seq.state.chain.extend(seq.tokens, min(seq.start, len(seq.tokens)))
        self._filling.clear()

    def _has_batch(self) -> bool:
        """Batch work ranks last."""
        return any(line[-1].yields for line in (self._running, self._waiting) if line)

    def _fill(self, running: list[Sequence], step: Sketch, drafts: int) -> bool:
        """Serve these, decodes first, then take in more of their kind; False when one of them lacks memory."""
        decoding: list[Sequence] = []
        filling: list[Sequence] = []
        for seq in running:
            (decoding if seq.missing <= 1 else filling).append(seq)
        rows = len(decoding)
        if step.batch:
            company = step.plan.step - self._company < COMPANY_STEPS
            rows, tokens = batch_share(self.config.step_tokens, rows, company)
            decoding.sort(key=lambda seq: seq.turn)  # whoever has waited longest first
            step.budget = min(step.budget, tokens)
        step.spare = step.budget - min(rows, len(decoding))
        if self.pace.bound:
            online = len(step.served)  # batch work comes behind it, and nobody waits for that
            awaited = online if step.batch else len(decoding)
            step.room = self.pace.room(online + min(rows, len(decoding)), awaited > 0)
        stalled = not self._serve_each(decoding, step, drafts, rows)
        if not self._contested:
            stalled |= not self._serve_each(filling, step, drafts)
            if not stalled:
                self._admit(step)
            return not stalled
        with step.budget_of(step.budget if step.room is None else step.room.tokens(False)):
            return self._fill_fairly(filling, step, drafts, stalled)

    def _fill_fairly(self, filling: list[Sequence], step: Sketch, drafts: int, stalled: bool) -> bool:
        """Go on with prompts and begin others so that each tenant gets its part of what the step has time for."""
        decodes = len(step.served)
        waiting = [seq for seq in self._waiting if seq.parent is None and seq.yields == step.batch]
        parts = parts_of(wants_of(filling, waiting), self._turns, step.budget)
        for tenant, part in parts.items():
            with step.budget_of(part):
                stalled |= not self._serve_each([seq for seq in filling if seq.tenant == tenant], step, drafts)
                parts[tenant] = max(0, step.budget)
        claims = {seq.tenant: seq for seq in step.claims if seq.yields == step.batch}
        self._admit_in_turn({tenant: parts.pop(tenant, 0) for tenant in claims}, step)
        if not stalled and all(seq.state is not None for seq in claims.values()):
            self._admit_in_turn(parts, step)
        # What was kept for somebody who could not come in is of use to those whose part was nothing.
        stalled |= not self._serve_each([seq for seq in filling if seq.turn != step.plan.step], step, drafts)
        for seq in step.served[decodes:]:
            self._turns[seq.tenant] = step.plan.step
        return not stalled

    def _admit_in_turn(self, parts: dict[str, int], step: Sketch) -> None:
        """Each tenant gets its part of the budget, and what those before it have left."""
        later = sum(parts.values())
        for tenant, part in parts.items():
            later -= part
            with step.budget_of(step.budget - later):
                self._admit(step, tenant)

    def _serve_each(self, line: list[Sequence], step: Sketch, drafts: int, most: int | None = None) -> bool:
        """Those of the line that the budget is enough for, `most` at most; False when one of them lacks memory."""
        able = True
        last = len(step.served) + (len(line) if most is None else most)
        for seq in line:
            if step.budget <= 0 or len(step.served) >= last:
                break
            if seq.state is not None:  # else it was preempted for one that ranks before it
                able &= self._serve(seq, step, drafts)
        return able

    def _serve(self, seq: Sequence, step: Sketch, drafts: int) -> bool:
        """Give `seq` its share of the step; False when it could use one but memory is short."""
        if seq.children:
            self._fork_children(seq, step)
        missing = seq.missing
        timed, scored = (step.room, seq.scored) if missing > 1 else (None, False)
        budget = step.budget if timed is None else min(step.budget, timed.tokens(scored))
        size = self._share_of(seq, missing, budget)
        if size <= 0:
            return True
        assert seq.state is not None
        sample = size == missing and seq.request.generates
        if drafts:
            # Even if every draft in flight and every new one is accepted, the limit holds.
            room = seq.request.limit - seq.known - seq.drafted - 1
            drafts = max(0, min(drafts, step.spare, room)) if sample and size == 1 else 0
        upto = seq.start + seq.drafted + size
        reserved = self.state.reserve(seq.state, upto + drafts, 1 + drafts)
        if reserved is None:
            drafts = 0  # guesses are worth no waiting, and nobody else's place
            reserved = self._insist(seq, upto, step)
            if reserved is None:
                return False
        for group, first, pages in reserved.pages:
            step.plan.pages.append(PageEdit(group, seq.row, first, pages))
        step.prompts |= not seq.yields and (missing > 1 or seq.start < seq.prompt_len)
        work = Work(seq.row, seq.start, size, drafts, sample, reserved.slots)
        step.plan.work.append(work)
        step.served.append(seq)
        step.fixed.add(seq.row)
        seq.turn = step.plan.step
        if size > 1:
            self._filling.append(seq)
        step.budget -= size + drafts
        if timed is not None:
            timed.take(size, scored)
        step.spare -= drafts
        seq.launch(work)
        return True

    def _share_of(self, seq: Sequence, missing: int, budget: int) -> int:
        """Tokens of `seq` that this step may compute, before memory is asked; 0 when it has to wait or has enough."""
        request = seq.request
        if request.generates and seq.known >= request.limit:
            return 0  # the token that ends it is already on its way
        size = missing if missing < budget else budget
        if size > 1 and seq.start < seq.prompt_len:
            size = self.state.cut(seq.start, size, seq.prompt_len)
        if seq.children:
            # Siblings fork where all but the last prompt token has run; until they have, nobody goes past that point.
            size = min(size, seq.prompt_len - 1 - seq.start)
        return size

    def _insist(self, seq: Sequence, upto: int, step: Sketch) -> Reserved | None:
        """Places for `seq`, at the cost of sequences that rank after it if need be; None = not this time."""
        assert seq.state is not None
        while (reserved := self.state.reserve(seq.state, upto)) is None:
            pages, slots = self.state.shortage(seq.state, upto, 1)
            if self._coming(pages, slots):
                return None
            victim = self._victim_for(seq, step, by_pages=not slots)
            if victim is None:
                return None
            self._preempt(victim)
        return reserved

    def _coming(self, pages: int, slots: int) -> bool:
        """Does quarantine give back so much by itself? Then waiting is cheaper than throwing work away."""
        return pages <= self.state.pages.coming and slots <= self.state.slots.coming

    # -- who comes in

    def _quota(self) -> int:
        """Newcomers that may be admitted now."""
        if not self._fresh:
            return 0
        return self._gate.open(len(self._fresh), self._first_queued(), self.running, self._clock(), self.sealed)

    def _admissible(self, index: int, step: Sketch, tenant: str | None = None) -> int | None:
        """The first waiting sequence from `index` on, of this tenant or of any, whose turn it could be."""
        if step.quota <= 0 and len(self._fresh) == len(self._waiting):
            return None
        for i in range(index, len(self._waiting)):
            seq = self._waiting[i]
            if seq.parent is None and (seq.admitted or step.quota > 0) and tenant in (None, seq.tenant):
                return i
        return None

    def _make_way(self, step: Sketch) -> None:
        """Before they are served, running sequences give way to a waiting one with more right to run, if that helps."""
        if self.config.policy != "priority" or (index := self._admissible(0, step)) is None:
            return
        if not self._contested:
            return self._make_way_for(self._waiting[index])
        fresh = step.quota > 0
        able = (seq for seq in self._waiting[index:] if seq.parent is None and (seq.admitted or fresh))
        for head in list(first_of_each(able)):
            self._make_way_for(head)
            if self._entitled(head):
                step.claims.append(head)

    def _make_way_for(self, head: Sequence) -> None:
        while giving := self._giving_way_to(head):
            match = self._match(head)
            pages, slots = self._lack(head, match)
            if self._free_rows and self._coming(pages, slots):
                return  # it fits, or soon will
            gain = sum(self.state.held(s.state) for s in giving if s.state is not None)
            if pages > self.state.pages.coming + gain:
                return
            self._preempt(giving[-1])

    def _entitled(self, head: Sequence) -> bool:
        """Is its tenant's part enough for what the tenant has and this one?"""
        need = self.state.frames_for(len(head.tokens), self.config.step_tokens)
        return self._holdings(head.yields).entitled(head.tenant, need)

    def _holdings(self, batch: bool) -> Holdings:
        peers = [seq for seq in self._running if seq.yields == batch]
        return Holdings(peers, self.state, self.config.rows, len(self._tenants))

    def _giving_way_to(self, head: Sequence) -> list[Sequence]:
        """Running sequences with less right to run than `head`, the first to go last: those of lower priority of the
        same tenant, batch work if `head` is none, and of its own kind what others have beyond their part."""
        if not self._contested:
            return [s for s in self._running if s.priority > head.priority]
        lower = [
            s for s in self._running if s.yields > head.yields or (s.tenant == head.tenant and s.rank[0] > head.rank[0])
        ]
        if not self._entitled(head):
            return lower
        peers = [s for s in self._running if s.yields == head.yields]
        return self._holdings(head.yields).beyond(peers) + lower

    def _admit(self, step: Sketch, tenant: str | None = None) -> None:
        """Take in waiting sequences, of this tenant or of any, in rank order. The first that does not fit ends it:
        nobody overtakes."""
        if step.batch and any(not seq.yields and seq.parent is None for seq in self._waiting):
            return
        index = 0
        while step.budget > 0 and self._free_rows and (found := self._admissible(index, step, tenant)) is not None:
            index, seq = found, self._waiting[found]
            if seq.yields and not step.batch:
                return
            if step.room is not None and step.room.tokens(seq.request.scored) <= 0:
                return
            match = self._match(seq)
            if self._lack(seq, match) != (0, 0):
                return
            if not seq.admitted:
                seq.cached = match.length
            self._enter(seq, self.state.open(seq.chain, match), match.length, step)
            if not self._serve(seq, step, 0):
                return

    def _match(self, seq: Sequence) -> Match:
        """The cached prefix (maybe empty) to start from; at least one token always runs."""
        return self.state.match(seq.chain, seq.tokens, len(seq.tokens) - 1 if seq.request.reuse else 0)

    def _lack(self, seq: Sequence, match: Match) -> tuple[int, int]:
        # The headroom keeps the newcomer from being preempted, or preempting, with the very next token.
        return self.state.lack(match, len(seq.tokens), self.config.step_tokens, self.running)

    def _enter(self, seq: Sequence, state: SequenceState, computed: int, step: Sketch) -> None:
        """Give `seq` a row, and tell the runner all about it."""
        self._unqueue(seq)
        if not seq.admitted:
            seq.admitted = True
            step.quota -= 1
            self._gate.admitted()
        seq.begin(self._free_rows.pop(), state, computed)
        insort(self._running, seq, key=_rank)
        plan = step.plan
        plan.enter.append(
            Enter(
                seq.request.id,
                seq.row,
                tuple(seq.tokens),
                computed,
                seq.prompt_len,
                seq.child,
                state.slot,
                seq.request.payload,
            )
        )
        plan.pages.extend(PageEdit(g, seq.row, 0, tuple(table)) for g, table in enumerate(state.tables) if table)
        step.fixed.add(seq.row)

    def _fork_children(self, seq: Sequence, step: Sketch) -> None:
        """Where all but the last prompt token has settled, siblings start on copies; those without room go alone.
        Only a few start in each step: telling the runner of each takes time that all others wait for."""
        if seq.flying or seq.computed != seq.prompt_len - 1:
            return
        assert seq.state is not None
        entered = 0
        while seq.children and self._free_rows and (forked := self.state.fork(seq.state, seq.computed)) is not None:
            child = seq.children.pop(0)
            child.parent = None
            child.cached = seq.cached
            state, transfers = forked
            self._enter(child, state, seq.computed, step)
            step.plan.transfers.extend(transfers)
            entered += 1
            if entered == FORKS_PER_STEP and seq.children:
                return
        _adopt(seq.children)
        seq.children = []

    # -- who goes out

    def _victim_for(self, seq: Sequence, step: Sketch, *, by_pages: bool) -> Sequence | None:
        """Whom to preempt first so that `seq` gets memory: the last in rank, of the tenant with most beyond its part if
        it is pages that are short."""
        able = [s for s in self._running if s.row not in step.fixed]
        if not (by_pages and self._contested):
            return able[-1] if able and able[-1].rank > seq.rank else None
        holdings = Holdings(self._running, self.state, self.config.rows, len(self._tenants))

        def weight(one: Sequence) -> tuple[bool, int, Rank]:
            return one.yields, holdings.excess(one.tenant), one.rank

        victim = max(able, key=weight, default=seq)
        return victim if weight(victim) > weight(seq) else None

    def _preempt(self, seq: Sequence) -> None:
        self._give_up(seq)
        insort(self._waiting, seq, key=_rank)
        self.preemptions += 1

    def _give_up(self, seq: Sequence) -> None:
        assert seq.state is not None
        self.state.release(seq.state)
        del self._running[bisect_left(self._running, seq.rank, key=_rank)]
        self._free_rows.append(seq.row)
        self._leaving.append(seq.row)
        seq.give_up()

    def _unqueue(self, seq: Sequence) -> None:
        del self._waiting[bisect_left(self._waiting, seq.rank, key=_rank)]
        self._fresh.pop(seq, None)

    def _end(self, seq: Sequence) -> None:
        if seq.state is not None:
            self._give_up(seq)
        else:
            self._unqueue(seq)
        _adopt(seq.children)
        if seq.parent is not None:
            seq.parent.children.remove(seq)
        self._tenants[seq.tenant] -= 1
        if not self._tenants[seq.tenant]:
            del self._tenants[seq.tenant]
            self._turns.pop(seq.tenant, None)
        siblings = self._by_request[seq.request.id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.id]

    # -- settling

    def took(self, plan: StepPlan, seconds: float) -> None:
        """The oldest launched step has finished, and this is the time that it had for itself."""
        if self.pace.bound:
            step, served = self._inflight[0]
            assert step == plan.step, f"step {plan.step} has taken its time where {step} is due"
            parts = zip(plan.work, served, strict=True)
            kinds = kinds_of((w.count, s.request.scored and w.start < s.prompt_len - 1) for w, s in parts)
            self.pace.observe(*kinds, seconds)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """The oldest launched step has finished: its tokens become known, ends are found, places are let go."""
        step, served = self._inflight.popleft()
        assert step == plan.step == result.step, f"step {result.step} settles where {step} is due"
        self.state.settle(step, result.completed)
        outputs = []
        extras, errors = result.extras, result.errors
        for i, (work, seq, tokens) in enumerate(zip(plan.work, served, result.tokens, strict=True)):
            if not seq.flying or seq.flying[0] is not work:
                continue  # aborted, ended or preempted since: a token nobody waits for
            output = Output(seq.request.id, seq.child, [], None, None, None, seq.cached)
            if extras:
                output.extra = extras[i]
            if i in errors:
                output.finish, output.error = Finish.ERROR, errors[i]
            else:
                self._settle_one(seq, step, tokens, output)
            if output.finish is not None:
                self._end(seq)
            if output.tokens or output.finish is not None or output.extra is not None:
                outputs.append(output)
        return outputs

    def _settle_one(self, seq: Sequence, step: int, tokens: list[int], output: Output) -> None:
        """What `tokens` mean for `seq`: as many of them as it may keep, its new state, and whether it ends."""
        assert seq.state is not None
        request = seq.request
        for token in tokens:
            seq.tokens.append(token)
            output.tokens.append(token)
            if token in request.stop_ids:
                output.finish = Finish.STOP
                break
            if len(seq.tokens) >= request.limit:
                output.finish = Finish.LENGTH
                break
        # Drafts behind an end are not part of the sequence, though the device has accepted them.
        accepted = min(len(tokens) - 1, len(output.tokens)) if tokens else 0
        seq.land(accepted)
        # A row that ends may have one more step in flight, which reads the slot that the device has accepted.
        last_use = step if output.finish is None else self.state.launched
        self.state.commit(seq.state, last_use, accepted)
        if seq.computed >= seq.state.border:
            self.state.publish(seq.state, seq.tokens, seq.computed, seq.prompt_len)
        if not request.generates and seq.computed >= seq.prompt_len:
            output.finish = Finish.STOP


def _adopt(siblings: list[Sequence]) -> None:
    """The first computes the prompt, the others wait for it."""
    for seq in siblings[:1]:
        seq.parent, seq.children = None, siblings[1:]
    for seq in siblings[1:]:
        seq.parent = siblings[0]
