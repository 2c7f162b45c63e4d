"""Permanent rows: a sequence enters one, stays until it ends or is preempted, and a step gathers the rows it runs.

Everything here changes only inside launched work, in the device's order; the host plans from its own lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bankfull.sample.params import SamplingParams
from bankfull.sample.table import RowParams, SamplingTable
from bankfull.state.spec import Layout
from bankfull.types import Enter, PageEdit, StepPlan

Ship = Callable[[np.ndarray], Tensor]
"""An array on its way to the device; the host goes on."""


def each_of(counts: Tensor, starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """`total` things, `counts` of each owner side by side from `starts` on: whose each is, and its number there."""
    owners = torch.repeat_interleave(counts, output_size=total)
    return owners, torch.arange(total, device=counts.device) - starts[owners]


@dataclass(frozen=True, slots=True)
class Job:
    """What the runner needs to know of a request: the payload that the scheduler hands through."""

    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pool: str | None = None
    """None, "last" or "mean": return hidden states of the prompt instead of tokens."""
    allowed_mask: Tensor | None = None
    """`SamplingTable.allowed_mask` of the params, for all samples."""


class HostRows:
    """The same memory as arrays of numpy, which small work takes a fraction of torch's time for."""

    def __init__(self, rows: Rows) -> None:
        self.tokens, self.known, self.slot = rows.tokens.numpy(), rows.known.numpy(), rows.slot.numpy()
        self.tables = [table.numpy() for table in rows.tables]

    def commit(self, rows: Sequence[int], tokens: np.ndarray, counts: np.ndarray | None) -> None:
        index = np.array(rows, np.int64)
        if counts is None:
            self.tokens[index, self.known[index]] = np.maximum(tokens[:, 0], 0)
            self.known[index] += 1
            return
        for j in range(tokens.shape[1]):
            fits = counts > j
            some = index[fits]
            self.tokens[some, self.known[some] + j] = tokens[fits, j].clip(0)
        self.known[index] += counts


