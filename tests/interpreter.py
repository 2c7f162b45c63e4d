"""Triton's interpreter, brought to compute as a device does, beside a current numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def compute_as_a_device_does() -> None:
    let_loops_run_to_a_loaded_number()
    round_bfloat16_to_nearest()
    multiply_bfloat16()


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


def _handle(data: np.ndarray, source: Any, kind: Any) -> Any:
    return interpreter.TensorHandle(data.reshape(source.data.shape), kind.scalar)
