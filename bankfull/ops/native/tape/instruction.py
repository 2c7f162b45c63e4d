"""The parts of a tape before it is built in C++."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.registry import Operation


@dataclass(slots=True, eq=False)
class Value:
    """An intermediate result with one row per token. It is written once, unless a kernel works in place."""

    row_bytes: int
    dtype: torch.dtype
    place: int = -1
    """Bytes of the arena before it, per token; set by the layout."""


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """Columns of a value."""

    value: Value
    offset: int = 0
    """Bytes from the beginning of a row."""

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        return self.value.row_bytes


@dataclass(frozen=True, slots=True)
class Fixed:
    """Memory at a fixed address: weights, pages. The tape keeps the tensor alive."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Input:
    """An input that every step brings, by name."""

    name: str


Operand = ValueColumns | Fixed | Input


@dataclass(slots=True, eq=False)
class Instruction:
    """One kernel. `kind` is a method of the C++ tape; operands and facts are its arguments."""

    kind: str
    reads: dict[str, Operand | None]
    writes: dict[str, Operand | None]
    facts: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    """The instruction's name in profiles."""


@dataclass(slots=True, eq=False)
class Break:
    """An operation that only its torch body computes: the tape stops, Python calls the body, the tape continues."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: dict[str, Operand | None]
    """Operands by the position or name of the argument, for their lifetime."""
    writes: dict[str, Operand | None]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape after the token dimension, and dtype, of each result."""
    nested: dict[str, dict[str, str]] = field(default_factory=dict)
    """Fields of arguments that are records (a mixer's plan): field -> name of the step's input."""


Node = Instruction | Break


def values_in(operands: Iterable[Operand | None]) -> list[Value]:
    return [operand.value for operand in operands if isinstance(operand, ValueColumns)]
