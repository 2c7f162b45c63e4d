"""A simulated device that computes nothing and checks every step plan.

It executes plans late and in order, and knows for every position of every page, and for every slot, exactly which
prefix was written there. Work that reads anything but its own prefix, writes a place that others use, or touches a
released place, is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bankfull.state.mask import Mask
from bankfull.state.spec import Layout, PagedGroup
from bankfull.types import NULL, Request, StepPlan, StepResult, Work
from tests.sim.oracle import EMPTY, extend, identities, next_token, root
from tests.sim.promises import SimulationError, demand
from tests.sim.tiers import LowerTiers

__all__ = ["Device", "Footprint", "Launched", "Row", "SimulationError", "demand"]


@dataclass(slots=True)
class Row:
    """One sequence as the device knows it."""

    key: int
    """Another one each time that a row is entered."""
    request: Request
    child: int
    tokens: list[int]
    prefix: list[int]
    tables: list[list[int]]
    slot: int
    length: int
    """Tokens whose state was computed."""

    def identity(self, length: int) -> int:
        return self.prefix[length - 1] if length else root(self.request.salt)


@dataclass(slots=True)
class Footprint:
    """Which places a step touched, and for whom. Slots are negative, pages positive."""

    step: int
    reads: dict[int, set[int]] = field(default_factory=dict)
    writes: dict[int, int] = field(default_factory=dict)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Launched:
    """A future of a step's result."""

    device: Device
    plan: StepPlan
    before: list[Footprint]
    """The steps that had not settled when this one was launched."""
    mark: Footprint
    result: StepResult | None = None

    def wait(self) -> StepResult:
        """Steps are waited for in the order of their launch."""
        self.device._catch_up()
        assert self.device.queue.popleft() is self and self.result is not None
        return self.result


