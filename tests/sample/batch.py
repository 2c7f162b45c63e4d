"""A table, its tokens and its rows, built from plain Python for a test."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.runtime.rows import Job
from bankfull.sample.logits import Sampled, SamplingTable, process, sample
from bankfull.sample.params import SamplingParams
from bankfull.types import Enter


def entering(
    row: int, params: SamplingParams, *, prompt_len: int, child: int, seed: int, stop_ids: Collection[int]
) -> Enter:
    """A sequence that takes a row, as `SamplingTable.set` reads it."""
    job = Job(params, seed, frozenset(stop_ids))
    return Enter(row, row, (), 0, prompt_len, child, 0, job)


@dataclass
class Batch:
    table: SamplingTable
    tokens: Tensor
    length: Tensor
    rows: Tensor
    host_rows: list[int]

    def process(self, logits: Tensor, mask: Tensor | None = None, *, told: bool = True) -> Tensor:
        told_rows = self.host_rows if told else None
        return process(logits, self.rows, self.table, self.tokens, self.length, mask, told_rows)

    def sample(self, logits: Tensor, mask: Tensor | None = None, *, told: bool = True) -> Sampled:
        told_rows = self.host_rows if told else None
        return sample(logits, self.rows, self.table, self.tokens, self.length, mask, host_rows=told_rows)


def batch(
    all_params: Sequence[SamplingParams],
    vocab: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    outputs: Sequence[Sequence[int]] | None = None,
    stop_ids: Sequence[int] = (),
    seed: int = 11,
) -> Batch:
    """Line i lives in permanent row i + 2, and the tokens beyond a row's length are rubbish."""
    count = len(all_params)
    prompts = prompts or [[0]] * count
    outputs = outputs or [[]] * count
    table = SamplingTable(count + 3, vocab)
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    tokens = torch.randint(-3, vocab + 3, (count + 3, longest + 4), generator=torch.Generator().manual_seed(1))
    for line, (params, prompt, output) in enumerate(zip(all_params, prompts, outputs, strict=True)):
        row = line + 2
        table.set([entering(row, params, prompt_len=len(prompt), child=0, seed=seed + line, stop_ids=stop_ids)])
        said = [*prompt, *output]
        tokens[row, : len(said)] = torch.tensor(said, dtype=torch.int64)
    length = torch.tensor([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)])
    host_rows = [line + 2 for line in range(count)]
    return Batch(table, tokens, length, torch.tensor(host_rows), host_rows)
