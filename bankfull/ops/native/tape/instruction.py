"""What a tape is made of, before it is handed to C++."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.registry import Operation


@dataclass(slots=True, eq=False)
class Value:
    """An intermediate result: one row per token. Written once, unless a kernel works in place."""

    row_bytes: int
    dtype: torch.dtype
    place: int = -1
    """Bytes of arena before it, per token; set by the layout."""


@dataclass(frozen=True, slots=True)
class View:
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
    """Memory that stays where it is: weights, pages. The tensor is kept alive by the tape."""

    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Input:
    """What every step brings anew, by name."""

    name: str


Operand = View | Fixed | Input


@dataclass(slots=True, eq=False)
class Instruction:
    """One kernel. `kind` is the name of the method of the C++ tape; operands and facts are its arguments."""

    kind: str
    reads: dict[str, Operand | None]
    writes: dict[str, Operand | None]
    facts: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    """Under which name a profile shows it."""


@dataclass(slots=True, eq=False)
class Break:
    """An operation that only its torch body computes: the tape stops, Python calls it, the tape goes on."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: dict[str, Operand | None]
    """View operands by the position of the argument, for their lifetime."""
    writes: dict[str, Operand | None]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Of what it writes: the shape behind the tokens."""
    nested: dict[str, dict[str, str]] = field(default_factory=dict)
    """Arguments that are records of inputs (a mixer's plan): field -> the input's name."""


Node = Instruction | Break


def values_in(operands: Iterable[Operand | None]) -> list[Value]:
    return [operand.value for operand in operands if isinstance(operand, View)]
