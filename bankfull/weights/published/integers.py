"""Matrices of integer codes with scales and zero points: what AWQ, GPTQ and compressed-tensors share.

A value is scale * (code - zero). Codes are unsigned; zero points default to half of their range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import GROUPS, name_of, pack_pairs, pack_planes
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.published.matrix import EXPANDED, MatrixPlan, expanded, finite
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import EXPERT

READ_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    name: str
    shape: tuple[int, int]
    bits: int
    group: int
    """Columns per scale."""
    owns: tuple[str, ...]
    codes: Callable[[], Tensor]
    """uint8 (out, in)"""
    stored_scales: Callable[[], Tensor]
    """(out, in / group), of any float dtype"""
    half: bool
    """Whether scales are stored as float16."""
    stored_zeros: Callable[[], Tensor] | None = None
    """Whole numbers (out, in / group)"""
    groups_of_columns: Callable[[], Tensor] | None = None
    """The group of each column, (in,), where the file says so."""

    def places(self) -> Tensor | None:
        """The group of each column; None if groups are in order."""
        if self.groups_of_columns is None:
            return None
        places, groups = self.groups_of_columns().to(torch.int64), -(-self.shape[1] // self.group)
        if not bool(((places >= 0) & (places < groups)).all()):
            raise ModelError(f"Matrix {self.name} assigns columns to groups that do not exist (g_idx): it is damaged.")
        return None if torch.equal(places, torch.arange(self.shape[1]) // self.group) else places

    def order(self) -> Tensor | None:
        """The columns sorted by group; None if they are in order."""
        places = self.places()
        return None if places is None else places.argsort(stable=True)

    def _irregular(self) -> str:
        """Why the columns cannot be sorted by group, as the end of a sentence; empty if they can."""
        places = self.places()
        if places is None:
            return ""
        if EXPERT.search(self.name):
            return "the columns of each expert are in an order of their own (act-order)"
        if not torch.equal(places.sort().values, torch.arange(self.shape[1]) // self.group):
            return f"their groups (g_idx) have other sizes than {self.group} columns"
        return ""

    def scales(self) -> Tensor:
        return finite(self.stored_scales(), f"{self.name}'s scales")

    def zeros(self) -> Tensor | None:
        """None where all are half of the range."""
        if self.stored_zeros is None:
            return None
        zeros = self.stored_zeros()
        if not bool(((zeros >= 0) & (zeros <= 2**self.bits)).all()):
            raise ModelError(f"Matrix {self.name} has zero points outside of 0 to {2**self.bits}: it is damaged.")
        return None if bool((zeros == 2 ** (self.bits - 1)).all()) else zeros

    @property
    def narrow(self) -> int:
        """Columns per scale in our scheme; 0 if none fits."""
        return next((group for group in GROUPS if self.group % group == 0 and self.shape[1] % group == 0), 0)

    def plan(self) -> MatrixPlan:
        # Nothing that is read here is kept: a large model is planned as a whole before its first matrix is loaded.
        if irregular := self._irregular():
            return MatrixPlan(EXPANDED, irregular)
        has_zeros = self.zeros() is not None
        if self.bits == 8:
            if has_zeros:
                return MatrixPlan(EXPANDED, "8-bit codes with zero points have no scheme here")
            if self.group >= self.shape[1]:
                return MatrixPlan(SCHEMES[INT8_ROW])
        if not self.narrow:
            return MatrixPlan(EXPANDED, f"groups of {self.group} columns have no scheme here")
        if not self.half and not _is_half(self.scales()):
            return MatrixPlan(EXPANDED, "float16 cannot hold their scales")
        kind = f"uint{self.bits}" if has_zeros else f"int{self.bits}"
        return MatrixPlan(SCHEMES[name_of(kind, self.narrow)])

    def load(self, plan: MatrixPlan) -> QTensor:
        codes, scales, zeros, scheme = self.codes(), self.scales(), self.zeros(), plan.scheme
        if scheme == EXPANDED:
            return self._expanded(codes, scales.to(torch.float32), zeros)
        if scheme.name == INT8_ROW:
            scales = scales.to(torch.float32).reshape(-1, 1)
            return QTensor(scheme, {"codes": _signed(codes), "scales": scales}, self.shape)
        order = self.order()
        if order is not None:
            codes = codes.index_select(-1, order)
        parts = {"codes": self._packed(codes), "scales": self._repeated(scales.to(torch.float16))}
        if zeros is not None:
            parts["zeros"] = self._repeated(zeros.to(torch.uint8))
        return QTensor(scheme, parts, self.shape, None if order is None else order.to(torch.int32))

    def _repeated(self, of_groups: Tensor) -> Tensor:
        """One for each group of our scheme; the last group of a row may be cut short."""
        repeated = of_groups.repeat_interleave(self.group // self.narrow, -1)
        return repeated[:, : self.shape[1] // self.narrow].contiguous()

    def _packed(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return _signed(codes)
        return pack_pairs(codes) if self.bits == 4 else pack_planes(codes, self.bits)

    def _expanded(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QTensor:
        listed, middle = self.places(), 2 ** (self.bits - 1)
        places = torch.arange(self.shape[1]) // self.group if listed is None else listed

        def rows(own: slice) -> Tensor:
            zero = middle if zeros is None else zeros[own].to(torch.float32)[:, places]
            return scales[own][:, places] * (codes[own].to(torch.float32) - zero)

        return expanded(self.shape, rows)


def _signed(codes: Tensor) -> Tensor:
    """uint8 codes around 128 as int8."""
    return (codes ^ 128).view(torch.int8)


def _is_half(scales: Tensor) -> bool:
    """Whether float16 holds all scales exactly."""
    return torch.equal(scales.to(torch.float16).to(torch.float32), scales.to(torch.float32))