class Rows:
    """On a device of its own the tensors have one line more than there are rows: those that fill up a captured step
    all use it, and nothing that they leave there matters."""

    def __init__(
        self, count: int, max_len: int, layout: Layout, vocab: int, device: torch.device, ship: Ship | None = None
    ) -> None:
        """`ship`: how arrays reach a device that does not share the host's memory."""
        self.device, self.count, self.ship = device, count, ship
        lines = count if ship is None else count + 1
        self.tokens = torch.zeros(lines, max_len + 1, dtype=torch.long, device=device)
        self.known = torch.zeros(lines, dtype=torch.long, device=device)
        self.computed = np.zeros(count, np.int64)
        """On the host, because batches are built from it; it changes in the device's order. Exact where the host waits
        for each step; else an upper bound while drafts are on their way, since the device alone knows how many hold."""
        self.reached = torch.zeros(lines, dtype=torch.long, device=device)
        """The same as the device knows it; kept only where the host does not wait."""
        self.slot = torch.zeros(lines, dtype=torch.long, device=device)
        self.tables = [
            torch.zeros(lines, -(-max_len // group.page_tokens), dtype=torch.long, device=device)
            for group in layout.paged
        ]
        self.host = HostRows(self) if ship is None else None
        self.page_tokens = tuple(group.page_tokens for group in layout.paged)
        self.curious: set[int] = set()
        """Rows that ask for something beside tokens: scores of their prompt, hidden states."""
        self.sampling = SamplingTable(lines, vocab, device)
        self.jobs: list[Job | None] = [None] * count
        self.prompt_len = np.zeros(count, np.int64)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.leave:
            self.jobs[row] = None
            self.curious.discard(row)
        if plan.leave:
            self.sampling.clear(plan.leave)
        if plan.enter:  # of two sequences that had a row in one step, the later one counts
            self._enter(list({enter.row: enter for enter in plan.enter}.values()))
        if self.host is not None:
            for edit in plan.pages:
                self.host.tables[edit.group][edit.row, edit.first : edit.first + len(edit.pages)] = edit.pages
        elif plan.pages:
            self._edit(plan.pages)

    def _enter(self, enters: Sequence[Enter]) -> None:
        entering: list[RowParams] = []
        for enter in enters:
            row, job = enter.row, enter.payload
            assert isinstance(job, Job)
            self.computed[row] = enter.computed
            self.prompt_len[row] = enter.prompt_len
            self.jobs[row] = job
            self.curious.discard(row)
            if job.pool is not None or job.params.prompt_logprobs is not None:
                self.curious.add(row)
            if job.pool is None:
                entering.append(
                    RowParams(row, job.params, enter.prompt_len, enter.child, job.seed, job.stop_ids, job.allowed_mask)
                )
            if self.host is not None:
                self.host.tokens[row, : len(enter.tokens)] = enter.tokens
                self.host.known[row], self.host.slot[row] = len(enter.tokens), enter.slot
        if self.ship is not None:
            self._write(enters, self.ship)
        self.sampling.set(entering)

    def _write(self, enters: Sequence[Enter], ship: Ship) -> None:
        """All that enters at once, in one copy and a few launches."""
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
        self.tokens[row[owners], places] = there[5 * n :]
        for table, values in ((self.known, lengths), (self.reached, computed), (self.slot, slot)):
            table.index_copy_(0, row, values)

    def _write_one(self, enter: Enter, ship: Ship) -> None:
        """The same with fewer launches: a prompt that comes alone waits for each of them."""
        row, count = enter.row, len(enter.tokens)
        there = ship(np.array((count, enter.computed, enter.slot, *enter.tokens), np.int64))
        self.tokens[row, :count].copy_(there[3:])
        for i, table in enumerate((self.known, self.reached, self.slot)):
            table[row].copy_(there[i])

    def _edit(self, edits: Sequence[PageEdit]) -> None:
        """All changes of a group's tables in one copy and one launch."""
        assert self.ship is not None
        for group, table in enumerate(self.tables):
            pages: dict[int, int] = {}  # by place: of two sequences that had a row in one step, the later one counts
            for edit in edits:
                if edit.group == group:
                    first = edit.row * table.shape[1] + edit.first
                    pages.update(zip(range(first, first + len(edit.pages)), edit.pages, strict=True))
            if pages:
                there = self.ship(np.array((list(pages), list(pages.values())), np.int64))
                table.view(-1).index_copy_(0, there[0], there[1])

    def is_simple(self, job: Job) -> bool:
        """Nothing but tokens is asked for, greedy or drawn in a way that needs no more than the scores themselves."""
        only_tokens = job.pool is None and job.params.prompt_logprobs is None
        return only_tokens and self.sampling.facts_of(job.params, job.stop_ids).simple

    def job(self, row: int) -> Job:
        job = self.jobs[row]
        assert job is not None, f"row {row} has work but no sequence"
        return job

    def index(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Row numbers, or other small numbers, on the device."""
        numbers = np.asarray(rows, np.int64)
        return torch.from_numpy(numbers) if self.ship is None else self.ship(numbers)

    def commit(self, rows: Sequence[int], tokens: Tensor, counts: Tensor | None) -> None:
        """Append tokens[i, :counts[i]] (without counts, one each) to the known tokens of rows[i]. A row with NO_TOKEN
        is about to end; until then what it reads does not matter, but must be a token."""
        if self.host is not None:
            return self.host.commit(rows, tokens.numpy(), None if counts is None else counts.numpy())
        index = self.index(rows)
        # Tokens that do not hold are written, too: what stands behind the known ones is read by nobody.
        self._behind(index, tokens.clamp_min(0))
        self.known.index_add_(0, index, torch.ones_like(index) if counts is None else counts)

    def advance(self, rows: Sequence[int], counts: np.ndarray, accepted: Tensor | None) -> None:
        """So many tokens of each row have been computed; `accepted` drafts more, as only the device knows."""
        if self.ship is None:
            return
        there = self.ship(np.array((rows, counts), np.int64))
        self.reached.index_add_(0, there[0], there[1] if accepted is None else there[1] + accepted)

    def hint(self, rows: Sequence[int], drafts: Tensor) -> None:
        """Write guesses behind the known tokens, where the next step's input and its verification find them."""
        self._behind(self.index(rows), drafts)

    def _behind(self, index: Tensor, tokens: Tensor) -> None:
        last = self.tokens.shape[1] - 1
        for j in range(tokens.shape[1]):
            self.tokens[index, (self.known[index] + j).clamp(max=last)] = tokens[:, j]
