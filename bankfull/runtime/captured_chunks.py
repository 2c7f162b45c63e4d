"""A GPU's captured steps of prompts, alone or beside decodes: one graph for each padded number of tokens.

Launching a step from Python takes the host longer than a short prompt takes the GPU. A graph serves any sequences that
fit: the host sends their rows and numbers of tokens, and the first kernel finds the sequence of each token. Padding
tokens are written to page 0, and their results are not read. Attention reads pages, also for prompts that begin with
the step: in tiles where a sequence has several new tokens, split over its length where it has one. Graphs for prompts
alone leave out the second kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.rope import Rope
from bankfull.runtime.batch import blank_batch, replayed_batch
from bankfull.runtime.forward import Eager
from bankfull.runtime.graphs import record
from bankfull.runtime.rows import Rows
from bankfull.types import Work

if TYPE_CHECKING:
    from bankfull.ops.triton.steps import RopeAngles

SIZES = (32, 64, 128, 192, *range(256, 1024, 128), *range(1024, 2048 + 1, 256))
"""Token counts that steps are padded to. Up to about 200 tokens a step is bound by its weights; beyond that, padding
costs as much as other tokens, so sizes lie close together. Larger steps run longer than their launches take."""
FEWEST_PROMPTS, PROMPT = 8, 16
"""A step of prompts alone has room for `FEWEST_PROMPTS`, or for one prompt per `PROMPT` tokens if that is more. Each
place takes a tile of attention."""
SPLIT_FROM = 4096
"""Length from which on a sequence with a few new tokens is read faster in splits. Graphs split for one new token only,
so these steps are launched from Python."""
FEW = 16
"""The most new tokens of a sequence that launches outside of graphs read in splits."""


@dataclass(slots=True)
class RecordedChunks:
    """A graph and the views of the common tensors that it reads and writes."""

    tokens: int
    places: int
    """Places for sequences; the last one stays empty."""
    mixed: bool
    """Whether some sequences have one new token."""
    batch: Batch
    graph: torch.cuda.CUDAGraph | None = None


class Chunks:
    """Graphs of one engine's steps. They share their tensors, since one step runs at a time."""

    def __init__(self, eager: Eager, rows: Rows) -> None:
        self.eager, self._rows = eager, rows
        self.recorded: dict[tuple[int, bool], RecordedChunks] = {}
        self._sizes: list[int] = []
        self._sent = self._hidden = torch.empty(0)
        self._taps: dict[int, Tensor] = {}
        self.tapped: dict[int, Tensor] = {}
        """The hidden states that entered the tapped layers in the last replay."""

    def capture(self, tokens: int, pool: Any) -> None:
        self.prepare(tokens)
        for kind in self.recorded.values():
            self._launch(kind)  # compiles the missing kernels, and makes what is made once
            kind.graph, _ = record(partial(self._launch, kind), pool)

    def kinds(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Each step that `capture` would record, as a call that only launches it. Steps with both kinds of attention
        launch every kernel of the others."""
        self.prepare(tokens)
        yield from (partial(self._launch, kind) for kind in self.recorded.values() if kind.mixed)

    def replay(self, work: Sequence[Work], captured: bool) -> tuple[Batch, Tensor] | None:
        """The step's batch and hidden states, if there is a graph for it. `captured` False launches one by one."""
        rows = self._rows
        counts = np.array([w.count + w.drafts for w in work], np.int64)
        total = int(counts.sum())
        if not self._sizes or total > self._sizes[-1]:
            return None
        kind = self.recorded[self._sizes[bisect_left(self._sizes, total)], bool((counts == 1).any())]
        lines = [w.row for w in work]
        lengths = rows.computed[lines] + counts
        if len(work) >= kind.places or bool(((counts > 1) & (counts <= FEW) & (lengths > SPLIT_FROM)).any()):
            return None
        q_start = np.concatenate(([0], np.cumsum(counts)))
        self._send(kind, lines, q_start, np.flatnonzero(counts == 1))
        if captured:
            assert kind.graph is not None
            kind.graph.replay()
        else:
            self._launch(kind)
        batch = replayed_batch(work, q_start, lengths, kind.batch.tokens, kind.batch.positions)
        self.tapped = {layer: tap[:total] for layer, tap in self._taps.items()}
        return batch, self._hidden[:total]

    def _send(self, kind: RecordedChunks, lines: list[int], q_start: np.ndarray, ones: np.ndarray) -> None:
        """The rows, the start of their tokens, and the sequences with one new token, in one copy."""
        assert self._rows.ship is not None
        sent = np.empty(self._sent.shape, np.int32)
        sent[0], sent[1], sent[2] = self._rows.count, q_start[-1], kind.places - 1
        sent[0, : len(lines)], sent[1, : len(q_start)], sent[2, : len(ones)] = lines, q_start, ones
        self._sent.copy_(self._rows.ship(sent))

    def prepare(self, tokens: int) -> None:
        """Everything but the graphs. The largest comes first, because the others fit into its memory."""
        rows, device = self._rows, self._rows.device
        self._sizes = sizes_for(tokens)
        if not self._sizes:
            return
        most, room = self._sizes[-1], rows.count + 1

        # Each line begins at a multiple of 16 bytes for any number of rows: kernels are compiled for that alignment.
        self._sent = torch.zeros(3, -(-(room + 1) // 4) * 4, dtype=torch.int32, device=device)
        self._sent[0] = rows.count
        self._hidden = torch.empty(0, device=device)
        tables = [
            (table.shape[1], page_tokens) for table, page_tokens in zip(rows.tables, rows.page_tokens, strict=True)
        ]
        lengths = torch.zeros(room, dtype=torch.int32, device=device)
        shared: dict[str, Tensor] = {}

        def part(name: str, shape: tuple[int, ...]) -> Tensor:
            """The beginning of a tensor that all graphs share."""
            if name not in shared:
                shared[name] = torch.zeros(
                    (room if name.startswith("pages") else most, *shape[1:]), dtype=torch.long, device=device
                )
            return shared[name][: shape[0]]

        angles = blank_angles(self.eager.model.ropes, most, device)
        for size in reversed(self._sizes):
            for mixed in (True, False):
                places = 1 + min(rows.count, size if mixed else max(FEWEST_PROMPTS, size // PROMPT))
                batch = blank_batch(
                    np.zeros(places + 1, np.int64),
                    np.zeros(places, np.int64),
                    size,
                    tables,
                    part,
                    starts=self._sent[1],
                    lengths=lengths[:places],
                    angles={name: (cos[:size], sin[:size]) for name, (cos, sin) in angles.items()},
                )
                self.recorded[size, mixed] = RecordedChunks(size, places, mixed, batch)

    def _launch(self, kind: RecordedChunks) -> None:
        from bankfull.ops.triton.chunks import DevicePartition, gather_chunks

        rows, batch = self._rows, kind.batch
        assert batch.starts is not None and batch.lengths is not None
        ones = self._sent[2, : min(rows.count, kind.tokens)] if kind.mixed else None
        batch.partition = DevicePartition(batch.starts, kind.places, kind.tokens, ones)
        gather_chunks(
            self._sent[0],
            batch.starts,
            rows.tokens,
            rows.reached,
            rows.tables,
            rows.page_tokens,
            (batch.tokens, batch.positions, batch.lengths),
            list(batch.kv_slots),
            list(batch.pages),
            rotation_of(self.eager.model.ropes, batch),
        )
        hidden = self.eager(batch)
        if len(self._hidden) < len(hidden):
            self._hidden = torch.empty_like(hidden)
            self._taps = {layer: torch.empty_like(tap) for layer, tap in self.eager.tapped.items()}
        self._hidden[: len(hidden)].copy_(hidden)
        for layer, tap in self._taps.items():
            tap[: len(hidden)].copy_(self.eager.tapped[layer])


def sizes_for(tokens: int) -> list[int]:
    """Token counts that steps of up to `tokens` tokens are padded to."""
    smaller = [size for size in SIZES if size < tokens]
    return [*smaller, tokens] if 0 < tokens < SIZES[-1] else list(SIZES) if tokens else []


def blank_angles(ropes: Mapping[str, Rope], tokens: int, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """Cosines and sines that `rotation_of` fills, if the model has one RoPE and a kernel computes it."""
    float_ropes = {name: rope for name, rope in ropes.items() if rope.frequencies.dtype is torch.float32}
    if len(ropes) != 1 or not float_ropes:
        return {}
    [(name, rope)] = float_ropes.items()
    cos, sin = (torch.zeros(tokens, len(rope.frequencies), dtype=rope.dtype, device=device) for _ in range(2))
    return {name: (cos, sin)}


def rotation_of(ropes: Mapping[str, Rope], batch: Batch) -> RopeAngles | None:
    """The RoPE whose angles are computed together with the batch's positions."""
    from bankfull.ops.triton.steps import RopeAngles

    for name, angles in batch.angles.items():
        return RopeAngles(ropes[name].frequencies, ropes[name].scale, *angles)
    return None
