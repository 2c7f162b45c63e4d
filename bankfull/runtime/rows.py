"""Permanent rows: a sequence enters one, stays until it ends or is preempted, and a step gathers the rows it runs.

Everything here changes only inside launched work, in the device's order; the host plans from its own lower bounds.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bankfull.sample.params import SamplingParams
from bankfull.sample.table import SamplingTable
from bankfull.state.spec import Layout
from bankfull.types import Enter, StepPlan


@dataclass(frozen=True, slots=True)
class Job:
    """What the runner needs to know of a request: the payload that the scheduler hands through."""

    request: Hashable
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    pool: str | None = None
    """None, "last" or "mean": return hidden states of the prompt instead of tokens."""


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
    def __init__(self, count: int, max_len: int, layout: Layout, vocab: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(count, max_len + 1, dtype=torch.long, device=device)
        self.known = torch.zeros(count, dtype=torch.long, device=device)
        self.computed = np.zeros(count, np.int64)
        """On the host, because batches are built from it; exact, because it changes in the device's order."""
        self.slot = torch.zeros(count, dtype=torch.long, device=device)
        self.tables = [
            torch.zeros(count, -(-max_len // group.page_tokens), dtype=torch.long, device=device)
            for group in layout.paged
        ]
        self.host = HostRows(self) if device.type == "cpu" else None
        self.page_tokens = tuple(group.page_tokens for group in layout.paged)
        self.curious: set[int] = set()
        """Rows that ask for something beside tokens: scores of their prompt, hidden states."""
        self.sampling = SamplingTable(count, vocab, device)
        self.jobs: list[Job | None] = [None] * count
        self.prompt_len = np.zeros(count, np.int64)

    def apply(self, plan: StepPlan) -> None:
        for row in plan.leave:
            self.jobs[row] = None
            self.curious.discard(row)
            self.sampling.clear(row)
        for enter in plan.enter:
            self._enter(enter)
        for edit in plan.pages:
            place = (edit.row, slice(edit.first, edit.first + len(edit.pages)))
            if self.host is not None:
                self.host.tables[edit.group][place] = edit.pages
            else:
                self.tables[edit.group][place] = torch.tensor(edit.pages, dtype=torch.long, device=self.device)

    def _enter(self, enter: Enter) -> None:
        row, job = enter.row, enter.payload
        assert isinstance(job, Job)
        self.tokens[row, : len(enter.tokens)] = torch.tensor(enter.tokens, dtype=torch.long, device=self.device)
        self.known[row] = len(enter.tokens)
        self.computed[row] = enter.computed
        self.slot[row] = enter.slot
        self.prompt_len[row] = enter.prompt_len
        self.jobs[row] = job
        self.curious.discard(row)
        if job.pool is not None or job.params.prompt_logprobs is not None:
            self.curious.add(row)
        if job.pool is None:
            self.sampling.set(
                row, job.params, prompt_len=enter.prompt_len, child=enter.child, seed=job.seed, stop_ids=job.stop_ids
            )

    def is_simple(self, job: Job) -> bool:
        """Nothing but tokens is asked for, greedy or drawn in a way that needs no more than the scores themselves."""
        only_tokens = job.pool is None and job.params.prompt_logprobs is None
        return only_tokens and self.sampling.facts_of(job.params, job.stop_ids).simple

    def job(self, row: int) -> Job:
        job = self.jobs[row]
        assert job is not None, f"row {row} has work but no sequence"
        return job

    def commit(self, rows: Sequence[int], tokens: Tensor, counts: Tensor | None) -> None:
        """Append tokens[i, :counts[i]] (without counts, one each) to the known tokens of rows[i]. A row with NO_TOKEN
        is about to end; until then what it reads does not matter, but must be a token."""
        if self.host is not None:
            return self.host.commit(rows, tokens.numpy(), None if counts is None else counts.numpy())
        index = torch.tensor(list(rows), device=self.device)
        counts = torch.ones_like(index) if counts is None else counts
        for j in range(tokens.shape[1]):
            fits = counts > j
            self.tokens[index[fits], self.known[index[fits]] + j] = tokens[fits, j].clamp_min(0)
        self.known[index] += counts

    def hint(self, rows: Sequence[int], drafts: Tensor) -> None:
        """Write guesses behind the known tokens, where the next step's input and its verification find them."""
        index = torch.tensor(list(rows), dtype=torch.long, device=self.device)
        last = self.tokens.shape[1] - 1
        for j in range(drafts.shape[1]):
            self.tokens[index, (self.known[index] + j).clamp(max=last)] = drafts[:, j]
