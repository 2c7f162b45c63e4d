"""Hidden states of sequences under the frozen model: those that its head reads, and those that enter chosen layers.

They are computed once and kept: on a CPU in files, which a later run finds again, on a GPU in its memory. Beyond a
bound on the bytes, they are computed each time. Kept or not, they are rounded to bfloat16, so that neither the bound
nor an interruption changes the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bankfull.assembly import Assembled
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.forward import Eager
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.train.text import OwnAnswer
from bankfull.weights.medusa import write_tensors

PAGE_TOKENS = 16
SHARD_SEQUENCES = 64
"""Sequences whose states are in one file."""
STEP_TOKENS = {"cpu": 1024, "cuda": 16384}
"""Tokens that the model computes at once; a longer sequence runs alone."""


@dataclass(frozen=True, slots=True)
class Examples:
    """Some sequences, one after the other."""

    sequences: Sequence[OwnAnswer]
    states: Tensor
    """(tokens, hidden * (1 + taps)) bfloat16, on the device: the input of the model's head, then that of each tap."""


class HiddenStates:
    """The states of a list of sequences, by number."""

    def __init__(
        self,
        loaded: Assembled,
        sequences: Sequence[OwnAnswer],
        folder: Path | None,
        most_bytes: int,
        taps: Sequence[int] = (),
    ) -> None:
        """`folder`: for files; None keeps the states in memory. `most_bytes`: what may be kept. `taps`: layers whose
        entering states are kept, too."""
        self.sequences, self._loaded, self._folder, self._taps = sequences, loaded, folder, tuple(taps)
        self._layout = layout_of(loaded.model.states(), PAGE_TOKENS)
        self._shards: dict[int, Tensor | Path] = {}
        of_token = loaded.model.hidden * (1 + len(self._taps)) * 2
        sizes = np.cumsum([0, *(len(one) * of_token for one in sequences)])
        self._kept = int(np.searchsorted(sizes, most_bytes, "right")) - 1
        """The number of sequences whose states are kept, from the first one on."""
        self._starts = np.cumsum([0, *(len(one) for one in sequences)])

    def examples(self, chosen: Sequence[int]) -> Examples:
        """The sequences of these numbers, in this order."""
        fresh = [i for i in chosen if i >= self._kept]
        computed = dict(zip(fresh, self._computed(fresh), strict=True)) if fresh else {}
        parts = [computed[i] if i in computed else self._from_shard(i) for i in chosen]
        return Examples([self.sequences[i] for i in chosen], torch.cat(parts))

    def _from_shard(self, index: int) -> Tensor:
        number = index // SHARD_SEQUENCES
        if number not in self._shards:
            self._shards[number] = self._make(number)
        shard = self._shards[number]
        base = int(self._starts[number * SHARD_SEQUENCES])
        first, last = int(self._starts[index]) - base, int(self._starts[index + 1]) - base
        if isinstance(shard, Tensor):
            return shard[first:last]
        with safe_open(shard, framework="pt", device="cpu") as file:
            part: Tensor = file.get_slice("states")[first:last]
        return part.to(self._loaded.device.torch)

    def _make(self, number: int) -> Tensor | Path:
        first = number * SHARD_SEQUENCES
        chosen = range(first, min(first + SHARD_SEQUENCES, self._kept))
        path = None if self._folder is None else self._folder / f"{number:05}.safetensors"
        tokens = int(self._starts[chosen[-1] + 1] - self._starts[first])
        if path is not None and _is_shard(path, tokens):
            return path
        states = torch.cat(self._computed(chosen))
        if path is None:
            return states
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_tensors(path, {"states": states.cpu()})

    def _computed(self, chosen: Sequence[int]) -> list[Tensor]:
        """Each sequence's states, from as few passes as fit."""
        most, states, group, tokens = STEP_TOKENS[self._loaded.device.kind], list[Tensor](), list[OwnAnswer](), 0
        for one in (self.sequences[i] for i in chosen):
            if group and tokens + len(one) > most:
                states += self._run(group)
                group, tokens = [], 0
            group.append(one)
            tokens += len(one)
        return [*states, *self._run(group)]

    @torch.no_grad()
    def _run(self, group: Sequence[OwnAnswer]) -> list[Tensor]:
        """Not in inference mode: autograd reads the results."""
        layout, device, model = self._layout, self._loaded.device.torch, self._loaded.model
        counts = [len(one) for one in group]
        tables, frames = [], 0
        for paged in layout.paged:
            columns = -(-max(counts) // paged.page_tokens)
            pages = torch.arange(1 + frames, 1 + frames + len(group) * columns, device=device)
            tables.append(pages.view(len(group), columns))
            frames += len(group) * columns
        storage = Storage(layout, frames, len(group), device)
        slots = None
        if layout.recurrent is not None:
            write = torch.arange(1, len(group) + 1, device=device)
            slots = torch.zeros_like(write), write
        tokens = torch.tensor([token for one in group for token in (*one.prompt, *one.answer)], device=device)
        batch = placed_batch(layout, counts, [0] * len(group), tokens, tables, slots)
        run = Eager(model, layout, storage.layers, taps=self._taps)
        states = [run(batch), *(run.tapped[layer] for layer in self._taps)]
        return list(torch.cat([part.to(torch.bfloat16, copy=True) for part in states], -1).split(counts))


def _is_shard(path: Path, tokens: int) -> bool:
    """Whether an earlier run has left the states of that many tokens."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return bool(file.get_slice("states").get_shape()[0] == tokens)
    except (SafetensorError, OSError):
        return False
