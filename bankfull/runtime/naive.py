"""The baseline of all comparisons: no cache, no batching, no shared pages. Each token runs the whole sequence again:
slow on purpose, and too simple to be wrong."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.forward import Model, plan_mixers
from bankfull.state.spec import Layout, layout_of
from bankfull.state.storage import Storage


def hidden_states(model: Model, tokens: Sequence[int], device: torch.device, chunks: Sequence[int] = ()) -> Tensor:
    """Hidden states of every token, computed in a state of their own; `chunks` splits the pass."""
    page = 16
    layout = layout_of(model.states(), page)
    frames = sum(-(-len(tokens) // g.page_tokens) for g in layout.paged)
    storage = Storage(layout, frames, 2, device)
    parts, start = [], 0
    with torch.inference_mode():
        for i, size in enumerate(chunks or [len(tokens)]):
            batch = single_batch(layout, tokens, start, size, i, device)
            parts.append(model.forward(batch, storage.layers, plan_mixers(model, layout, batch)))
            start += size
    assert start == len(tokens), f"chunks {chunks} do not add up to {len(tokens)} tokens"
    return torch.cat(parts)


def single_batch(
    layout: Layout, tokens: Sequence[int], start: int, size: int, turn: int, device: torch.device
) -> Batch:
    """`size` tokens of one sequence from `start` on; its pages are consecutive."""
    tables, first = [], 1
    for group in layout.paged:
        count = -(-len(tokens) // group.page_tokens)
        tables.append(torch.arange(first, first + count, device=device)[None])
        first += count
    slots = None
    if layout.recurrent is not None:
        # Slots 1 and 2 take turns; slot 0 is the state before the first token.
        read, write = 0 if turn == 0 else 1 + turn % 2, 1 + (turn + 1) % 2
        slots = torch.tensor([read], device=device), torch.tensor([write], device=device)
    new = torch.tensor(tokens[start : start + size], device=device)
    return placed_batch(layout, [size], [start], new, tables, slots)


def logits(model: Model, tokens: Sequence[int], device: torch.device, chunks: Sequence[int] = ()) -> Tensor:
    with torch.inference_mode():
        scores: Tensor = model.head(hidden_states(model, tokens, device, chunks))
    return scores


def generate(
    model: Model, prompt: Sequence[int], count: int, device: torch.device, stop_ids: Collection[int] = ()
) -> tuple[list[int], list[float]]:
    """Greedy tokens, and for each the margin between its logit and the second best."""
    tokens, margins = list(prompt), []
    for _ in range(count):
        hidden = hidden_states(model, tokens, device)
        with torch.inference_mode():
            best = model.head(hidden[-1:])[0].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :], margins
