"""Forms: the kernels of each operation. A form records them and returns True, or False where only the torch body
computes it. Each operation's forms are in its `tape.py`.

The providers' `accepts` has checked types and layouts of weights before, when the operation was bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.ops.native.tape.instruction import Fixed

Outputs = tuple[Tensor, ...]
Form = Callable[..., bool]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


def floats(tensor: Tensor | None) -> Fixed | None:
    """A weight in float32, as the kernel reads it."""
    return None if tensor is None else Fixed(tensor.to(torch.float32).contiguous())


def is_float(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)
