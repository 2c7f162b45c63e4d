"""Finds the expression in a model's source that a tape cannot record, for the message that names it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_INSIDE = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders of torch and `bankfull.ops`. A model's own source is outside of them."""


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Origins(TorchFunctionMode):
    """Within the block, records the expression that made each tensor, or last changed it in place."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, tuple[int, str]] = {}
        self._alive: list[Tensor] = []  # storages are identified by address: none may be freed and reused

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                known = self._lines.get(storage_of(tensor))
                if known is None or tensor._version > known[0]:
                    self._alive.append(tensor)
                    self._lines[storage_of(tensor)] = tensor._version, _caller()
        return result

    def of(self, tensor: Tensor) -> str | None:
        _, line = self._lines.get(storage_of(tensor), (0, None))
        return line


def line_of(problem: BaseException) -> str:
    """The innermost expression of the model in the traceback of an exception."""
    shown = "the model's forward pass"
    for code, lasti, line in _frames(problem.__traceback__):
        if not code.co_filename.startswith(_INSIDE):
            shown = _shown(code, lasti, line)
    return shown


def _frames(traceback: TracebackType | None) -> Iterator[tuple[CodeType, int, int]]:
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lasti, traceback.tb_lineno
        traceback = traceback.tb_next


def _caller() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return _shown(frame.f_code, frame.f_lasti, frame.f_lineno)


def _shown(code: CodeType, lasti: int, line: int) -> str:
    """The expression at a bytecode instruction, with its function, file and line."""
    first, last, begin, end = list(code.co_positions())[lasti // 2]
    text = linecache.getline(code.co_filename, line).strip()
    if first is not None and first == last and begin is not None:
        text = linecache.getline(code.co_filename, first).encode()[begin:end].decode()
    return f"`{text}` in {code.co_qualname} ({Path(code.co_filename).name}:{line})"
