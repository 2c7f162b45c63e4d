"""The rules that accept drafts, by name: the same tokens as plain decoding, the same distribution, or neither.

| rule | accepts a draft x | output |
|---|---|---|
| `same` | if it is the token that plain decoding chooses | the tokens of plain decoding |
| `rejection` | with probability min(1, p(x) / q(x)) | the distribution of plain decoding, other tokens |
| `typical` | if p(x) is high enough for the entropy of p | **lossy**: another distribution |

p is the target's distribution and q the drafter's, both after penalties, masks, temperature and truncation. Rows with
temperature 0 have one possible token, so each rule gives them the tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.rejection import NO_NODE, AcceptedPath, accept_tree
from bankfull.decode.strategy import Draft, DraftTree, Sampling, Scores, Verdict, stack
from bankfull.decode.typical import accept_typical
from bankfull.decode.verify import verify
from bankfull.sample.draw import NO_TOKEN
from bankfull.sample.logits import process, with_logprobs
from bankfull.sample.random import NumberKey
from bankfull.sample.table import CHILD, SEED

SAME, REJECTION, TYPICAL = "same", "rejection", "typical"


class AcceptanceRule(Protocol):
    """Called by a strategy: `remember` with each of its proposals, and `verify` instead of `decode.verify.verify`."""

    sampled_drafts: bool = False
    """Whether drafts must be drawn from the distributions in `Draft.scores`."""

    def forget(self, host_rows: Sequence[int]) -> None:
        """New sequences have entered these rows: their drafts are arbitrary tokens until the next proposal."""
        return None

    def remember(self, host_rows: Sequence[int], draft: Draft) -> None:
        """The next drafts of these rows. A token below 0 was not drawn, and is not accepted."""
        return None

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict: ...


class SameTokens(AcceptanceRule):
    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)


class TypicalAcceptance(AcceptanceRule):
    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        if sampling.plain_greedy or max(sampling.widths) == 1:
            return verify(scores, sampling)
        lines = TargetLines(scores, sampling)
        return lines.verdict(accept_typical(lines.scores, lines.drafts, lines.parents, lines.key))


class RejectionSampling(AcceptanceRule):
    """Keeps each row's proposal and its distributions until the row's next proposal: one float32 number per token id
    and draft that has children."""

    sampled_drafts = True

    def __init__(self) -> None:
        self._proposed: dict[int, tuple[Tensor, Tensor]] = {}
        """Each row's proposal: draft tokens (drafts), and scores (drawn places, vocabulary)."""

    def forget(self, host_rows: Sequence[int]) -> None:
        for row in host_rows:
            self._proposed.pop(row, None)

    def remember(self, host_rows: Sequence[int], draft: Draft) -> None:
        assert draft.scores is not None, "the rejection rule needs the distributions of the drafts"
        self._proposed.update(zip(host_rows, zip(draft.tokens, draft.scores, strict=True), strict=True))

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        if sampling.plain_greedy or max(sampling.widths) == 1:
            return verify(scores, sampling)
        lines = TargetLines(scores, sampling)
        drawn = [self._proposed.get(row) for row in lines.host_rows]
        known = next((one for one in drawn if one is not None), None)
        if known is None:  # no row has drafts that were drawn
            nothing = torch.full_like(lines.parents, NO_TOKEN)
            return lines.verdict(accept_tree(lines.scores, nothing, lines.parents, None, lines.key))
        absent = torch.full_like(known[0], NO_TOKEN), known[1]
        tokens, drafted = (torch.stack([(one or absent)[part] for one in drawn]) for part in (0, 1))
        tokens = tokens[:, : lines.parents.shape[1]].where(lines.inside[:, 1:], NO_TOKEN)
        probs = drafted.double().softmax(-1)
        return lines.verdict(accept_tree(lines.scores, tokens, lines.parents, probs, lines.key))


RULES: dict[str, type[AcceptanceRule]] = {SAME: SameTokens, REJECTION: RejectionSampling, TYPICAL: TypicalAcceptance}


class TargetLines:
    """The target's distributions as a rectangle: a row's line 0 is its last known token, line j + 1 its draft j."""

    def __init__(self, scores: Scores, sampling: Sampling) -> None:
        self._sampling, self._logits = sampling, scores.logits()
        widths, table = sampling.widths, sampling.table
        first = np.array([0, *accumulate(widths)])
        self.host_rows = [sampling.host_rows[line] for line in first[:-1].tolist()]
        place = np.arange(max(widths))
        # A row with fewer lines repeats its last one.
        index = sampling.ship(first[:-1, None] + np.minimum(place, np.array(widths)[:, None] - 1))
        self.inside = torch.arange(max(widths), device=index.device) < sampling.ship(widths)[:, None]
        """(rows, lines) whether the row has this line."""
        tokens, owners = sampling.history
        shaped = process(
            self._logits,
            sampling.rows,
            table,
            tokens,
            sampling.length,
            sampling.mask,
            sampling.host_rows,
            owners=owners,
        )
        self.scores = shaped[index]
        """(rows, lines, vocabulary) scores whose softmax is the distribution after each line."""
        rows = sampling.rows[index[:, 0]]
        self.key = NumberKey(table.wholes[rows, SEED], table.wholes[rows, CHILD], sampling.length[index[:, 0]])
        """The key of each row's next token."""

    @property
    def parents(self) -> Tensor:
        """(rows, drafts) NO_NODE for the last known token."""
        sampling = self._sampling
        if sampling.tree is None:
            drafts = self.inside.shape[1] - 1
            return torch.arange(NO_NODE, drafts - 1, device=self.inside.device).expand(len(self.inside), drafts)
        return stack(sampling.tree.parents, sampling.widths, 0)[:, 1:] - 1

    @property
    def drafts(self) -> Tensor:
        """(rows, drafts) the tokens that the step has verified; NO_TOKEN where a row has fewer."""
        sampling = self._sampling
        if sampling.tree is not None:
            return stack(sampling.tree.ids, sampling.widths, NO_TOKEN)[:, 1:]
        length, rows = (stack(part, sampling.widths, 0)[:, :-1] for part in (sampling.length, sampling.rows))
        return sampling.tokens[rows, length].where(self.inside[:, 1:], NO_TOKEN)

    def verdict(self, accepted: AcceptedPath) -> Verdict:
        sampling, lines = self._sampling, self.inside.shape[1]
        path = torch.cat((torch.zeros_like(accepted.counts)[:, None], accepted.nodes.clamp_min(0) + 1), 1)
        # Each accepted token is the choice after the line before it; other lines have none.
        held = torch.arange(lines, device=path.device) < accepted.counts[:, None]
        chosen = torch.full((len(path), lines + 1), NO_TOKEN, dtype=torch.int64, device=path.device)
        chosen.scatter_(1, path.where(held, lines), accepted.tokens)
        within = DraftTree.within(sampling.widths, sampling.ship)
        row = sampling.ship(np.repeat(np.arange(len(sampling.widths)), sampling.widths))
        sampled = with_logprobs(chosen[row, within], self._logits, sampling.rows, sampling.table, sampling.host_rows)
        return Verdict(accepted.tokens, accepted.counts, sampled, None if sampling.tree is None else path)
