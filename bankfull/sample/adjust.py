"""Changes to single tokens' scores: penalties for earlier tokens, biases, and bans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bankfull.sample.table import FREQUENCY, PRESENCE, PROMPT_LEN, REPETITION, STOP_FROM, RowFacts, SamplingTable


def adjust(
    scores: Tensor,
    rows: Tensor,
    table: SamplingTable,
    tokens: Tensor,
    length: Tensor,
    mask: Tensor | None,
    facts: Sequence[RowFacts],
    owners: Tensor | None = None,
) -> Tensor:
    """Penalties, biases and bans in the order that `logits` documents, as a new tensor where anything changes.
    `owners`: the line of `tokens` that belongs to each line of scores; its row if not given."""
    owners = rows if owners is None else owners
    chosen = table.choose(facts, lambda fact: fact.repeats or fact.counts)
    if chosen:
        lines, at = chosen.take(rows), chosen.take(length)
        wanted = [facts[line] for line in chosen.lines]
        part = _penalize(chosen.take(scores), tokens[chosen.take(owners)], at, lines, table, wanted)
        scores = chosen.put(scores, part)
    chosen = table.choose(facts, lambda fact: fact.biased)
    if chosen:
        assert table.bias_ids is not None and table.bias_values is not None
        lines = chosen.take(rows)
        values = table.bias_values[lines].to(scores.dtype)
        scores = chosen.put(scores, chosen.take(scores).scatter_add(1, table.bias_ids[lines], values))
    scores = _mask_banned(scores, rows, table, length, mask, facts)
    chosen = table.choose(facts, lambda fact: fact.bad_words)
    if chosen:
        assert table.bad_words is not None
        lines, at = chosen.take(rows), chosen.take(length)
        part = _ban_bad_words(chosen.take(scores), tokens, chosen.take(owners), at, table.bad_words[lines])
        scores = chosen.put(scores, part)
    return scores


def _penalize(
    scores: Tensor, said: Tensor, length: Tensor, rows: Tensor, table: SamplingTable, facts: Sequence[RowFacts]
) -> Tensor:
    vocab = scores.shape[-1]
    place = torch.arange(said.shape[-1], device=said.device)
    known = (place < length.unsqueeze(-1)) & (said >= 0) & (said < vocab)
    ids = said.where(known, 0)
    strengths = table.reals[rows].to(scores.dtype)
    if any(fact.repeats for fact in facts):
        seen = _count(ids, known, vocab) > 0
        strength = strengths[:, REPETITION, None]
        scores = torch.where(seen, torch.where(scores > 0, scores / strength, scores * strength), scores)
    if any(fact.counts for fact in facts):
        prompt_len = table.wholes[rows, PROMPT_LEN]
        counts = _count(ids, known & (place >= prompt_len.unsqueeze(-1)), vocab).to(scores.dtype)
        scores = scores - strengths[:, PRESENCE, None] * (counts > 0) - strengths[:, FREQUENCY, None] * counts
    return scores


def _count(ids: Tensor, valid: Tensor, vocab: int) -> Tensor:
    """How often each id occurs; integer addition, so that atomic updates in any order give the same counts."""
    counts = torch.zeros(ids.shape[0], vocab, dtype=torch.int32, device=ids.device)
    return counts.scatter_add_(1, ids, valid.to(torch.int32))


def _mask_banned(
    scores: Tensor,
    rows: Tensor,
    table: SamplingTable,
    length: Tensor,
    mask: Tensor | None,
    facts: Sequence[RowFacts],
) -> Tensor:
    bits = mask
    if any(fact.restricted for fact in facts):
        assert table.allowed is not None
        allowed = table.allowed[rows]
        bits = allowed if bits is None else bits & allowed
    if any(fact.waits for fact in facts):
        assert table.stops is not None
        early = length < table.wholes[rows, STOP_FROM]
        open_now = ~torch.where(early.unsqueeze(-1), table.stops[rows], 0)
        bits = open_now if bits is None else bits & open_now
    if bits is None:
        return scores
    return scores.masked_fill(~unpacked(bits, scores.shape[-1]), -torch.inf)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """A packed int32 mask [n, ceil(vocab / 32)] as booleans [n, vocab]."""
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    return (bits.unsqueeze(-1) >> places).bitwise_and_(1).bool().flatten(1)[:, :vocab]


def _ban_bad_words(scores: Tensor, tokens: Tensor, owners: Tensor, length: Tensor, words: Tensor) -> Tensor:
    """Bans the last token of a bad word where the tokens before it are exactly the latest ones."""
    last = words[:, :, -1]
    hit = last >= 0
    if words.shape[-1] > 1:
        before = words[:, :, :-1]
        at = length.unsqueeze(-1) - torch.arange(before.shape[-1], 0, -1, device=tokens.device)
        latest = tokens[owners.unsqueeze(-1), at.clamp_min(0)].where(at >= 0, -2)
        hit = hit & ((before < 0) | (before == latest.unsqueeze(1))).all(-1)
    return scores.masked_fill(_count(last.clamp_min(0), hit, scores.shape[-1]) > 0, -torch.inf)
