"""The loop around scheduler and fake device, and the invariants that are checked after each step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from bankfull.errors import RequestError
from bankfull.runtime.runner import Runner
from bankfull.sched.pace import FIRST_TOKENS, Pace
from bankfull.sched.scheduler import Scheduler
from bankfull.sched.sequence import Order, Sequence
from bankfull.sched.shares import COMPANY_STEPS, batch_share
from bankfull.state.lower_tier import LowerTier
from bankfull.state.manager import StateManager
from bankfull.state.tiers import Tiers
from bankfull.types import NULL, Finish, Output, Request, StepPlan, Tier
from tests.sim.device import Device, Launched, SimulationError, demand
from tests.sim.oracle import expected
from tests.sim.scenario import Scenario, scenario_of, tiered_of
from tests.sim.tiers import LowerTiers

__all__ = ["SimulationError", "Summary", "simulate"]


@dataclass(slots=True)
class Summary:
    """Counts of one simulation, for the test that scenarios reach every corner."""

    steps: int = 0
    preemptions: int = 0
    cached: int = 0
    forks: int = 0
    evictions: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    drafts: int = 0
    resumed: int = 0
    """Sequences that continue tokens of another engine."""
    yielded: int = 0
    """Steps in which batch work held a row and yielded."""
    bounded: int = 0
    """Steps with decodes whose prompts fit into the time bound."""
    written: int = 0
    """Places copied to a lower tier."""
    restored: int = 0
    """Places copied from a lower tier."""
    parked: int = 0
    """Sequences that went on from where they were preempted, in the middle of a page or of a stride of snapshots."""


@dataclass(slots=True)
class Receipt:
    """The outputs of one sequence so far."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    cached: int | None = None


