"""From a step's logits to its tokens, on the device, for rows with different sampling parameters in one batch.

The order, for every row:

1. log-probabilities are taken from the model's own distribution, the log-softmax of the raw logits;
2. the repetition penalty (tokens of prompt and output), then presence and frequency penalties (output only);
3. `logit_bias`;
4. bans: allowed and banned ids, stop ids before `min_tokens`, the grammar's mask, the last token of a bad word;
5. greedy rows take the highest score, the lowest id among equals, and end here;
6. temperature, top-k, top-p, min-p, typical-p, each on the tokens that the one before has kept;
7. an exponential race picks the token, with one random number per token, keyed by (seed, child, position, purpose,
   token id).

Logits of 16 bits are widened to float32; float64 stays float64. A row's token does not depend on the rest of the batch:
sums that decide something are integer sums, and a stage that runs for one row leaves other rows untouched. Temperature,
top-k and the race give the same token on every device; top-p, min-p and typical-p compare sums or values of exp, whose
last bit differs between devices.

A row that has no usable score (every token banned, or the model gave NaN or +inf for an allowed token) gets `NO_TOKEN`,
and the caller fails that request; other rows are not affected.

Nothing here waits for a device. `host_rows` repeats `rows` as Python integers, to skip stages that no row needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.sample.adjust import adjust
from bankfull.sample.draw import NO_TOKEN, best, draw
from bankfull.sample.logprobs import logprobs_of
from bankfull.sample.race import gumbel
from bankfull.sample.random import NumberKey, Purpose, words_of
from bankfull.sample.table import CHILD, GREEDY, LOGPROBS, SEED, TEMPERATURE, RowFacts, SamplingTable
from bankfull.sample.truncate import truncate

__all__ = [
    "NO_TOKEN",
    "Sampled",
    "SamplingTable",
    "process",
    "sample",
    "sample_ranked",
    "sample_several",
    "with_logprobs",
]
CANDIDATES = 64
"""Tokens of the highest scores from which `sample_several` takes all but its first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Device tensors. `logprobs` is NaN for a row without logprobs, and None if no row has them; `top_ids` and
    `top_logprobs` are as wide as the widest request of the batch (None if no row needs more than the chosen token),
    with -1 and NaN beyond a row's own width."""

    tokens: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def process(
    logits: Tensor,
    rows: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    length: Tensor,
    mask: Tensor | None = None,
    host_rows: Sequence[int] | None = None,
    *,
    owners: Tensor | None = None,
) -> Tensor:
    """Scores [n, V] whose softmax is the distribution that a token is drawn from: -inf where no token may be drawn, and
    for a greedy row 0 at its one token. A row may occur more than once, at different lengths (draft tokens, which then
    are part of `tokens`). Only the first `length` tokens of a row are read, and `tokens` may be a view of the columns
    in use. `owners`: as for `sample`."""
    facts = table.facts_for(host_rows, len(logits))
    scores = adjust(_widened(logits), rows, table, tokens, length, mask, facts, owners)
    shaped = truncate(scores, rows, table, facts)
    if host_rows is not None and not any(fact.greedy for fact in facts):
        return shaped
    top, token = scores.max(-1, keepdim=True)
    only = torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)
    greedy = (table.wholes[rows, GREEDY] > 0).unsqueeze(-1) & top.isfinite()
    return torch.where(greedy, only, shaped)


def sample(
    logits: Tensor,
    rows: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    length: Tensor,
    mask: Tensor | None = None,
    *,
    host_rows: Sequence[int] | None,
    owners: Tensor | None = None,
) -> Sampled:
    """One token per line of `logits` [n, V]; `length` [n] is the number of known tokens, the position being sampled.
    `mask` [n, ceil(V / 32)] is a packed bitmask of the tokens that a grammar allows, all ones for rows without one.
    `owners` [n]: the line of `tokens` that holds a line's tokens; its row if not given."""
    facts = table.facts_for(host_rows, len(logits))
    scores = adjust(_widened(logits), rows, table, tokens, length, mask, facts, owners)
    chance = table.choose(facts, lambda fact: not fact.greedy)
    if not chance:
        picked = best(scores)
    elif table.chooser is not None and scores.dtype == torch.float32 and host_rows is not None:
        picked = _choose(scores, rows, table, length, facts)
    else:
        drawn = _draw(chance.take(scores), chance.take(rows), table, chance.take(length), chance.of(facts))
        if host_rows is None:
            picked = torch.where(table.wholes[rows, GREEDY] > 0, best(scores), drawn)
        else:
            picked = drawn if chance.index is None else chance.put(best(scores), drawn)
    return _with_logprobs(picked, logits, rows, table, facts)


def sample_several(
    logits: Tensor,
    rows: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    length: Tensor,
    count: int,
    *,
    host_rows: Sequence[int],
) -> Tensor:
    """[n, count] draft tokens for each line: the one that `sample` chooses, then others in the order of their scores,
    or for a sampled row in the order of its race. They are distinct where the vocabulary allows it. top-k, top-p and
    min-p limit the first one only."""
    if count == 1:
        return sample(logits, rows, table, tokens, length, host_rows=host_rows).tokens[:, None]
    return sample_ranked(logits, rows, table, tokens, length, count, host_rows=host_rows)[0]


