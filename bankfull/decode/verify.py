"""Exact verification of draft chains.

Random numbers are a function of (seed, child, position), so the token that plain decoding would choose at a position is
known as soon as the logits there are: sample every position of the chain and accept drafts as long as they are what was
sampled. For a deterministic draft this accepts with probability q(draft), which is the best that any rule can do, and
the result is not only distributed as plain decoding: it is the same tokens.
"""

from __future__ import annotations

import torch

from bankfull.decode.strategy import Sampling, Scores, Verdict, stack
from bankfull.sample.logits import NO_TOKEN, Sampled, sample


def verify_chain(scores: Scores, sampling: Sampling) -> Verdict:
    if sampling.plain_greedy:
        sampled = Sampled(scores.best())
    else:
        sampled = sample(
            scores.logits(),
            sampling.rows,
            sampling.table,
            sampling.tokens,
            sampling.length,
            sampling.mask,
            host_rows=sampling.host_rows,
        )
    chosen = stack(sampled.tokens, sampling.widths, NO_TOKEN)
    if chosen.shape[1] == 1:
        return Verdict(chosen, None, sampled)
    widths = sampling.ship(sampling.widths)
    # The draft that follows a line's position; it decides whether the next line counts. The last line has none.
    length = stack(sampling.length, sampling.widths, 0)
    rows = stack(sampling.rows, sampling.widths, 0)
    follows = sampling.tokens[rows, length]
    has_next = torch.arange(chosen.shape[1], device=chosen.device)[None, :] < widths[:, None] - 1
    matches = (follows == chosen) & has_next & (chosen != NO_TOKEN)
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Verdict(chosen, accepted + 1, sampled)
