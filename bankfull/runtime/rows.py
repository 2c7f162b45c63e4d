"""Permanent rows: a sequence keeps its row until it ends or is preempted, and each step gathers the rows that it runs.

Rows change only inside launched work, in the device's order; the host plans from its own lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.strategy import Draft
from bankfull.runtime.trees import RowTrees
from bankfull.sample.params import SamplingParams
from bankfull.sample.table import SamplingTable
from bankfull.state.spec import Layout
from bankfull.types import Enter, Guess, PageEdit, StepPlan

Ship = Callable[[np.ndarray], Tensor]
"""Copies an array to the device; the host does not wait for it."""


def each_of(counts: Tensor, starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The owner of each of `total` items, and its number there: an owner has `counts` items, from `starts` on."""
    owners = torch.repeat_interleave(counts, output_size=total)
    return owners, torch.arange(total, device=counts.device) - starts[owners]


@dataclass(frozen=True, slots=True)
class Job:
    """The runner's part of a request: the payload that the scheduler passes through unread."""

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pool: str | None = None
    """None, "last" or "mean": which hidden states of the prompt to return instead of tokens."""
    allowed_mask: Tensor | None = None
    """The result of `SamplingTable.allowed_mask` for the params, shared by all samples."""


class HostRows:
    """The same memory as numpy arrays: small edits take numpy a fraction of torch's time."""

    def __init__(self, rows: Rows) -> None:
        self.tokens, self.known, self.slot = rows.tokens.numpy(), rows.known.numpy(), rows.slot.numpy()
        self.tables = [table.numpy() for table in rows.tables]

    def commit(self, rows: Sequence[int], tokens: np.ndarray, counts: np.ndarray | None) -> None:
        index = np.array(rows, np.int64)
        if counts is None:
            self.tokens[index, self.known[index]] = np.maximum(tokens[:, 0], 0)
            self.known[index] += 1
            return
        line, place = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
        self.tokens[index[line], self.known[index[line]] + place] = tokens[line, place].clip(0)
        self.known[index] += counts