def sample_ranked(
    logits: Tensor,
    rows: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    length: Tensor,
    count: int,
    *,
    host_rows: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The tokens of `sample_several`, and their confidence: log-softmax [n, count] of the scores that order them, over
    the best candidates. -inf where there is no token."""
    first = sample(logits, rows, table, tokens, length, host_rows=host_rows).tokens[:, None]
    facts = table.facts_for(host_rows, len(logits))
    scores, ids = adjust(_widened(logits), rows, table, tokens, length, None, facts).topk(
        min(max(CANDIDATES, count), logits.shape[-1])
    )
    if not all(fact.greedy for fact in facts):
        key = NumberKey(table.wholes[rows, SEED], table.wholes[rows, CHILD], length.to(torch.int64))
        noise = gumbel(*(words_of(key, Purpose.TOKEN, ids, low=low) for low in (False, True)))
        drawn = scores.double() / table.reals[rows, TEMPERATURE, None] + noise
        scores = torch.where(table.wholes[rows, GREEDY, None] > 0, scores.double(), drawn)
    confidence = scores.log_softmax(-1)
    chosen = ids == first
    # The first token may be none of the candidates, where top-k or a grammar decides otherwise: it ranks first anyway.
    of_first = torch.where(chosen.any(-1, keepdim=True), confidence.masked_fill(~chosen, -torch.inf), confidence)
    order = scores.masked_fill(chosen, -torch.inf).sort(dim=-1, descending=True, stable=True).indices[:, : count - 1]
    best_ids = torch.cat((first, ids.gather(1, order)), 1)
    ranked = torch.cat((of_first.amax(-1, keepdim=True), confidence.gather(1, order)), 1)
    missing = (0, count - best_ids.shape[1])
    return (
        torch.nn.functional.pad(best_ids, missing, value=NO_TOKEN),
        torch.nn.functional.pad(ranked, missing, value=-torch.inf),
    )


def _draw(scores: Tensor, rows: Tensor, table: SamplingTable, length: Tensor, facts: Sequence[RowFacts]) -> Tensor:
    shaped = truncate(scores, rows, table, facts)
    key = NumberKey(table.wholes[rows, SEED], table.wholes[rows, CHILD], length.to(torch.int64))
    return draw(shaped, key, Purpose.TOKEN)


def _choose(scores: Tensor, rows: Tensor, table: SamplingTable, length: Tensor, facts: Sequence[RowFacts]) -> Tensor:
    """Lines that the kernel supports go to it, others to tensor operations; each line's own parameters decide."""
    assert table.chooser is not None
    odd = table.choose(facts, lambda fact: fact.typical)
    if not odd:
        return table.chooser(scores, rows, table, length)
    picked = _draw(odd.take(scores), odd.take(rows), table, odd.take(length), odd.of(facts))
    if odd.index is None:
        return picked
    known = table.choose(facts, lambda fact: not fact.typical)
    others = table.chooser(known.take(scores), known.take(rows), table, known.take(length))
    return odd.put(known.put(torch.empty_like(rows), others), picked)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def with_logprobs(
    picked: Tensor, logits: Tensor, rows: Tensor, table: SamplingTable, host_rows: Sequence[int]
) -> Sampled:
    """Tokens that another rule has chosen [n], with the logprobs that their rows want. NO_TOKEN has any."""
    sampled = _with_logprobs(picked.clamp_min(0), logits, rows, table, table.facts_for(host_rows, len(logits)))
    return Sampled(picked, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)


def _with_logprobs(
    picked: Tensor, logits: Tensor, rows: Tensor, table: SamplingTable, facts: Sequence[RowFacts]
) -> Sampled:
    chosen = table.choose(facts, lambda fact: fact.logprobs is not None)
    if not chosen:
        return Sampled(picked)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = torch.full(picked.shape, torch.nan, dtype=dtype, device=picked.device)
    width = min(max(facts[line].logprobs or 0 for line in chosen.lines), logits.shape[-1])
    part, ids, values = logprobs_of(chosen.take(logits), chosen.take(picked), width)
    widths = table.wholes[chosen.take(rows), LOGPROBS, None]
    logprobs = chosen.put(logprobs, part.masked_fill(widths.squeeze(-1) < 0, torch.nan))
    if not width:
        return Sampled(picked, logprobs)
    beyond = torch.arange(width, device=picked.device) >= widths
    top_ids = torch.full((len(picked), width), NO_TOKEN, dtype=torch.int64, device=picked.device)
    top_values = torch.full((len(picked), width), torch.nan, dtype=dtype, device=picked.device)
    top_ids = chosen.put(top_ids, ids.masked_fill(beyond, NO_TOKEN))
    top_values = chosen.put(top_values, values.masked_fill(beyond, torch.nan))
    return Sampled(picked, logprobs, top_ids, top_values)