def simulate(seed: int, mixed: bool = False, tiered: bool = False) -> Summary:
    """Run the scenario of `seed`; a broken invariant raises a SimulationError with the command that replays it."""
    try:
        return World(tiered_of(seed) if tiered else scenario_of(seed, mixed)).run()
    except Exception as problem:
        raise SimulationError(f"seed {seed}: {problem!r}; replay it with: python -m tests.sim {seed}") from problem


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed + 1)
        self.clock = 0.0
        self.state = StateManager(scenario.layout, scenario.frames, scenario.slots, scenario.state)
        lower = self._lower_tiers()
        self.sched = Scheduler(scenario.sched, self.state, lambda: self.clock)
        self.sched.pace = Pace(self.sched.pace.bound, least=1 + scenario.seed % 3)  # its prompts are short
        self.device = Device(scenario.layout, scenario.vocab, Random(scenario.seed + 2), scenario.error_rate, lower)
        self.runner: Runner[Launched] = self.device
        self.inflight: deque[tuple[StepPlan, Launched]] = deque()
        self.arrivals = deque(scenario.arrivals)
        self.requests: dict[int, Request] = {}
        self.receipts: dict[tuple[int, int], Receipt] = {}
        self.summary = Summary()
        self.patience = 0
        self.admitted: set[tuple[object, int]] = set()
        self.last_admitted: Order = (False, 0.0, -1)

    def _lower_tiers(self) -> LowerTiers | None:
        """Tiers that are tiny and slow, so that they are full and late most of the time."""
        made, recurrent = self.scenario.tiers, self.scenario.layout.recurrent
        if made is None:
            return None
        lower = [
            LowerTier(tier, pages, slots if recurrent else 0, rate=rate) for tier, pages, slots, rate in made.lower
        ]
        self.state.tiers = Tiers(
            self.state.pages,
            self.state.slots,
            lower,
            self.state.moves,
            page_bytes=100,
            slot_bytes=100,
            clock=lambda: self.clock,
        )
        return LowerTiers(Random(self.scenario.seed + 8), made.fails, made.late)

    def run(self) -> Summary:
        self._watch_preemption()
        while True:
            self._arrive()
            self._abort()
            plan = self._plan()
            self._abort()
            if plan is None and not self.inflight:
                if not self._idle():
                    break
            elif plan is None or len(self.inflight) > self.scenario.depth:
                self._settle()
            self.clock += self.random.random()
        self._check_end()
        return self.summary

    # -- events

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0].time <= self.clock:
            request = self.arrivals.popleft().request
            need = self.state.frames_for(request.limit, self.scenario.sched.step_tokens)
            try:
                self.sched.add(request)
            except RequestError as error:
                demand(need > self.scenario.frames, f"a request that fits was refused: {error}")
                self.summary.refused += 1
                continue
            demand(need <= self.scenario.frames, "a request that can never run was accepted")
            self.requests[request.id] = request  # type: ignore[index]
            for child in range(request.samples):
                if child not in request.finished:
                    before = list(request.generated[child]) if request.generated else []
                    self.receipts[request.id, child] = Receipt(before)  # type: ignore[index]
                    self.summary.resumed += bool(before)
            slow = 40 if self.scenario.tiers is None else 1000
            self.patience += slow + 6 * request.samples * request.limit * (2 + len(self.receipts))
        self.sched.sealed = not self.arrivals

    def _abort(self) -> None:
        live = self.sched._by_request
        if live and self.random.random() < self.scenario.abort_rate:
            request = self.requests[self.random.choice(list(live))]  # type: ignore[index]
            child = self.random.choice((None, self.random.randrange(request.samples)))
            for output in self.sched.abort(request.id, child=child):
                demand(output.finish is Finish.ABORT, "an abort that does not end its sequence")
                self._receive(output)
            self._check()

    def _plan(self) -> StepPlan | None:
        drafts = self.random.randint(0, self.scenario.drafts)
        ready = [s for s in self.sched._running if self._decodes(s)]
        preemptions = self.sched.preemptions
        plan = self.sched.plan(drafts)
        self._check()
        if plan is None:
            return None
        self.summary.steps += 1
        demand(self.summary.steps <= self.patience, f"not done after {self.summary.steps} steps: a sequence starves")
        if self.sched.preemptions != preemptions:
            ready = []  # pages of a preempted sequence may have helped an earlier one
        self._check_plan(plan, drafts, ready)
        step = self.runner.forward(plan)
        self.runner.finish(step, {})
        self.inflight.append((plan, step))
        if plan.step % 2:
            self.sched.name_ahead()
        return plan

    def _settle(self) -> None:
        plan, step = self.inflight.popleft()
        self.sched.took(plan, self.scenario.step_seconds + plan.tokens * self.scenario.token_seconds)
        result = step.wait()
        outputs = self.sched.settle(plan, result)
        self.device.settled(plan.step)
        for output in outputs:
            self._receive(output)
        self._check()

    def _idle(self) -> bool:
        """Nothing can run now: continue with the next event, or end."""
        wake = self.sched.wake_at()
        times = [self.arrivals[0].time] if self.arrivals else []
        if self.sched.unfinished and wake is not None:
            demand(wake > self.clock, "there is work that could run, and the scheduler does not plan it")
            times.append(wake)
        batching = self.scenario.sched.batching
        demand(bool(times) or not self.sched.unfinished, "there is work to do, and nothing will ever start it")
        demand(batching != "continuous" or not self.sched.unfinished, "continuous batching waits with nothing running")
        if times:
            self.clock = max(self.clock, min(times))
        return bool(times)

    def _receive(self, output: Output) -> None:
        request = self.requests[output.request]  # type: ignore[index]
        receipt = self.receipts[output.request, output.child]  # type: ignore[index]
        demand(receipt.finish is None, f"{output} comes after the end")
        receipt.tokens.extend(output.tokens)
        receipt.finish = output.finish
        demand(receipt.cached in (None, output.cached), "the number of cached tokens changes")
        if output.finish is not Finish.ABORT:
            receipt.cached = output.cached
        most = len(request.prompt) - (not request.generated)
        allowed = most if request.reuse and self.scenario.state.prefix_cache else 0
        demand(0 <= output.cached <= allowed, f"{output.cached} tokens cached of at most {allowed}")
        self.summary.cached += output.cached if output.finish else 0
        if output.finish is None:
            return
        tokens, finish = expected(request, output.child, self.scenario.vocab)
        if output.finish in (Finish.ABORT, Finish.ERROR):
            self.summary.aborted += 1
            demand(receipt.tokens == tokens[: len(receipt.tokens)], f"{output}: wrong tokens before an early end")
            demand(len(receipt.tokens) < max(1, len(tokens)), f"{output}: ended early after all tokens")
            demand((output.error is not None) == (output.finish is Finish.ERROR), f"{output}: error without reason")
        else:
            self.summary.finished += 1
            demand(receipt.tokens == tokens, f"{output}: got {receipt.tokens}, expected {tokens}")
            demand(output.finish is finish, f"{output}: expected {finish}")

    # -- promises

    def _decodes(self, seq: Sequence) -> bool:
        """Whether this sequence would take exactly one token if budget and memory allow."""
        if seq.known - seq.start != 1 or seq.children:
            return False
        return not seq.request.generates or seq.known < seq.request.limit

    def _check_plan(self, plan: StepPlan, drafts: int, ready: list[Sequence]) -> None:
        config = self.scenario.sched
        demand(plan.tokens <= config.step_tokens, f"{plan.tokens} tokens in a step of {config.step_tokens}")
        rows = [work.row for work in plan.work]
        demand(len(set(rows)) == len(rows), "a row works twice in one step")
        demand(all(0 <= row < config.rows for row in rows), "a row beyond the configured ones")
        demand(self.sched.running <= config.rows, "more running sequences than rows")
        self.summary.drafts += sum(work.drafts for work in plan.work)
        self.summary.forks += sum(transfer.in_step for transfer in plan.transfers)
        for transfer in plan.transfers:
            self.summary.restored += not transfer.in_step and transfer.dst.tier == Tier.DEVICE
            self.summary.written += not transfer.in_step and transfer.src.tier == Tier.DEVICE
        demand(all(work.drafts <= drafts for work in plan.work), "more drafts than the strategy offers")
        by_row = {seq.row: seq for seq in self.sched._running}
        holders = self._page_holders()
        for work in plan.work:
            seq = by_row[work.row]
            self._check_writes(seq, holders)
            demand(not work.sample or seq.known <= seq.request.limit, "a step for a token beyond the last one")
        block = self.scenario.layout.block_tokens
        self.summary.parked += sum(1 for enter in plan.enter if enter.computed % block and not enter.child)
        served = {by_row[row].order for row in rows}
        self._check_batch(plan, by_row)
        self._check_time(plan, by_row)
        greedy = {by_row[work.row].batch for work in plan.work if work.drafts or work.count > 1}
        if self._batch_takes_turns(plan, by_row):
            greedy.discard(True)
        if self._decodes_in_turns(plan):
            greedy.clear()
        for seq in ready:
            # Online work may leave nothing to a batch: only its own prompts and drafts come after its decodes.
            robbed = False in greedy if not seq.batch else greedy == {True}
            if robbed and seq.state is not None and seq.order not in served:
                short = self.state.shortage(seq.state, seq.start + seq.drafted + 1, 1)
                demand(short != (0, 0), f"{seq.request.id} cannot decode because prefill or drafts took its budget")
        self._check_order(plan, by_row)

    def _check_batch(self, plan: StepPlan, by_row: dict[int, Sequence]) -> None:
        """A step with an online prompt has no batch work, and no step has more batch tokens than their share."""
        served = [(work, by_row[work.row]) for work in plan.work]
        prompts = any(not s.batch and (work.count > 1 or work.start < s.prompt_len) for work, s in served)
        batch = sum(work.count + work.drafts for work, s in served if s.batch)
        rows = sum(s.batch for s in self.sched._running)
        self.summary.yielded += prompts and rows > 0
        demand(not (prompts and batch), "batch work runs beside an online prompt")
        _, most = batch_share(self.scenario.sched.step_tokens, rows, self._in_company(plan))
        demand(batch <= most, f"batch work takes {batch} tokens of a step, more than {most}")

    def _check_time(self, plan: StepPlan, by_row: dict[int, Sequence]) -> None:
        """A step with decodes is bounded in time, or has the minimum of prompt tokens."""
        pace, served = self.sched.pace, [(work, by_row[work.row]) for work in plan.work]
        entered = {enter.row for enter in plan.enter}  # they came after the decodes were counted
        decodes = [not s.batch for work, s in served if work.count == 1 and work.sample and work.row not in entered]
        if not pace.bound or not any(decodes):
            return
        prompts = sum(work.count for work, _ in served if work.count > 1)
        if pace.token_seconds(False) is None:
            demand(prompts <= FIRST_TOKENS, f"{prompts} tokens of prompts beside decodes, before any was timed")
        elif prompts > pace.least:
            seconds = pace.decode_seconds(len(decodes)) + prompts * (pace.token_seconds(False) or 0.0)
            self.summary.bounded += 1
            most = max(pace.bound, pace.decode_seconds(len(decodes)))
            demand(seconds <= most * 1.001, f"a step with decodes is predicted to take {seconds} s")

    def _in_company(self, plan: StepPlan) -> bool:
        return plan.step - self.sched._company < COMPANY_STEPS

    def _batch_takes_turns(self, plan: StepPlan, by_row: dict[int, Sequence]) -> bool:
        """Whether as many batch rows decode as may beside online work; the others then wait for their turn."""
        rows, _ = batch_share(self.scenario.sched.step_tokens, 0, True)
        decoding = sum(by_row[work.row].batch and work.count == 1 for work in plan.work)
        return self._in_company(plan) and decoding >= rows

    def _decodes_in_turns(self, plan: StepPlan) -> bool:
        """Whether as many rows decode as one step may; the others then wait for their turn. No more than that decode,
        and prompts keep to their own limits."""
        config, entered = self.scenario.sched, {enter.row for enter in plan.enter}
        prompts = [work.count for work in plan.work if work.count > 1]
        demand(sum(prompts) <= (config.prefill_tokens or config.step_tokens), f"{sum(prompts)} prompt tokens in a step")
        demand(len(prompts) <= (config.prefill_rows or config.rows), f"{len(prompts)} prompts in a step")
        if not config.decode_rows:
            return False
        singles = [work for work in plan.work if work.count == 1 and work.row not in entered]
        decodes = sum(work.sample for work in singles)  # the others are chunks, or prompts that are only scored
        demand(decodes <= config.decode_rows, f"{decodes} rows decode in a step of {config.decode_rows}")
        return len(singles) >= config.decode_rows

    def _check_writes(self, seq: Sequence, holders: list[int]) -> None:
        """Pages that a step may write belong to its sequence alone, and are not in the cache."""
        assert seq.state is not None
        work = seq.flying[-1]
        drafted = seq.drafted - work.drafts
        for group, table in zip(self.scenario.layout.paged, seq.state.tables, strict=True):
            size = group.page_tokens
            last = work.start + drafted + work.count + work.drafts
            for page in table[work.start // size : -(-last // size)]:
                demand(holders[page] == 1, f"page {page} is written while {holders[page]} sequences hold it")
                demand(not self.state.pages.has_key(page), f"page {page} is written although it is in the cache")

    def _check_order(self, plan: StepPlan, by_row: dict[int, Sequence]) -> None:
        """First come, first served: among first samples, admission follows arrival."""
        if self.scenario.sched.policy != "fcfs" or self.scenario.tiers is not None:
            return  # a prefix on its way from a lower tier lets others pass
        for enter in plan.enter:
            seq = by_row[enter.row]
            first_time = (seq.request.id, seq.child) not in self.admitted
            self.admitted.add((seq.request.id, seq.child))
            if first_time and seq.child == 0:
                demand(seq.order > self.last_admitted, f"{seq.request.id} was overtaken")
                self.last_admitted = seq.order

    def _page_holders(self) -> list[int]:
        holders = [0] * (self.scenario.frames + 1)
        for seq in self.sched._running:
            assert seq.state is not None
            for table in seq.state.tables:
                for page in table:
                    holders[page] += 1
        return holders

    def _check(self) -> None:
        """The pools add up, and each reference has exactly one owner."""
        state = self.state
        state.check()
        pages = self._page_holders()
        slots = [0] * (state.slots.size + 1)
        for seq in self.sched._running:
            assert seq.state is not None
            if state.slots.size:
                slots[seq.state.slot] += 1
            for written in seq.state.writing:
                for slot in written:
                    slots[slot] += 1
        for move in state.moves.under_way.values():
            for tier, place in (move.transfer.src, move.transfer.dst):
                if tier == Tier.DEVICE:
                    (slots if move.transfer.slot else pages)[place] += 1
        for seq in self.sched._waiting:
            for pool, place in () if seq.fetch is None else seq.fetch.held:
                (pages if pool is state.pages else slots)[place] += 1
        for key, place in () if state.tiers is None else state.tiers._leaving:
            (pages if state.tiers.device_pool(key) is state.pages else slots)[place] += 1
        for held in state.pins._held.values():
            if held.pool in (state.pages, state.slots):
                (pages if held.pool is state.pages else slots)[held.place] += 1
        pages[NULL] = slots[NULL] = 0
        for name, pool, held in (("pages", state.pages, pages), ("slots", state.slots, slots)):
            counted = [*pool._refs, *[0] * (len(held) - len(pool._refs))]  # the others were never taken
            demand(held == counted, f"{name} are counted {counted}, but held {held}")
        for pool in (state.pages, state.slots):
            free = set(pool.free_places())
            demand(len(free) + pool.cached + len(pool._waiting) == pool.census().total - pool.census().held, "")
            demand(not any(pool._refs[place] for place in free if place < len(pool._refs)), "a free place has holders")
        self.device.poison(state.pages.free_places(), state.slots.free_places())

    def _check_end(self) -> None:
        for (request, child), receipt in self.receipts.items():
            demand(receipt.finish is not None, f"request {request}, sample {child} never ended")
        demand(not self.sched.unfinished and not self.sched._by_request, "the scheduler remembers ended sequences")
        demand(len(self.sched._free_rows) == self.scenario.sched.rows, "a row was lost")
        demand(not self.state.moves and not self.device.moving, "a transfer never ended")
        for tier in () if self.state.tiers is None else self.state.tiers.lower:
            for pool in (tier.pages, tier.slots):
                demand(not pool.census().held, f"{tier.tier.name} still holds {pool.census()}")
        for pool in (self.state.pages, self.state.slots):
            census = pool.census()
            demand(census.free + census.cached == pool.size, f"after the last request the pool still holds {census}")
        self.summary.preemptions = self.sched.preemptions
        self.summary.evictions = self.state.pages.evictions + self.state.slots.evictions

    def _watch_preemption(self) -> None:
        preempt = self.sched._preempt

        def watched(seq: Sequence, for_memory: bool = False) -> None:
            others = [s for s in (*self.sched._running, *self.sched._waiting) if s is not seq]
            alone = {s.request.tenant for s in (seq, *others)} == {seq.request.tenant}
            demand(any(s.order < seq.order for s in others) or not alone, "the first in order is preempted")
            preempt(seq, for_memory)

        self.sched._preempt = watched  # type: ignore[method-assign]