class Rows:
    """On a device with memory of its own the tensors have one spare line, for the padding rows of captured steps."""

    def __init__(
        self,
        count: int,
        max_len: int,
        layout: Layout,
        vocab: int,
        device: torch.device,
        ship: Ship | None = None,
        tree_drafts: int = 0,
        blank: int | None = None,
    ) -> None:
        """`ship` copies arrays to a device that does not share the host's memory. `tree_drafts`: the most drafts of a
        row, if they may be trees. `blank`: the token of all places after the known ones, when a sequence enters."""
        self.device, self.count, self.ship, self.blank = device, count, ship, blank
        lines = count if ship is None else count + 1
        self.tokens = torch.zeros(lines, max_len + 1, dtype=torch.long, device=device)
        self.known = torch.zeros(lines, dtype=torch.long, device=device)
        self.computed = np.zeros(count, np.int64)
        """Computed tokens of each row, on the host, because batches are built from them. They change in the device's
        order. Exact where the host waits for each step; else an upper bound while drafts are in flight, since only the
        device knows how many are accepted."""
        self.reached = torch.zeros(lines, dtype=torch.long, device=device)
        """Computed tokens as the device knows them; maintained only where the host does not wait."""
        self.slot = torch.zeros(lines, dtype=torch.long, device=device)
        self.tables = [
            torch.zeros(lines, -(-max_len // group.page_tokens), dtype=torch.long, device=device)
            for group in layout.paged
        ]
        self.covered: np.ndarray | None = None
        """(groups, rows) tokens that a row has pages for, on the host; only after `follow_pages`."""
        self.trees = RowTrees(lines, tree_drafts, device) if tree_drafts else None
        self.host = HostRows(self) if ship is None else None
        self.page_tokens = tuple(group.page_tokens for group in layout.paged)
        self.with_extras: set[int] = set()
        """Rows that want more than tokens: prompt logprobs, hidden states."""
        self.showing: set[int] = set()
        """Rows whose drafts are brought to the host."""
        self.sampling = SamplingTable(lines, vocab, device)
        self.jobs: list[Job | None] = [None] * count
        self.prompt_len = np.zeros(count, np.int64)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.leave:
            self.jobs[row] = None
            self.with_extras.discard(row)
            self.showing.discard(row)
        if plan.leave:
            self.sampling.clear(plan.leave)
        if plan.enter:  # two sequences may enter one row in a step: the later one counts
            self._enter(list({enter.row: enter for enter in plan.enter}.values()))
        if self.host is not None:
            for edit in plan.pages:
                self.host.tables[edit.group][edit.row, edit.first : edit.first + len(edit.pages)] = edit.pages
        elif plan.pages:
            self._edit(plan.pages)
        if self.covered is not None:
            for edit in plan.pages:
                size = self.page_tokens[edit.group]
                self.covered[edit.group, edit.row] = (edit.first + len(edit.pages)) * size
        if plan.guesses:
            self._take(plan.guesses)

    def follow_pages(self) -> None:
        """Keep `covered` from now on. Table entries beyond a row's pages may be those of an earlier sequence."""
        self.covered = np.zeros((len(self.tables), self.count), np.int64)

    def _enter(self, enters: Sequence[Enter]) -> None:
        sampled: list[Enter] = []
        for enter in enters:
            row, job = enter.row, enter.payload
            assert isinstance(job, Job)
            self.computed[row] = enter.computed
            self.prompt_len[row] = enter.prompt_len
            self.jobs[row] = job
            self.with_extras.discard(row)
            if job.pool is not None or job.params.prompt_logprobs is not None:
                self.with_extras.add(row)
            self.showing.discard(row)
            if job.params.include_drafts:
                self.showing.add(row)
            if job.pool is None:
                sampled.append(enter)
            if self.host is not None:
                if self.blank is not None:
                    self.host.tokens[row] = self.blank
                self.host.tokens[row, : len(enter.tokens)] = enter.tokens
                self.host.known[row], self.host.slot[row] = len(enter.tokens), enter.slot
        if self.ship is not None:
            self._write(enters, self.ship)
        self.sampling.set(sampled)

    def _write(self, enters: Sequence[Enter], ship: Ship) -> None:
        """Write all entering sequences in one copy and a few launches."""
        if len(enters) == 1:
            return self._write_one(enters[0], ship)
        count = np.array([len(enter.tokens) for enter in enters], np.int64)
        facts = [(enter.row, len(enter.tokens), enter.computed, enter.slot) for enter in enters]
        there = ship(
            np.concatenate(
                (np.array(facts, np.int64).T.reshape(-1), np.cumsum(count) - count, *(enter.tokens for enter in enters))
            )
        )
        n, total = len(enters), int(count.sum())
        (row, lengths, computed, slot), starts = there[: 4 * n].view(4, n), there[4 * n : 5 * n]
        owners, places = each_of(lengths, starts, total)
        if self.blank is not None:
            self.tokens.index_fill_(0, row, self.blank)
        self.tokens[row[owners], places] = there[5 * n :]
        for table, values in ((self.known, lengths), (self.reached, computed), (self.slot, slot)):
            table.index_copy_(0, row, values)

    def _write_one(self, enter: Enter, ship: Ship) -> None:
        """The same for one sequence with fewer launches: its first token waits for each of them."""
        row, count = enter.row, len(enter.tokens)
        there = ship(np.array((count, enter.computed, enter.slot, *enter.tokens), np.int64))
        if self.blank is not None:
            self.tokens[row].fill_(self.blank)
        self.tokens[row, :count].copy_(there[3:])
        for i, table in enumerate((self.known, self.reached, self.slot)):
            table[row].copy_(there[i])

    def _edit(self, edits: Sequence[PageEdit]) -> None:
        """Apply all edits of a group's page tables in one copy and one launch."""
        assert self.ship is not None
        for group, table in enumerate(self.tables):
            pages: dict[int, int] = {}  # by table entry: of two sequences in one row, the later one counts
            for edit in edits:
                if edit.group == group:
                    first = edit.row * table.shape[1] + edit.first
                    pages.update(zip(range(first, first + len(edit.pages)), edit.pages, strict=True))
            if pages:
                there = self.ship(np.array((list(pages), list(pages.values())), np.int64))
                table.view(-1).index_copy_(0, there[0], there[1])

    def _take(self, guesses: Sequence[Guess]) -> None:
        """Make drafts of the host's guesses: their tokens after each row's newest one, which the device alone knows
        while a step is in flight. Beyond a guess, its last token is repeated: any draft may be wrong."""
        most = max(len(guess.tokens) for guess in guesses)
        facts = [
            (guess.row, guess.position, *guess.tokens, *(guess.tokens[-1],) * (most - len(guess.tokens)))
            for guess in guesses
        ]
        there = self.index(np.array(facts, np.int64))
        rows, tokens = there[:, 0], there[:, 2:]
        first = (self.known[rows] - there[:, 1]).clamp(0, most - 1)
        places = (first[:, None] + torch.arange(most, device=self.device)).clamp_max(most - 1)
        self.hint([guess.row for guess in guesses], Draft(tokens.gather(1, places)))

    def is_simple(self, job: Job) -> bool:
        """Whether the job wants only tokens, greedy or sampled from the logits alone (no penalties, bans, grammar)."""
        only_tokens = job.pool is None and job.params.prompt_logprobs is None
        return only_tokens and self.sampling.facts_of(job.params, job.stop_ids).simple

    def job(self, row: int) -> Job:
        job = self.jobs[row]
        assert job is not None, f"row {row} has work but no sequence"
        return job

    def index(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Row numbers, or other small integers, on the device."""
        numbers = np.asarray(rows, np.int64)
        return torch.from_numpy(numbers) if self.ship is None else self.ship(numbers)

    def commit(self, rows: Sequence[int], tokens: Tensor, counts: Tensor | None) -> None:
        """Append tokens[i, :counts[i]] (without counts, one each) to the known tokens of rows[i]. A row with NO_TOKEN
        is about to end; until then it may read any valid token."""
        if self.host is not None:
            return self.host.commit(rows, tokens.numpy(), None if counts is None else counts.numpy())
        index = self.index(rows)
        # Rejected tokens are written, too: nothing reads beyond the known tokens.
        self._behind(index, tokens.clamp_min(0))
        self.known.index_add_(0, index, torch.ones_like(index) if counts is None else counts)

    def advance(self, rows: Sequence[int], counts: np.ndarray, accepted: Tensor | None) -> None:
        """Add `counts` computed tokens to each row, and the `accepted` drafts, which only the device knows."""
        if self.ship is None:
            return
        there = self.ship(np.array((rows, counts), np.int64))
        self.reached.index_add_(0, there[0], there[1] if accepted is None else there[1] + accepted)

    def hint(self, rows: Sequence[int], draft: Draft) -> None:
        """Write drafts after the known tokens, where the next step's input and its verification read them."""
        index = self.index(rows)
        self._behind(index, draft.tokens)
        if self.trees is not None:
            self.trees.put(index, draft.parents)
        else:
            assert draft.parents is None, "only a strategy with `trees` may propose them"

    def _behind(self, index: Tensor, tokens: Tensor) -> None:
        places = self.known[index][:, None] + torch.arange(tokens.shape[1], device=self.device)
        self.tokens[index[:, None], places.clamp_max(self.tokens.shape[1] - 1)] = tokens
