"""The recorded tape in C++, and its replay over a step's inputs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bankfull.ops.native.extension import required
from bankfull.ops.native.memory import in_large_pages
from bankfull.ops.native.tape.fuse import fuse
from bankfull.ops.native.tape.instruction import Break, Input, Instruction, Node, Operand, ValueColumns
from bankfull.ops.native.tape.layout import lay_out
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.native.tape.traffic import label_of, traffic_of
from bankfull.ops.sampling.native import ParamsAt
from bankfull.progress import PROGRESS

_native = required()
_NONE, _FIXED, _ARENA, _INPUT = range(4)
Source = tuple[int, int]
"""An input of a step: its address, and its columns (1 for a vector)."""
LONG = 64
"""Tokens from which on a step is replayed in stretches, so that the watchdog sees progress."""
STRETCH = 8
"""Instructions of a stretch: about one layer."""
ChoosingStep = Callable[..., list[int]]
"""Rows, and slots for their next recurrent states -> one token of each row, which is also appended to it; `timed` as
for `Tape.replay`."""


class FixedAt(NamedTuple):
    """Memory at a fixed address, as C++ takes it."""

    kind: int
    address: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Addresses of the int64 arrays of rows that a choosing step reads and extends. The arrays must not move."""

    count: int
    longest: int
    tokens: int
    known: int
    computed: int
    slot: int
    """Slots of recurrent states; 0 for a model without them."""
    tables: Sequence[tuple[int, int, int]]
    """Address of the page tables, their columns, and tokens of a page, for each paged group."""
    params: ParamsAt


