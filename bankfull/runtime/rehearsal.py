"""Steps whose results are not read. They run before the pools exist, to measure the memory of a step and to compile the
kernels that it launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from bankfull.ops.registry import Kit
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.captured import Captured
from bankfull.runtime.device import Device
from bankfull.runtime.forward import Eager, Model, first_layer
from bankfull.runtime.rows import Rows
from bankfull.state.spec import Layout
from bankfull.state.storage import Storage

UNCAPTURED = ((17, 1), (17, 4), (17, 16), (16,), (4,), (1, 1, 1), (1, 1, 1, 1))
"""New tokens per sequence of small steps that cover a GPU's kernels for short prompts and mixed steps: many new tokens
in one sequence beside few in another, few alone, and one in each of several sequences."""
SHORT = 64
"""Tokens of a row whose content no step reads: kernels do not depend on the length of rows."""


def largest(rows: int, tokens: int) -> list[int]:
    """New tokens of each sequence of the largest step."""
    return np.diff(np.linspace(0, tokens, min(rows, tokens) + 1).astype(np.int64)).tolist()


def rehearsal(
    model: Model, layout: Layout, device: Device, new_tokens: Sequence[int], past: int = 0
) -> Callable[[], None]:
    """A step of sequences with `new_tokens` each after `past` earlier ones, all in page 0."""
    storage = Storage(layout, 0, 1, device.torch)
    storage.frames.zero_()
    eager = Eager(model, layout, storage.layers, first_layer(model))
    sequences, tokens, longest = len(new_tokens), sum(new_tokens), past + max(new_tokens)

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device.torch)

    tables = [zeros(sequences, -(-longest // group.page_tokens)) for group in layout.paged]
    slots = None if layout.recurrent is None else (zeros(sequences), zeros(sequences) + 1)
    batch = placed_batch(layout, new_tokens, [past] * sequences, zeros(tokens), tables, slots)
    last = torch.from_numpy(batch.logit_index).to(device.torch)

    def run() -> None:
        hidden = eager(batch)
        # Logits in float32, as sampling takes them, and the copy that sampling works on.
        scores = model.head(hidden[last]).float()
        scores.clone()

    return run


def every_kind(
    model: Model, layout: Layout, device: Device, kit: Kit | None, rows: int, tokens: int, widths: Sequence[int]
) -> Iterator[Callable[[], None]]:
    """Steps that together launch every kernel of an engine over this model: those that it records, and others. `kit`:
    None where it records none."""
    eager = Eager(model, layout, Storage(layout, 0, 1, device.torch).layers, first_layer(model))
    if kit is not None and isinstance(forward := device.capture(eager, kit), Captured):
        placed = Rows(rows, SHORT, layout, model.vocab, device.torch, device.ship)
        yield from forward.kinds(placed, widths, device.chooser(kit), tokens)
    for new_tokens in (largest(rows, tokens), *UNCAPTURED):
        if sum(new_tokens) <= tokens and len(new_tokens) <= rows:
            yield rehearsal(model, layout, device, new_tokens)
            if min(new_tokens) < max(new_tokens):  # a later chunk reads pages, a first chunk its own rows
                yield rehearsal(model, layout, device, new_tokens, past=1)
