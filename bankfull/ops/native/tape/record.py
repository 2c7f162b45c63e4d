"""Records the operations of a model by running it on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops.native.tape.instruction import Break, Fixed, Input, Instruction, Node, Operand, Value, ValueColumns
from bankfull.ops.native.tape.origins import storage_of
from bankfull.ops.registry import BODY, Operation

TOKENS = 13
"""Rows of every recorded tensor. The number is arbitrary: it never reaches the tape."""


class CannotRecord(Exception):
    """The model computes something between its operations that a tape cannot repeat. The reason has no full stop."""

    def __init__(self, reason: str, tensor: Tensor | None = None, where: str = "") -> None:
        super().__init__(reason)
        self.tensor = tensor
        """The tensor that does not come from an operation, where there is one."""
        self.where = where
        """The expression in the model's source, once it is known."""


class Recorder:
    """Replaces the kernels while a model's `forward` runs on meta tensors.

    A tensor is identified by its storage, so views made by the model (heads, columns) need no kernel. Every tensor that
    an operation reads must be the result of another operation, an input of the step, or a weight.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._values: dict[int, Value] = {}
        self._inputs: dict[int, str] = {}
        self._encoded: dict[ValueColumns, ValueColumns] = {}
        self.shared: dict[tuple[str, ValueColumns, bytes], ValueColumns] = {}
        """What is done to the columns of some rows, the rows, and the columns or factors -> the result."""
        self._alive: list[Any] = []  # storages are identified by address: none may be freed and reused

    def input(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor that each step brings."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._alive.append(tensor)
        self._inputs[storage_of(tensor)] = name
        return tensor

    def host_input(self, name: str, size: int) -> np.ndarray:
        """A host array that each step brings; identified by its `id`."""
        array = np.zeros(size, np.int64)
        self._alive.append(array)
        self._inputs[id(array)] = name
        return array

    def add(self, operation: Operation, provider: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by the kit instead of a kernel. The result has the operation's shapes."""
        from bankfull.ops.native.tape.all_forms import FORMS

        result = operation.on_meta(*args, **kwargs)
        outputs = tuple(self._output(t) for t in (result if isinstance(result, tuple) else (result,)) if t is not None)
        form = FORMS.get(operation.name)
        if provider == BODY or form is None or not form(self, outputs, *args, **kwargs):
            self._break(operation, args, kwargs, outputs)
        return outputs if isinstance(result, tuple) else (outputs[0] if outputs else None)

    def emit(
        self,
        kind: str,
        reads: dict[str, Operand | None],
        writes: dict[str, Operand | None],
        /,
        label: str = "",
        **facts: Any,
    ) -> None:
        self.nodes.append(Instruction(kind, reads, writes, facts, label or kind))

    def operand(self, tensor: Tensor | np.ndarray) -> Operand:
        """The tensor as a kernel's operand."""
        if isinstance(tensor, np.ndarray):
            return Input(self._named(id(tensor), "host array"))
        if tensor.device.type != "meta":
            return Fixed(tensor)
        if tensor._version:
            raise CannotRecord("it changes a tensor in place", tensor)
        value = self._values.get(storage_of(tensor))
        if value is None:
            return Input(self._named(storage_of(tensor), "tensor", tensor))
        item = tensor.element_size()
        dense = tensor.shape[0] == TOKENS and (tensor.dim() < 2 or tensor[0].is_contiguous())
        offset = int(tensor.storage_offset()) * item
        if not dense or tensor.stride(0) * item != value.row_bytes or offset >= value.row_bytes:
            raise CannotRecord("an operation reads a view that is not made of whole columns of a result")
        return ValueColumns(value, offset)

    def view(self, tensor: Tensor) -> ValueColumns:
        operand = self.operand(tensor)
        if not isinstance(operand, ValueColumns):
            raise CannotRecord("an operation reads an input or a weight where it expects a result")
        return operand

    def dense(self, tensor: Tensor) -> ValueColumns | None:
        """The operand, if the tensor is all of its value."""
        place = self.view(tensor)
        row = tensor.numel() // TOKENS * tensor.element_size()
        return place if row == place.value.row_bytes else None

    def encoded(self, x: ValueColumns, columns: int, stride: int) -> ValueColumns:
        """x encoded for packed weights, once for all instructions that read it."""
        known = self._encoded.get(x)
        if known is None:
            known = self._encoded[x] = ValueColumns(Value(stride, torch.uint8))
            self.emit("encode", {"x": x}, {"encoded": known}, x_stride=x.stride // 4, columns=columns)
        return known

    def blank(self, columns: int) -> Tensor:
        """A result in float32 that one instruction of an operation leaves for another."""
        return self._output(torch.empty(TOKENS, columns, device="meta"))

    def is_value(self, output: Tensor, known: ValueColumns) -> None:
        """The operation's result is one that is recorded already."""
        self._values[storage_of(output)] = known.value

    def _output(self, like: Tensor) -> Tensor:
        tensor = torch.empty(like.shape, dtype=like.dtype, device="meta")
        if tensor.dim() == 0 or tensor.shape[0] != TOKENS:
            raise CannotRecord("an operation's result does not have one row per token")
        self._alive.append(tensor)
        self._values[storage_of(tensor)] = Value(tensor.numel() // TOKENS * tensor.element_size(), tensor.dtype)
        return tensor

    def _named(self, key: int, what: str, tensor: Tensor | None = None) -> str:
        name = self._inputs.get(key)
        if name is None:
            raise CannotRecord(f"it makes a {what} outside of the model's operations", tensor)
        return name

    def _break(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Iterable[Tensor]
    ) -> None:
        reads: dict[str, Operand | None] = {}
        nested: dict[str, dict[str, str]] = {}
        for name, arg in [*enumerate(args), *kwargs.items()]:
            if isinstance(arg, Tensor):
                reads[str(name)] = self.operand(arg)
            elif is_dataclass(arg):
                nested[str(name)] = self._fields(arg)
        writes: dict[str, Operand | None] = {str(i): self.view(t) for i, t in enumerate(outputs)}
        shapes = {str(i): (tuple(t.shape[1:]), t.dtype) for i, t in enumerate(outputs)}
        self.nodes.append(Break(operation, args, kwargs, reads, writes, shapes, nested))

    def _fields(self, record: Any) -> dict[str, str]:
        """The fields of a record that are inputs of the step."""
        inputs = {}
        for one in fields(record):
            part = getattr(record, one.name)
            key = storage_of(part) if isinstance(part, Tensor) and part.device.type == "meta" else id(part)
            if key in self._inputs:
                inputs[one.name] = self._inputs[key]
        return inputs