def _needed(group: PagedGroup, begin: int, end: int) -> Iterator[tuple[int, Sequence[int]]]:
    """Pages with positions before `begin` that the tokens begin .. end see, and these positions."""
    size, sight = group.page_tokens, group.window
    first = 0 if sight is None or isinstance(sight, Mask) else max(0, begin - sight + 1)
    for index in range(first // size, -(-begin // size)):
        needed: Sequence[int] = range(max(first, index * size), min(begin, (index + 1) * size))
        if isinstance(sight, Mask):
            needed = [at for at in needed if any(sight.visible(query, at) for query in range(begin, end))]
        if needed:
            yield index, needed


class Device:
    """A `Runner`, so that the same loop drives it."""

    def __init__(
        self, layout: Layout, vocab: int, random: Random, error_rate: float, lower: LowerTiers | None = None
    ) -> None:
        self.lower = lower
        self.layout = layout
        self.vocab = vocab
        self.random = random
        self.error_rate = error_rate
        self.rows: dict[int, Row] = {}
        self.pages: dict[int, tuple[int, list[int | None]]] = {}
        self.slots: dict[int, int] = {NULL: EMPTY}
        self.queue: deque[Launched] = deque()
        self.marks: dict[int, Footprint] = {}
        """Of the steps that have not settled."""
        self.moving: dict[int, tuple[int, ...]] = {}
        """Transfers whose completion was not reported, and the places of the device that they pin."""
        self.free: set[int] = set()
        self.entered = 0

    # -- what the world asks

    def forward(self, plan: StepPlan) -> Launched:
        mark = Footprint(plan.step)
        launched = Launched(self, plan, list(self.marks.values()), mark)
        self.queue.append(launched)
        self.marks[plan.step] = mark
        if self.random.random() < 0.3:
            self._catch_up()
        return launched

    def finish(self, step: Launched, masks: Mapping[int, Any]) -> None:
        """Tokens follow from the prefix alone, without masks."""
        demand(step in self.queue, f"step {step.plan.step} is finished before it was launched, or after it settled")

    def settled(self, step: int) -> None:
        del self.marks[step]

    def poison(self, pages: Iterable[int], slots: Iterable[int]) -> None:
        """These places are free: no step in flight may use them, and their old content must never be read."""
        pinned = {place for ends in self.moving.values() for place in ends}
        self.free = {*pages, *(-slot for slot in slots)}
        for place in self.free:
            demand(place not in pinned, f"place {place} is free while a transfer holds on to it")
            for mark in self.marks.values():
                touched = place in mark.writes or place in mark.reads
                demand(not touched, f"place {place} is free while step {mark.step} may still touch it")
            if place > 0:
                self.pages.pop(place, None)
            else:
                self.slots.pop(-place, None)

    # -- execution

    def _catch_up(self) -> None:
        for launched in self.queue:
            if launched.result is None:
                launched.result = self._execute(launched)

    def _execute(self, launched: Launched) -> StepResult:
        plan, mark = launched.plan, launched.mark
        self._apply(plan)
        self._transfer(plan, launched.before)
        begins = [self._read(work, launched) for work in plan.work]
        for work in plan.work:
            self._write_slots_free(work, mark)
        result = StepResult(plan.step, [], extras=[None] * len(plan.work))
        for i, (work, begin) in enumerate(zip(plan.work, begins, strict=True)):
            result.tokens.append(self._run(work, begin, mark))
            if not self.rows[work.row].request.generates:
                result.extras[i] = (work.start, work.count)
            elif self.random.random() < self.error_rate:
                result.tokens[i] = []
                result.errors[i] = "the device was told to fail"
        self._check_conflicts(launched)
        between = {} if self.lower is None else self.lower.under_way
        for transfer in list(self.moving):
            if transfer not in between and self.random.random() < 0.5:
                del self.moving[transfer]
                result.completed.append(transfer)
        if self.lower is not None:
            result.completed += self.lower.end(self, result.failed)
        return result

    def _apply(self, plan: StepPlan) -> None:
        for row in plan.leave:
            demand(row in self.rows, f"row {row} leaves without having entered")
            del self.rows[row]
        for enter in plan.enter:
            demand(enter.row not in self.rows, f"row {enter.row} is entered twice")
            request: Request = enter.payload
            demand(enter.tokens[: enter.prompt_len] == request.prompt, "a sequence enters with another prompt")
            self.entered += 1
            prefix = identities(request.salt, enter.tokens)
            tables: list[list[int]] = [[] for _ in self.layout.paged]
            self.rows[enter.row] = Row(
                self.entered, request, enter.child, list(enter.tokens), prefix, tables, enter.slot, enter.computed
            )
        for edit in plan.pages:
            demand(edit.row in self.rows, f"pages for row {edit.row}, which no sequence has")
            table = self.rows[edit.row].tables[edit.group]
            demand(edit.first == len(table), f"row {edit.row} has {len(table)} pages, an edit begins at {edit.first}")
            table.extend(edit.pages)

    def _transfer(self, plan: StepPlan, before: list[Footprint]) -> None:
        for transfer in plan.transfers:
            if not transfer.in_step:
                assert self.lower is not None
                self.lower.start(self, transfer)
                continue
            places = transfer.src.place, transfer.dst.place
            demand(NULL not in places, "a transfer to or from the null page")
            for mark in before:
                busy = places[-1] in mark.writes or places[-1] in mark.reads
                demand(not busy, f"a transfer writes place {places[-1]} while step {mark.step} may touch it")
                demand(places[0] not in mark.writes, f"a transfer reads place {places[0]}, still in flight")
            self.moving[transfer.id] = places
            demand(places[0] in self.pages, f"a transfer reads page {places[0]}, which holds nothing")
            group, content = self.pages[places[0]]
            self.pages[places[1]] = (group, list(content))

    def _read(self, work: Work, launched: Launched) -> int:
        """All that `work` must find of the past, before anything of this step is written."""
        demand(work.row in self.rows, f"work for row {work.row}, which no sequence has")
        row = self.rows[work.row]
        begin = row.length
        late = sum(mark.accepted.get(row.key, 0) for mark in launched.before)
        demand(begin == work.start + late, f"row {work.row} stands at {begin}, the plan expects {work.start} + {late}")
        reads = launched.mark.reads
        for g, group in enumerate(self.layout.paged):
            size, table = group.page_tokens, row.tables[g]
            for index, needed in _needed(group, begin, begin + work.count + work.drafts):
                page = table[index] if index < len(table) else NULL
                where = f"row {work.row}, group {g}, positions {needed[0]} to {needed[-1]}"
                demand(page != NULL, f"{where}: needed, but there is no page")
                kind, content = self.pages.get(page, (-1, []))
                right = kind == g and all(content[at % size] == row.prefix[at] for at in needed)
                demand(right, f"{where}: page {page} holds something else")
                reads.setdefault(page, set()).add(row.key)
        if self.layout.recurrent is not None:
            wanted = row.identity(begin) if begin else EMPTY
            right = self.slots.get(row.slot) == wanted
            demand(right, f"row {work.row}: slot {row.slot} is not the state after {begin} tokens")
            if row.slot:
                reads.setdefault(-row.slot, set()).add(row.key)
        return begin

    def _write_slots_free(self, work: Work, mark: Footprint) -> None:
        wanted = 1 + work.drafts if self.layout.recurrent is not None else 0
        demand(len(work.slots) == wanted, f"row {work.row} got {len(work.slots)} slots to write, needs {wanted}")
        for slot in work.slots:
            demand(slot != NULL, f"row {work.row} writes the null slot")
            demand(-slot not in mark.reads, f"slot {slot} is read and written in one step")
            demand(-slot not in mark.writes, f"slot {slot} is written twice in one step")
            mark.writes[-slot] = self.rows[work.row].key

    def _run(self, work: Work, begin: int, mark: Footprint) -> list[int]:
        """Write every position of `work`, and give the accepted drafts and the sampled token."""
        row = self.rows[work.row]
        end = begin + work.count
        known = len(row.tokens)
        demand(work.count >= 1 and end <= known, f"row {work.row} runs to {end} of {known} known tokens")
        demand(work.sample == (row.request.generates and end == known), f"row {work.row} samples at the wrong time")
        demand(not work.drafts or work.sample, f"row {work.row} drafts where nothing is sampled")
        accepted, given = 0, []
        guesses: list[int] = []
        if work.sample:
            accepted = self.random.randint(0, work.drafts)
            identity = row.prefix[end - 1]
            for i in range(work.drafts + 1):
                token = next_token(identity, row.child, self.vocab)
                if i <= accepted:
                    given.append(token)
                if i == work.drafts:
                    break
                identity = extend(identity, token if i < accepted else token + 1)
                guesses.append(identity)
        written = row.prefix[begin:end] + guesses
        self._write_pages(row, begin, written, mark)
        for slot, identity in zip(work.slots, written[work.count - 1 :], strict=False):
            self.slots[slot] = identity
        row.length = end + accepted
        if work.slots:
            row.slot = work.slots[accepted]
        for token in given:
            row.tokens.append(token)
            row.prefix.append(extend(row.prefix[-1], token))
        mark.accepted[row.key] = accepted
        return given

    def _write_pages(self, row: Row, begin: int, written: list[int], mark: Footprint) -> None:
        for g, group in enumerate(self.layout.paged):
            size, table = group.page_tokens, row.tables[g]
            covered = len(table) * size
            demand(begin + len(written) <= covered, f"a table covers {covered} tokens of {begin + len(written)}")
            for index in range(begin // size, -(-(begin + len(written)) // size)):
                page = table[index]
                demand(page != NULL, "a write to the null page")
                demand(mark.writes.setdefault(page, row.key) == row.key, f"two rows write page {page}")
                held = self.pages.get(page)
                if held is None or held[0] != g:
                    held = self.pages[page] = (g, [None] * size)
                low, high = max(begin, index * size), min(begin + len(written), (index + 1) * size)
                held[1][low % size : low % size + high - low] = written[low - begin : high - begin]

    def _check_conflicts(self, launched: Launched) -> None:
        """Steps that were in flight together may touch a place for one sequence only, if one of them writes it."""
        mark = launched.mark
        if self.lower is not None:
            filled = self.lower.filled()
            touched = filled.intersection(mark.writes) | filled.intersection(mark.reads)
            demand(not touched, f"step {mark.step} touches {touched}, which transfers from below still fill")
        lost = self.free.intersection(mark.writes) | self.free.intersection(mark.reads)
        demand(not lost, f"step {mark.step} touches {lost}, which were released before it has settled")
        for place, key in mark.writes.items():
            demand(mark.reads.get(place, {key}) == {key}, f"place {place} is written for one row, read for another")
        for other in launched.before:
            for place, key in mark.writes.items():
                mine = place > 0 and other.writes.get(place, key) == key and other.reads.get(place, {key}) == {key}
                untouched = place not in other.writes and place not in other.reads
                demand(mine or untouched, f"step {mark.step} writes place {place} that step {other.step} may touch")
            for place, keys in mark.reads.items():
                writer = other.writes.get(place)
                fresh = writer is not None and keys != {writer}
                demand(not fresh, f"step {mark.step} reads place {place} before step {other.step} has settled")
