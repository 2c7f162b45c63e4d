"""A GPU's captured steps: the launches of a step are recorded once as a CUDA graph, which one call replays.

A graph has fixed shapes, so there is one for each (padded rows, padded query width). Padding rows use a spare line of
the row tensors, whose results are never read; padding tokens write their keys and values to page 0. The graph gathers
its input from the rows on the device: the host sends only the row numbers with their tokens, and nothing when they
equal those of the previous step. Prompts, alone or beside decodes, have graphs of their own (`captured_chunks`), and so
has the verification of drafts (`captured_verify`). Larger steps run launch by launch through the same kernels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.runtime.batch import blank_batch, replayed_batch
from bankfull.runtime.captured_chunks import Chunks, blank_angles, rotation_of
from bankfull.runtime.forward import ChoosingStep, Eager
from bankfull.runtime.graphs import record
from bankfull.runtime.memory import shown
from bankfull.runtime.rows import Rows
from bankfull.sample.table import Chooser
from bankfull.types import Work

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Row counts that steps are padded to. A step of few rows is bound by its weights, whatever their number."""
GREEDY, DRAWN = "greedy", "drawn"
VERIFIED_TOKENS = 2048
"""Tokens of the largest captured step with drafts. Beyond it, the time of the launches matters little."""
KEPT = 8
"""Steps whose tokens stay in host memory. The host reads a step's tokens before it launches the step after the next."""


@dataclass(slots=True)
class RecordedStep:
    """A graph and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    hidden: Tensor
    tapped: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class StepKind:
    """The padded shape of a captured step."""

    rows: int
    width: int
    """Tokens per row: the last known one and the drafts."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    kind: StepKind
    work: Sequence[Work]
    real: Callable[[Tensor], Tensor]
    """Leaves out the padding tokens of a tensor."""