class Tape:
    """One tape serves every batch. Its result is in the tape's arena, valid until the next replay."""

    def __init__(
        self,
        recorder: Recorder,
        result: Tensor,
        inputs: Sequence[str],
        chosen: Tensor | None = None,
        others: Sequence[Tensor] = (),
    ) -> None:
        """`inputs`: names of the arguments of `replay`, in order. `chosen`: the most likely token for each result, made
        by the last recorded operation; only `choosing` runs that operation, and may sample instead. `others`: more
        results of recorded operations, which `kept` returns."""
        self._numbers = {name: i for i, name in enumerate(inputs)}
        kept = recorder.view(result)
        self._chosen = None if chosen is None else recorder.view(chosen)
        self._others = [(recorder.view(other), tuple(other.shape[1:]), other.dtype) for other in others]
        keep = {kept.value} if self._chosen is None else {kept.value, self._chosen.value}
        keep |= {view.value for view, _, _ in self._others}
        nodes = fuse(recorder.nodes, keep)
        self.bytes_per_token = lay_out(nodes, keep)
        self.traffic = traffic_of(nodes)
        """Bytes and operations by the labels of `times`."""
        self._labels = [label_of(node) for node in nodes if isinstance(node, Instruction)]
        self._result, self._columns = kept, kept.value.row_bytes // result.dtype.itemsize
        self._dtype = result.dtype
        self.fixed: list[Tensor] = []
        """Weights, and pages, in the order in which kernels name them."""
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._tape = _native.Tape()
        self._tape.inputs = len(inputs)
        self._pieces: list[tuple[int, int] | Break] = []
        self._write(nodes if chosen is None else nodes[:-1])
        if chosen is not None:
            assert isinstance(nodes[-1], Instruction) and nodes[-1].kind in ("head", "packed_head")
            self._append(nodes[-1])
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._roomy = self._address = 0
        self.seconds = 0.0
        """Seconds inside the kernels of all replays, without breaks."""
        self._broken: dict[str, tuple[float, int]] = {}

    @property
    def breaks(self) -> dict[str, int]:
        """Operation -> number of times that the tape stops for its torch body."""
        return dict(Counter(piece.operation.label for piece in self._pieces if isinstance(piece, Break)))

    def __len__(self) -> int:
        return len(self._tape)

    def beside(self, other: Tape) -> list[tuple[Any, Any]] | None:
        """The fixed memory of two tapes that run the same kernels over the same places, and the operands of operations
        that Python calls; None if they do not."""
        if self._outline != other._outline or not _alike(self._calls, other._calls):
            return None
        breaks = [[piece for piece in tape._pieces if isinstance(piece, Break)] for tape in (self, other)]
        called = ((one.args, two.args) for one, two in zip(*breaks, strict=True))
        return [*zip(self.fixed, other.fixed, strict=True), *called]

    @property
    def _outline(self) -> list[Any]:
        return [piece.operation.label if isinstance(piece, Break) else piece for piece in self._pieces]

    def replay(
        self,
        tokens: int,
        sequences: int,
        inputs: Sequence[Source],
        tensors: Mapping[str, Any] | None = None,
        timed: bool = False,
    ) -> Tensor:
        """`tensors`: the inputs by name, for operations that Python calls. `timed`: whether `times` counts it."""
        arena = self._arena_for(tokens)
        for piece in self._pieces:
            begun = perf_counter()
            if isinstance(piece, Break):
                self._call(piece, tokens, tensors or {})
                if timed:
                    seconds, runs = self._broken.get(label_of(piece), (0.0, 0))
                    self._broken[label_of(piece)] = (seconds + perf_counter() - begun, runs + 1)
            else:
                # A short step is one stretch: weights are not prefetched across the border between two.
                stretch = STRETCH if tokens >= LONG else len(self)
                for first in range(piece[0], piece[1], stretch):
                    self._tape.replay(arena, tokens, sequences, inputs, first, min(first + stretch, piece[1]), timed)
                    PROGRESS.tick()
                self.seconds += perf_counter() - begun
        return self._tensor(self._result, tokens, (self._columns,), self._dtype)

    def kept(self, tokens: int) -> list[Tensor]:
        """The other results of the last replay, which had this many tokens."""
        return [self._tensor(view, tokens, shape, dtype) for view, shape, dtype in self._others]

    def choosing(self, rows: RowsAt) -> ChoosingStep | None:
        """The step that also chooses tokens; None where an operation or the head is not on the tape."""
        if self._chosen is None or any(isinstance(piece, Break) for piece in self._pieces):
            return None
        step = _native.ChoosingStep(
            self._tape,
            self._place(self._chosen),
            rows.count,
            rows.longest,
            rows.tokens,
            rows.known,
            rows.computed,
            rows.slot,
            list(rows.tables),
            rows.params,
        )

        def run(lines: Sequence[int], slots: Sequence[int] = (), timed: bool = False) -> list[int]:
            arena, begun = self._arena_for(len(lines)), perf_counter()
            tokens: list[int] = step.run(arena, lines, slots, timed)
            self.seconds += perf_counter() - begun
            return tokens

        return run

    def _arena_for(self, tokens: int) -> int:
        if tokens > self._roomy:
            self._roomy = 1 << (tokens - 1).bit_length()
            self._arena = in_large_pages(torch.empty(self.bytes_per_token * self._roomy, dtype=torch.uint8))
            self._address = self._arena.data_ptr()
        return self._address

    def times(self) -> dict[str, tuple[float, int]]:
        """Label -> seconds and runs over all timed replays since the last call, without labels that never ran."""
        times, self._broken = defaultdict(lambda: (0.0, 0), self._broken), {}
        for label, (_, nanoseconds, runs) in zip(self._labels, self._tape.times(), strict=True):
            if runs:
                seconds, count = times[label]
                times[label] = (seconds + nanoseconds * 1e-9, count + runs)
        self._tape.clear_times()
        return dict(times)

    def _write(self, nodes: Sequence[Node]) -> None:
        begin = 0
        for node in nodes:
            if isinstance(node, Instruction):
                self._append(node)
                continue
            if len(self._tape) > begin:
                self._pieces.append((begin, len(self._tape)))
            self._pieces.append(node)
            begin = len(self._tape)
        if len(self._tape) > begin:
            self._pieces.append((begin, len(self._tape)))

    def _append(self, node: Instruction) -> None:
        facts = dict(node.facts)
        joined: Instruction | None = facts.pop("intake", None)
        others = () if joined is None else joined.reads | joined.writes
        operands = {name: operand for name, operand in (node.reads | node.writes).items() if name not in others}
        places = {name: self._place(operand) for name, operand in operands.items()}
        if node.kind == "packed":
            facts["parts"] = [
                (*(places.pop(f"{name}{i}") for name in ("weight", "hadamard", "bias", "y")), outputs, outputs, pack)
                for i, (outputs, pack) in enumerate(facts["parts"])
            ]
        if node.kind == "experts":
            facts["matrices"] = [
                (places.pop(name), places.pop(f"{name}_bias"), each, code) for name, each, code in facts["matrices"]
            ]
        for name in ("", "k_", "v_"):
            if f"{name}strides" in facts:
                numbers, scales = facts.pop(f"{name}strides")
                places[f"{name}pages"] = (places[f"{name}pages"], numbers, places.pop(f"{name}scales"), scales)
        arguments = {"name": node.label, **places, **facts}
        self._calls.append((node.kind, arguments))
        getattr(self._tape, node.kind)(**arguments)
        if joined is not None:
            self._append(joined)

    def _place(self, operand: Operand | None) -> Any:
        if operand is None:
            return (_NONE, 0, 0)
        if isinstance(operand, ValueColumns):
            return (_ARENA, operand.value.place, operand.offset)
        if isinstance(operand, Input):
            return (_INPUT, self._numbers[operand.name], 0)
        self.fixed.append(operand.tensor)
        return FixedAt(_FIXED, operand.tensor.data_ptr())

    def _tensor(self, view: ValueColumns, tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Columns of a value as a tensor over the arena."""
        item = dtype.itemsize
        at = view.value.place * tokens + view.offset
        inner, strides = 1, list[int]()
        for size in reversed(shape):
            strides.insert(0, inner)
            inner *= size
        return self._arena.view(dtype).as_strided((tokens, *shape), (view.stride // item, *strides), at // item)

    def _call(self, piece: Break, tokens: int, tensors: Mapping[str, Any]) -> None:
        def found(name: str, arg: Any) -> Any:
            operand = piece.reads.get(name)
            if isinstance(operand, ValueColumns):
                return self._tensor(operand, tokens, tuple(arg.shape[1:]), arg.dtype)
            if isinstance(operand, Input):
                return tensors[operand.name]
            inside = piece.nested.get(name)
            return replace(arg, **{part: tensors[source] for part, source in inside.items()}) if inside else arg

        args = [found(str(i), arg) for i, arg in enumerate(piece.args)]
        kwargs = {name: found(name, arg) for name, arg in piece.kwargs.items()}
        results = piece.operation.body(*args, **kwargs)
        for (name, operand), result in zip(
            piece.writes.items(), results if isinstance(results, tuple) else (results,), strict=False
        ):
            assert isinstance(operand, ValueColumns)
            shape, dtype = piece.shapes[name]
            self._tensor(operand, tokens, shape, dtype).copy_(result)


def _alike(one: Any, other: Any) -> bool:
    """Whether the arguments of kernels are the same, whatever the addresses are."""
    if isinstance(one, FixedAt):
        return isinstance(other, FixedAt)
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
