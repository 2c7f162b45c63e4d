"""Exact verification of draft chains.

Random numbers are a function of (seed, child, position), so the logits at a position determine the token that plain
decoding would choose there. Every position of the chain is sampled, and drafts are accepted as long as they equal the
sampled tokens. A deterministic draft is accepted with probability q(draft), which no rule can exceed, and the result is
not only distributed as plain decoding: it is the same tokens.
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
    # The draft after a line's position: the next line counts only if it was sampled. The last line has none.
    length = stack(sampling.length, sampling.widths, 0)
    rows = stack(sampling.rows, sampling.widths, 0)
    follows = sampling.tokens[rows, length]
    has_next = torch.arange(chosen.shape[1], device=chosen.device)[None, :] < widths[:, None] - 1
    matches = (follows == chosen) & has_next & (chosen != NO_TOKEN)
    accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return Verdict(chosen, accepted + 1, sampled)
