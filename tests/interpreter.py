"""Triton's interpreter, brought to compute as a device does, beside a current numpy."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def compute_as_a_device_does() -> None:
    let_loops_run_to_a_loaded_number()
    round_bfloat16_to_nearest()
    multiply_bfloat16()
    find_numpy_types_at_once()
    type_tuples_when_asked()
    search_modules_once()


def let_loops_run_to_a_loaded_number() -> None:
    """`range` in a kernel asks its bounds for an index; numpy 2.4 no longer takes an array of one number for that."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def round_bfloat16_to_nearest() -> None:
    """The interpreter cuts bits off where every device rounds to the nearest, of two equally near to the even one."""
    cast = interpreter.InterpreterBuilder.cast_impl

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet = (bits >> 16) | 0x40
            return _handle(np.where(np.isnan(source.data), quiet, nearest).astype(np.uint16), source, kind)
        if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.float32:
            return _handle((source.data.astype(np.uint32) << 16).view(np.float32), source, kind)
        return cast(self, source, kind)

    interpreter.InterpreterBuilder.cast_impl = rounded


def multiply_bfloat16() -> None:
    """The interpreter keeps bfloat16 as bits, and multiplies the bits."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return _handle((operand.data.astype(np.uint32) << 16).view(np.float32), operand, tl.float32)

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = multiplied


def find_numpy_types_at_once() -> None:
    """The interpreter makes a table of all types for each look into it."""
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = remembered


def type_tuples_when_asked() -> None:
    """Every shape is a tuple, and spelling out its type takes a fifth of all time; the interpreter hardly ever needs
    it."""
    made = tl.core.tuple.__init__

    def without_type(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            made(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self.__dict__["_type"] = tl.core._type_for_tuple_values(self.values)
        return self.__dict__["_type"]

    def set_type(self: Any, kind: Any) -> None:
        self.__dict__["_type"] = kind

    tl.core.tuple.__init__ = without_type
    tl.core.tuple.type = property(type_of, set_type)


def search_modules_once() -> None:
    """Each call of a function within a kernel searches the language's modules for what is to be patched. The names are
    always the same; below a running kernel they are patched already, so an empty result says nothing."""
    names: dict[int, list[str]] = {}

    def patched(package: Any, builder: Any, scope: Any) -> None:
        if not names.get(id(package)):
            members = inspect.getmembers(package)
            names[id(package)] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in names[id(package)]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patched


def _handle(data: np.ndarray, source: Any, kind: Any) -> Any:
    return interpreter.TensorHandle(data.reshape(source.data.shape), kind.scalar)