class Captured:
    """A `Forward` for every batch; `capture` records the steps that can be replayed."""

    def __init__(self, eager: Eager) -> None:
        self.eager = eager
        self.seconds = 0.0
        """Seconds that recording took."""
        self.nbytes = 0
        """Bytes of device memory that the graphs hold."""
        self.enabled = True
        """False runs the same launches on the same padded shapes one by one (for comparison)."""
        self.steps: dict[StepKind, RecordedStep] = {}
        self.replayed: ReplayedStep | None = None
        """The last step, if it was one of `steps`."""
        self._choices: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        """Graphs that choose a step's tokens. A greedy one contains the whole step: one launch from rows to tokens."""
        self._chunks: Chunks | None = None
        self.pool: Any = None
        """The memory that all graphs share."""
        self.tapped: dict[int, Tensor] = {}

    def __call__(self, batch: Batch) -> Tensor:
        hidden = self.eager(batch)
        self.tapped = self.eager.tapped
        return hidden

    @property
    def count(self) -> int:
        return len(self.steps) + len(self._choices) + (0 if self._chunks is None else len(self._chunks.recorded))

    @property
    def recorded(self) -> str:
        return f"{self.count} graphs recorded in {self.seconds:.1f} s, which hold {shown(self.nbytes)}"

    def capture(self, rows: Rows, widths: Sequence[int], chooser: Chooser | None, tokens: int = 0) -> None:
        """Record a step for each padded number of rows and each width, the choice of tokens if there is a chooser, and
        steps of prompts of up to `tokens` tokens."""
        torch.cuda.synchronize()  # weights and state were made on another stream
        begun, free = perf_counter(), torch.cuda.mem_get_info()[0]
        self._take(rows, chooser)
        self.pool = torch.cuda.graph_pool_handle()
        if self._chunks is not None:
            self._chunks.capture(tokens, self.pool)  # before the others, which fit into their memory
        self._widths = sorted(widths)
        for kind in self._kinds(widths):  # the largest first: the others fit into its memory
            self.steps[kind] = self._record(kind.rows, kind.width)
        if 1 in widths and self._chooses:
            for size in reversed(sizes_for(rows.count)):
                for choice in (GREEDY, DRAWN):
                    self._choices[size, choice] = self._record_choice(size, choice)
        self._turn.zero_()
        torch.cuda.synchronize()
        self.seconds, self.nbytes = perf_counter() - begun, max(0, free - torch.cuda.mem_get_info()[0])

    def _kinds(self, widths: Sequence[int]) -> Iterator[StepKind]:
        for width in sorted(widths, reverse=True):
            for size in reversed(sizes_for(self._rows.count)):
                if width == 1 or size * width <= VERIFIED_TOKENS:
                    yield StepKind(size, width)

    def kinds(
        self, rows: Rows, widths: Sequence[int], chooser: Chooser | None, tokens: int = 0
    ) -> Iterator[Callable[[], None]]:
        """Each step that `capture` would record, as a call that only launches it."""
        self._take(rows, chooser)

        def launched(size: int, width: int) -> None:
            batch = self._blank(size, width)
            hidden = self._launch(batch, size, width)
            if width == 1 and self._chooses:
                self.eager.model.head.best(hidden)  # for steps that are not captured
                self._best(batch, size)
                self._draw(batch, hidden, size)

        yield from (partial(launched, kind.rows, kind.width) for kind in self._kinds(widths))
        if self._chunks is not None:
            yield from self._chunks.kinds(tokens)

    def _take(self, rows: Rows, chooser: Chooser | None) -> None:
        self._rows, self._chooser = rows, chooser
        most = sizes_for(rows.count)[-1]
        self._input = torch.zeros(2, -(-most // 2) * 2, dtype=torch.long, device=rows.device)
        """Row numbers, and tokens of each row. Each line begins at a multiple of 16 bytes, as kernels are compiled."""
        self.lines, self.counts = self._input[:, :most]
        self.lines.fill_(rows.count)
        self._sent: tuple[list[int], list[int]] | None = None
        recurrent = self.eager.layout.recurrent is not None
        self._kept = torch.zeros(len(self.lines), dtype=torch.int32, device=rows.device) if recurrent else None
        """Slots of recurrent state that a row writes: none for padding rows, so they change no sequence's state."""
        self._chooses = chooser is not None
        # Scans of a recurrence read lengths and slots of the host, which differ from step to step.
        self._chunks = Chunks(self.eager, rows) if self.eager.layout.paged and not recurrent else None
        there = {"pin_memory": True} if rows.device.type == "cuda" else {"device": rows.device}
        self._tokens_out = torch.zeros(KEPT, len(self.lines), dtype=torch.long, **there)
        """Chosen tokens in pinned host memory that kernels write: a copy after the step would delay the next one."""
        self._turn = torch.zeros(1, dtype=torch.long, device=rows.device)
        """Steps that chose tokens, counted on the device."""
        self._turns = 0
        """The same count on the host, over launched steps."""

    def _blank(self, size: int, width: int) -> Batch:
        """A step's input as tensors that stay; its host arrays are those of sequences that have just begun."""
        rows, device = self._rows, self._rows.device
        total = size * width

        return blank_batch(
            np.arange(0, total + 1, width),
            np.full(size, width),
            total,
            [
                # Padding tokens may lie beyond the longest sequence.
                (table.shape[1] if width == 1 else table.shape[1] + -(-width // page_tokens), page_tokens)
                for table, page_tokens in zip(rows.tables, rows.page_tokens, strict=True)
            ],
            lambda name, shape: torch.zeros(shape, dtype=torch.long, device=device),
            kept=None if self._kept is None else np.full(size, width),
            logit_index=np.arange(total),
            starts=torch.arange(0, total + 1, width, dtype=torch.int32, device=device),
            lengths=torch.zeros(size, dtype=torch.int32, device=device),
            kepts=None if self._kept is None else self._kept[:size],
            ancestors=None if rows.trees is None or width == 1 else torch.zeros(total, dtype=torch.long, device=device),
            angles=blank_angles(self.eager.model.ropes, total, device),
        )

    def _launch(self, batch: Batch, size: int, width: int) -> Tensor:
        self._gather(batch, size, width)
        return self.eager(batch)

    def _gather(self, batch: Batch, size: int, width: int) -> None:
        from bankfull.ops.triton.steps import StepTrees, gather_step

        rows, rotation = self._rows, rotation_of(self.eager.model.ropes, batch)
        assert batch.lengths is not None
        trees = None
        if batch.ancestors is not None:
            assert rows.trees is not None
            trees = StepTrees(rows.trees.depths, rows.trees.ancestors, batch.ancestors)
        gather_step(
            self.lines[:size],
            rows.tokens,
            rows.reached,
            rows.tables,
            rows.page_tokens,
            width,
            (batch.tokens, batch.positions, batch.lengths),
            list(batch.kv_slots),
            list(batch.pages),
            rotation,
            trees,
            self.counts[:size] if width > 1 else None,
        )
        if batch.read is not None:
            torch.index_select(rows.slot, 0, self.lines[:size], out=batch.read)

    def _record(self, size: int, width: int) -> RecordedStep:
        batch = self._blank(size, width)
        self._launch(batch, size, width)  # compiles the missing kernels, and makes what is made once
        graph, hidden = record(lambda: self._launch(batch, size, width), self.pool)
        return RecordedStep(graph, batch, hidden, self.eager.tapped)

    def _best(self, batch: Batch, size: int) -> None:
        """A whole step of greedy rows, from gathering to appending."""
        self._gather(batch, size, 1)
        self._append(batch, self.eager.best(batch))

    def _draw(self, batch: Batch, hidden: Tensor, size: int) -> None:
        assert self._chooser is not None
        scores = self.eager.model.head(hidden).float()
        self._append(batch, self._chooser(scores, self.lines[:size], self._rows.sampling, batch.positions + 1))

    def _append(self, batch: Batch, chosen: Tensor) -> None:
        from bankfull.ops.triton.steps import append_tokens

        rows = self._rows
        lines = self.lines[: len(chosen)]
        append_tokens(lines, chosen, rows.tokens, rows.known, rows.reached, self._tokens_out, self._turn)
        if batch.write is not None:
            rows.slot.index_copy_(0, lines, batch.write[:, 0])

    def _choice(self, size: int, kind: str) -> None:
        """A greedy choice includes the step; a drawn one reads the step's hidden states."""
        recorded = self.steps[StepKind(size, 1)]
        if kind == GREEDY:
            self._best(recorded.batch, size)
        else:
            self._draw(recorded.batch, recorded.hidden, size)

    def _record_choice(self, size: int, kind: str) -> torch.cuda.CUDAGraph:
        self._choice(size, kind)
        return record(lambda: self._choice(size, kind), self.pool)[0]

    def replay(self, work: Sequence[Work]) -> tuple[Batch, Tensor] | None:
        """The step's hidden states if its kind was recorded: prompts, or one known token and some drafts in each
        row."""
        self.replayed = None
        kind = self._kind(work) if all(w.count == 1 for w in work) else None
        recorded = None if kind is None else self.steps.get(kind)
        if kind is None or recorded is None:
            if self._rows.trees is not None and any(w.drafts for w in work):
                return None  # the attention over prompts has no trees
            step = None if self._chunks is None else self._chunks.replay(work, self.enabled)
            if step is not None and self._chunks is not None:
                self.tapped = self._chunks.tapped
            return step
        counts = [w.drafts + 1 for w in work]
        self._send([w.row for w in work], counts, kind.width)
        if self._kept is not None:
            self._send_slots(recorded.batch, [w.slots for w in work])
        self._run(recorded, kind.rows, kind.width)
        q_start = np.concatenate(([0], np.cumsum(counts)))
        lengths = self._rows.computed[[w.row for w in work]] + counts
        real = self._real(counts, kind.width)
        self.replayed = ReplayedStep(kind, work, real)
        batch = replayed_batch(work, q_start, lengths, real(recorded.batch.tokens), real(recorded.batch.positions))
        batch.write = None if recorded.batch.write is None else recorded.batch.write[: len(work)]
        self.tapped = {layer: real(tap) for layer, tap in recorded.tapped.items()}
        return batch, real(recorded.hidden)

    def _kind(self, work: Sequence[Work]) -> StepKind | None:
        """The smallest recorded kind that holds the step. Recurrent states are not padded: a state follows each
        token."""
        if not self.steps:
            return None
        most = max(w.drafts for w in work) + 1
        place = bisect_left(self._widths, most)
        if place == len(self._widths):
            return None
        width = self._widths[place]
        if self._kept is not None and any(w.drafts + 1 != width for w in work):
            return None
        return StepKind(padded(len(work), self._rows.count), width)

    def _real(self, counts: Sequence[int], width: int) -> Callable[[Tensor], Tensor]:
        """Leaves out the padding tokens of a step's tensors."""
        total = sum(counts)
        if len(counts) == 1 or total == len(counts) * width:
            return lambda padded: padded[:total]
        assert self._rows.ship is not None
        count = np.array(counts, np.int64)
        ends = np.cumsum(count)
        places = np.arange(total) - np.repeat(ends - count, count) + np.repeat(np.arange(len(count)) * width, count)
        index = self._rows.ship(places)
        return lambda padded: padded[index]

    def choosing(self, rows: Rows) -> ChoosingStep | None:
        if not self._choices:
            return None

        def step(lines: Sequence[int], slots: Sequence[int] = ()) -> Tensor:
            size = padded(len(lines), rows.count)
            self._send(list(lines), [1] * len(lines), 1)
            if self._kept is not None:
                self._send_slots(self.steps[StepKind(size, 1)].batch, [(slot,) for slot in slots])
            facts = rows.sampling.facts
            kind = GREEDY if all(facts[line].greedy for line in lines) else DRAWN
            if kind == DRAWN:
                self._run(self.steps[StepKind(size, 1)], size, 1)
            if self.enabled:
                self._choices[size, kind].replay()
            else:
                self._choice(size, kind)
            rows.computed[list(lines)] += 1
            tokens = self._tokens_out[self._turns % KEPT, : len(lines)]
            self._turns += 1
            return tokens

        return step

    def _send(self, lines: list[int], counts: list[int], width: int) -> None:
        """Send the row numbers and the tokens of each row, unless they are those of the previous step. Steps of one
        token per row do not read the tokens."""
        if self._sent is not None and lines == self._sent[0] and (width == 1 or counts == self._sent[1]):
            return
        assert self._rows.ship is not None
        size = padded(len(lines), self._rows.count)
        sent = np.zeros((2, size), np.int64)
        sent[0] = self._rows.count
        sent[0, : len(lines)], sent[1, : len(counts)] = lines, counts
        self._input[:, :size].copy_(self._rows.ship(sent))
        self._sent = lines, counts

    def _send_slots(self, batch: Batch, slots: list[tuple[int, ...]]) -> None:
        """Send the slots that the rows write their recurrent state to: other ones in every step."""
        assert self._rows.ship is not None and batch.write is not None and batch.kepts is not None
        there = self._rows.ship(np.array(slots, np.int64))
        batch.write[: len(slots)].copy_(there)
        batch.kepts[: len(slots)].fill_(there.shape[1])
        batch.kepts[len(slots) :].zero_()

    def _run(self, recorded: RecordedStep, size: int, width: int) -> None:
        if self.enabled:
            recorded.graph.replay()
        else:
            recorded.hidden.copy_(self._launch(recorded.batch, size, width))
            for layer, tap in recorded.tapped.items():
                tap.copy_(self.eager.tapped[layer])


@cache
def sizes_for(rows: int) -> list[int]:
    """Row counts that steps of up to `rows` rows are padded to."""
    return [size for size in (*SIZES, *range(SIZES[-1] + 128, rows, 128)) if size < rows] + [rows]


def padded(count: int, rows: int) -> int:
    sizes = sizes_for(rows)
    return sizes[bisect_left(sizes, count)]
