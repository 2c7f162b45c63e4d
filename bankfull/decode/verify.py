"""Exact verification of drafts: chains and trees.

Random numbers are a function of (seed, child, position), so the logits after a path determine the token that plain
decoding would choose there. A token is sampled after every draft, and drafts are accepted along the path on which they
equal the sampled tokens. A deterministic draft is accepted with probability q(draft), which no rule can exceed, and the
result is not only distributed as plain decoding: it is the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bankfull.decode.strategy import DraftTree, Sampling, Scores, Ship, Verdict, stack
from bankfull.sample.logits import NO_TOKEN, Sampled, sample


def sample_lines(scores: Scores, sampling: Sampling) -> Sampled:
    """The token that plain decoding would choose after each line."""
    if sampling.plain_greedy:
        return Sampled(scores.best())
    tokens, owners = sampling.history
    return sample(
        scores.logits(),
        sampling.rows,
        sampling.table,
        tokens,
        sampling.length,
        sampling.mask,
        host_rows=sampling.host_rows,
        owners=owners,
    )


def verify(scores: Scores, sampling: Sampling) -> Verdict:
    sampled = sample_lines(scores, sampling)
    chosen = stack(sampled.tokens, sampling.widths, NO_TOKEN)
    if chosen.shape[1] == 1:
        return Verdict(chosen, None, sampled)
    if sampling.tree is not None:
        path, counts = accepted_path(chosen, sampling.tree, sampling.widths, sampling.ship)
        return Verdict(chosen.gather(1, path), counts, sampled, path)
    widths = sampling.ship(sampling.widths)
    # The draft after a line's position: the next line counts only if it was sampled. The last line has none.
    length = stack(sampling.length, sampling.widths, 0)
    rows = stack(sampling.rows, sampling.widths, 0)
    follows = sampling.tokens[rows, length]
    has_next = torch.arange(chosen.shape[1], device=chosen.device)[None, :] < widths[:, None] - 1
    matches = (follows == chosen) & has_next & (chosen != NO_TOKEN)
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Verdict(chosen, accepted + 1, sampled)


def accepted_path(chosen: Tensor, tree: DraftTree, widths: Sequence[int], ship: Ship) -> tuple[Tensor, Tensor]:
    """(rows, lines) the accepted lines of each row in ascending order, then the others; and the number of accepted
    ones, at least 1. `chosen` (rows, lines): the token sampled after each line."""
    ids, up = stack(tree.ids, widths, NO_TOKEN), stack(tree.parents, widths, 0)
    line = torch.arange(chosen.shape[1], device=chosen.device)
    wanted = chosen.gather(1, up)
    good = (ids == wanted) & (wanted != NO_TOKEN) & (line < ship(widths)[:, None])
    good[:, 0] = True
    depths, ancestors = (up != line).long(), (torch.ones_like(line) << line).expand_as(up)
    for _ in range((chosen.shape[1] - 1).bit_length()):  # pointer jumping: each round doubles the checked ancestors
        good, depths = good & good.gather(1, up), depths + depths.gather(1, up)
        ancestors, up = ancestors | ancestors.gather(1, up), up.gather(1, up)
    # A drafter may propose the same token twice after a line. The deepest accepted line counts, the first of equals.
    last = (depths * len(line) - line).where(good, -1 - len(line)).argmax(1, keepdim=True)
    accepted = (ancestors.gather(1, last) >> line & 1).bool()
    return torch.sort(~accepted, dim=1, stable=True).indices, accepted.sum(1)
