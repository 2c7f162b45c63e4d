"""A CPU's captured step: the model's operations are recorded once on a tape, which one call into C++ replays.

One tape serves every batch: prefill, mixed steps, verification of drafts, decode.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.ops.native.tape import Recorder, RowsAt, Tape
from bankfull.ops.native.tape.instruction import Break
from bankfull.ops.native.tape.origins import Origins, line_of
from bankfull.ops.native.tape.record import TOKENS, CannotRecord
from bankfull.ops.registry import Kit
from bankfull.ops.sampling.native import params_at
from bankfull.runtime.batch import blank_batch
from bankfull.runtime.forward import ChoosingStep, Eager
from bankfull.runtime.rows import Rows
from bankfull.runtime.twins import UnlikeTwins
from bankfull.state.spec import Layout
from bankfull.torch_parts import with_all

ONE_SEQUENCE = 1


class Taped:
    def __init__(self, eager: Eager, kit: Kit) -> None:
        self._layout = eager.layout
        self.tape = tape_of(eager, kit)
        self._taps = eager.tapped  # as recorded: tensors without data
        self.tapped: dict[int, Tensor] = {}
        self.timed = False
        """Whether the time of every kernel is summed up, for profiles."""

    def __call__(self, batch: Batch) -> Tensor:
        inputs = inputs_of(batch, self._layout)
        sources = [_source(tensor) for tensor in inputs]
        tensors = dict(zip(input_names(self._layout), inputs, strict=True)) if self.tape.breaks else None
        hidden = self.tape.replay(len(batch.tokens), len(batch.kv_len), sources, tensors, self.timed)
        if self._taps:
            self.tapped = dict(zip(self._taps, self.tape.kept(len(batch.tokens)), strict=True))
        return hidden

    def weights_beside(self, eager: Eager, kit: Kit) -> list[tuple[Any, Any]]:
        """The tape's fixed memory, and that of another model's tape. Raises UnlikeTwins where these differ."""
        pairs = self.tape.beside(tape_of(eager, kit))
        if pairs is None:
            raise UnlikeTwins("the kernels of a step, and what they share, are others")
        return pairs

    def choosing(self, rows: Rows) -> ChoosingStep | None:
        """A step that also chooses tokens, for rows whose sampling parameters the kernel supports."""
        if rows.host is None:
            return None
        tables = [
            (table.data_ptr(), table.shape[1], size) for table, size in zip(rows.tables, rows.page_tokens, strict=True)
        ]
        count, longest = rows.tokens.shape
        run = self.tape.choosing(
            RowsAt(
                count,
                longest,
                rows.tokens.data_ptr(),
                rows.known.data_ptr(),
                rows.computed.ctypes.data,
                0 if self._layout.recurrent is None else rows.slot.data_ptr(),
                tables,
                params_at(rows.sampling),
            )
        )
        return None if run is None else lambda lines, slots=(): run(lines, slots, self.timed)


def tape_of(eager: Eager, kit: Kit) -> Tape:
    recorder, hidden, best = record(eager, kit)
    return Tape(recorder, hidden, input_names(eager.layout), best, list(eager.tapped.values()))


def record(eager: Eager, kit: Kit) -> tuple[Recorder, Tensor, Tensor | None]:
    """The model's operations, its hidden states, and the most likely token for each where a kernel finds it.

    Raises CannotRecord with the expression of the model's source that cannot be recorded."""
    try:
        return with_all(lambda: _record(eager, kit))
    except Exception as problem:  # a model may do anything with tensors that have no data
        raise _located(problem, eager, kit) from problem


def _record(eager: Eager, kit: Kit) -> tuple[Recorder, Tensor, Tensor | None]:
    recorder = Recorder()
    # Not in inference mode: its tensors do not count how often they were changed in place.
    with kit.recording(recorder), torch.inference_mode(False), torch.no_grad():
        batch = recorded_batch(recorder, eager.layout)
        hidden = eager(batch)
        for tensor in (hidden, *eager.tapped.values()):
            recorder.view(tensor)
        return recorder, hidden, _record_choice(recorder, eager.model.head, hidden)


def _located(problem: Exception, eager: Eager, kit: Kit) -> CannotRecord:
    """The same problem with its place in the model's source. Recording runs again, now noting where tensors are made:
    that takes time, and most models never need it."""
    where = None
    try:
        with Origins() as origins:
            _record(eager, kit)
    except CannotRecord as again:
        where = line_of(again) if again.tensor is None else origins.of(again.tensor)
    except Exception as again:
        where = line_of(again)
    reason = str(problem) if isinstance(problem, CannotRecord) else f"it fails without data ({_first_line(problem)})"
    return CannotRecord(reason, where=where or line_of(problem))


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0][:200]}".rstrip(". ")


def _record_choice(recorder: Recorder, head: Any, hidden: Tensor) -> Tensor | None:
    """The most likely token for each hidden state, after the model on the same tape; None where there is no kernel, or
    no head."""
    if head.elsewhere:
        return None
    before = len(recorder.nodes)
    try:
        best: Tensor = head.best(hidden)
        recorder.view(best)
    except CannotRecord:
        best = hidden
    if best is hidden or any(isinstance(node, Break) for node in recorder.nodes[before:]):
        del recorder.nodes[before:]
        return None
    return best


def input_names(layout: Layout) -> list[str]:
    groups = range(len(layout.paged))
    names = [
        "tokens",
        "positions",
        "q_start",
        "kv_len",
        "ancestors",
        *(f"pages{g}" for g in groups),
        *(f"kv_slots{g}" for g in groups),
    ]
    return names if layout.recurrent is None else [*names, "kept", "read", "write"]


def inputs_of(batch: Batch, layout: Layout) -> list[Any]:
    """The inputs of a batch, in the order of `input_names`."""
    inputs = [
        batch.tokens,
        batch.positions,
        batch.q_start,
        batch.kv_len,
        batch.ancestors,
        *batch.pages,
        *batch.kv_slots,
    ]
    return inputs if layout.recurrent is None else [*inputs, batch.kept, batch.read, batch.write]


def recorded_batch(recorder: Recorder, layout: Layout) -> Batch:
    """A batch whose integers are the recorder's inputs, under the names of `input_names`."""
    return blank_batch(
        recorder.host_input("q_start", ONE_SEQUENCE + 1),
        recorder.host_input("kv_len", ONE_SEQUENCE),
        TOKENS,
        [(1, group.page_tokens) for group in layout.paged],
        recorder.input,
        ancestors=recorder.input("ancestors", (TOKENS,)),
        kept=None if layout.recurrent is None else recorder.host_input("kept", ONE_SEQUENCE),
    )


def _source(found: Tensor | np.ndarray | None) -> tuple[int, int]:
    if found is None:
        return 0, 1
    width = found.shape[1] if found.ndim == 2 else 1
    if isinstance(found, Tensor):
        assert found.dtype is torch.int64 and found.is_contiguous()
        return found.data_ptr(), width
    assert found.dtype == np.int64 and found.flags.c_contiguous
    return found.__array_interface__["data"][0], width
