"""gpt-oss's experts under the names and in the layout of all others: stacked matrices (experts, outputs, columns).

Its files hold gate and up interleaved in one tensor, either dense and transposed ("gate_up_proj") or as MXFP4
("gate_up_proj_blocks" and "gate_up_proj_scales").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.mxfp4 import SCHEME, from_pairs
from bankfull.weights.qtensor import LateParts, QTensor, Scheme
from bankfull.weights.source import TensorSource

_NAME = re.compile(r"(?P<stem>.*\.experts)\.(?P<which>gate|up|down)_proj\.(?P<what>weight|bias)")
_FUSED = re.compile(r"(?P<stem>.*\.experts)\.(?P<which>gate_up|down)_proj(?P<what>|_bias|_blocks|_scales)")


class StoredBytes(TensorSource, Protocol):
    def bytes_of(self, name: str) -> Tensor:
        """A tensor of bytes, which no scheme describes; it is then marked as read."""


class FusedExperts:
    """A source whose experts' tensors have the names "experts.gate_proj.weight", "experts.up_proj.bias", ..."""

    def __init__(self, source: StoredBytes) -> None:
        self._source = source

    def names(self) -> list[str]:
        names: dict[str, None] = {}
        for name in self._source.names():
            match = _FUSED.fullmatch(name)
            if match is None:
                names[name] = None
                continue
            what = "bias" if match["what"] == "_bias" else "weight"
            for which in ("gate", "up") if match["which"] == "gate_up" else ("down",):
                names[f"{match['stem']}.{which}_proj.{what}"] = None
        return list(names)

    def has(self, name: str) -> bool:
        match = self._fused(name)
        return self._source.has(name) if match is None else any(map(self._source.has, _candidates(match)))

    def shape(self, name: str) -> tuple[int, ...]:
        match = self._fused(name)
        if match is None:
            return self._source.shape(name)
        shape = self._source.shape(self._stored(match))
        columns: tuple[int, ...] = ()
        if match["what"] == "bias":
            rows = shape[1]
        elif self._is_packed(match):
            if len(shape) != 4 or shape[-1] != 16:
                raise ModelError(f"Tensor {self._stored(match)} has shape {shape}, not that of MXFP4 blocks.")
            rows, columns = shape[1], (shape[2] * 32,)
        else:
            if len(shape) != 3:
                raise ModelError(f"Tensor {self._stored(match)} has shape {shape}, but experts are stacked matrices.")
            rows, columns = shape[2], (shape[1],)
        return (shape[0], rows if match["which"] == "down" else rows // 2, *columns)

    def scheme(self, name: str) -> Scheme:
        match = self._fused(name)
        if match is None or not self._is_packed(match):
            return self._source.scheme(name if match is None else self._stored(match))
        return SCHEME

    def get(self, name: str) -> QTensor:
        return self._get(name, slice(None))

    def get_experts(self, name: str, experts: Sequence[int]) -> QTensor:
        return self._get(name, list(experts))

    def _get(self, name: str, experts: slice | list[int]) -> QTensor:
        match = self._fused(name)
        if match is None:
            tensor = self._source.get(name)
            return tensor if isinstance(experts, slice) else tensor.rows(torch.tensor(experts))
        shape, which, stored = self.shape(name), match["which"], self._stored(match)
        # Rows of gate and up alternate.
        rows = slice(None) if which == "down" else slice(int(which == "up"), None, 2)
        if match["what"] == "bias":
            return QTensor.dense(self._source.get(stored).parts["data"][experts][:, rows].contiguous())
        if not self._is_packed(match):
            data = self._source.get(stored).parts["data"][experts]
            return QTensor.dense(data.transpose(1, 2)[:, rows].contiguous())
        blocks = self._source.bytes_of(stored)
        scales = self._source.bytes_of(f"{stored.removesuffix('_blocks')}_scales")
        if scales.shape != blocks.shape[:-1]:
            raise ModelError(f"Tensor {stored} has shape {tuple(blocks.shape)}, its scales {tuple(scales.shape)}.")

        def packed() -> dict[str, Tensor]:
            return {"blocks": from_pairs(blocks[experts][:, rows], scales[experts][:, rows])}

        count = shape[0] if isinstance(experts, slice) else len(experts)
        return QTensor(SCHEME, LateParts(("blocks",), packed), (count, *shape[1:]))

    def unread(self) -> list[str]:
        return self._source.unread()

    def release(self) -> None:
        self._source.release()

    def _fused(self, name: str) -> re.Match[str] | None:
        """The parts of a name that the file may hold fused; None for other tensors and for files with separate ones,
        such as those of `make-model`."""
        return None if self._source.has(name) else _NAME.fullmatch(name)

    def _stored(self, match: re.Match[str]) -> str:
        names = _candidates(match)
        return next((name for name in names if self._source.has(name)), names[0])

    def _is_packed(self, match: re.Match[str]) -> bool:
        return match["what"] == "weight" and self._stored(match).endswith("_blocks")


def _candidates(match: re.Match[str]) -> list[str]:
    """Names in the file that may hold a tensor."""
    stem = f"{match['stem']}.{'down' if match['which'] == 'down' else 'gate_up'}_proj"
    return [f"{stem}_bias"] if match["what"] == "bias" else [stem, f"{stem}_blocks"]
