"""The largest step, run once before the pools are sized: what it takes beside weights and state is then known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bankfull.layers.batch import Batch
from bankfull.runtime.device import Device
from bankfull.runtime.forward import Eager, Model
from bankfull.state.spec import Layout
from bankfull.state.storage import Storage


def rehearsal(model: Model, layout: Layout, device: Device, rows: int, tokens: int) -> Callable[[], None]:
    """A step of `tokens` tokens in `rows` sequences, all of them in page 0: it computes nothing that anyone reads."""
    sequences = min(rows, tokens)
    storage = Storage(layout, 0, 1, device.torch)
    storage.frames.zero_()
    eager = Eager(model, layout, storage.layers)
    q_start = np.linspace(0, tokens, sequences + 1).astype(np.int64)
    counts = q_start[1:] - q_start[:-1]
    position = np.arange(tokens) - np.repeat(q_start[:-1], counts)

    def there(array: np.ndarray, kind: torch.dtype = torch.long) -> torch.Tensor:
        return torch.from_numpy(array).to(device.torch, kind)

    def pages(size: int) -> torch.Tensor:
        return torch.zeros(sequences, -(-int(counts.max()) // size), dtype=torch.long, device=device.torch)

    sizes = tuple(group.page_tokens for group in layout.paged)
    batch = Batch(
        q_start, counts, q_start[1:] - 1, there(np.zeros(tokens)), there(position),
        tuple(pages(size) for size in sizes), tuple(there(position % size) for size in sizes), sizes,
        starts=there(q_start, torch.int32), lengths=there(counts, torch.int32),
    )  # fmt: skip
    if layout.recurrent is not None:
        batch.kept, batch.kepts = np.ones(sequences, np.int64), there(np.ones(sequences), torch.int32)
        batch.read, batch.write = there(np.zeros(sequences)), there(np.ones((sequences, 1)))
    last = there(batch.logit_index)

    def run() -> None:
        hidden = eager(batch)
        # Scores as wide as sampling takes them, twice: as the model gave them, and as they are worked on.
        scores = model.head(hidden[last]).float()
        scores.clone()

    return run
