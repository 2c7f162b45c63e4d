"""The drafts of a step for the requests that want to see them: brought to the host like logprobs, only for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.runtime.rows import Rows
from bankfull.types import StepDrafts, Work


@dataclass(slots=True)
class ShownDrafts:
    work: list[int]
    """Indices of the work whose drafts are shown."""
    tokens: Tensor
    """(drafts) token ids, those of one row after the other."""
    parents: Tensor | None
    """(drafts) each draft's parent as a line of its row, where line 0 is the last known token; None: chains."""

    def on_host(self, fetch: Callable[[Tensor], Tensor]) -> ShownDrafts:
        return ShownDrafts(self.work, fetch(self.tokens), None if self.parents is None else fetch(self.parents))


def shown_drafts(batch: Batch, work: Sequence[Work], rows: Rows) -> ShownDrafts | None:
    """The step's drafts that are shown, read before it is committed: proposing overwrites them."""
    first, wanted, index, lines = 0, list[int](), list[int](), list[tuple[int, int]]()
    for i, w in enumerate(work):
        if not w.sample:
            continue
        if w.drafts and w.row in rows.showing:
            wanted.append(i)
            index += range(first + 1, first + 1 + w.drafts)
            lines += [(w.row, line) for line in range(1, 1 + w.drafts)]
        first += 1 + w.drafts
    if not wanted:
        return None
    tokens = batch.tokens[rows.index(np.asarray(batch.logit_index)[index])]
    if rows.trees is None:
        return ShownDrafts(wanted, tokens, None)
    row, line = (rows.index(list(column)) for column in zip(*lines, strict=True))
    return ShownDrafts(wanted, tokens, rows.trees.parents[row, line])


def read_drafts(
    shown: ShownDrafts, work: Sequence[Work], counts: Sequence[int], path: Sequence[Sequence[int]] | None
) -> dict[int, StepDrafts]:
    """The drafts of each shown sequence, by the index of its work. `counts`, `path`: those of the verdict, for the work
    that samples."""
    verdicts = {i: j for j, i in enumerate(i for i, w in enumerate(work) if w.sample)}
    tokens, by_work, first = shown.tokens.tolist(), {}, 0
    above = None if shown.parents is None else shown.parents.tolist()
    for i in shown.work:
        j, drafts = verdicts[i], work[i].drafts
        drafted = tokens[first : first + drafts]
        parents = list(range(drafts)) if above is None else above[first : first + drafts]
        last = counts[j] - 1 if path is None else path[j][counts[j] - 1]
        by_work[i] = StepDrafts(counts[j] - 1, rejected_path(drafted, parents, last), drafts)
        first += drafts
    return by_work


def rejected_path(tokens: Sequence[int], parents: Sequence[int], last: int) -> list[int]:
    """The drafts that follow the last accepted line and were rejected: its first child, that one's first, and so on."""
    rejected = []
    for draft, parent in enumerate(parents):
        if parent == last:
            rejected.append(tokens[draft])
            last = draft + 1
    return rejected
