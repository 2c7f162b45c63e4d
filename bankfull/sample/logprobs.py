"""Log-probabilities of the model's own distribution: log-softmax of the raw logits."""

from __future__ import annotations

import torch
from torch import Tensor


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each line's token [n] (NaN for a token below 0), and the `top` best ids and their
    log-probabilities [n, top], best first, lowest id first among equals."""
    table = logits.log_softmax(-1, dtype=torch.float64 if logits.dtype == torch.float64 else torch.float32)
    logprobs = table.gather(1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    ids = _best(table, min(top, table.shape[-1]))
    return logprobs.masked_fill(tokens < 0, torch.nan), ids, table.gather(1, ids)


def _best(values: Tensor, count: int) -> Tensor:
    if not count:  # most requests want the chosen token only, and keys of the whole vocabulary take time
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    if values.dtype == torch.float64:
        return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    # The high half is an order-preserving integer of the float, the low half the reversed id: distinct keys, no ties.
    # Adding 0.0 turns -0.0 into 0.0, which compare equal.
    raw = (values + 0.0).view(torch.int32).to(torch.int64)
    ordered = torch.where(raw < 0, -(2**31) - raw, raw)
    ids = torch.arange(values.shape[-1], device=values.device)
    return (ordered * 2**32 - ids).topk(count).indices
