"""Routing and mixtures of experts in C++: tokens sorted by expert, no padding, each touched expert read once.

A token's result is bitwise identical in any batch and for any number of threads, on either side of the row threshold of
`linear_int8` (see packed.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.ops.experts.body import (
    CLAMPED_SWIGLU,
    RoutingRule,
    add_gated,
    expert_mlp,
    expert_mlp_bf16,
    expert_mlp_int8,
    route,
)
from bankfull.ops.native.checks import address, float_rows, isa_is_chosen
from bankfull.ops.native.extension import required
from bankfull.ops.native.memory import Slabs
from bankfull.ops.pointwise.native import CODES
from bankfull.ops.products.native.linear import FORMATS, storage_of
from bankfull.ops.products.native.packing import pack_into, pack_of, packed_bytes
from bankfull.weights.qtensor import QTensor
from bankfull.weights.store import prepared

_native = required()
_slabs = Slabs()
_FLOAT, _INT8, _BF16 = range(3)
_GATES = ("silu", "gelu", "gelu_tanh", "relu")
FUNCTIONS = {kind: CODES[kind] for kind in _GATES} | {CLAMPED_SWIGLU: int(_native.CLAMPED_SWIGLU)}


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Stacked matrices (experts, outputs, columns), each in the layout `pack` of csrc/packs.hpp."""

    data: Tensor
    pack: int
    shape: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def bytes_of_one(self) -> int:
        return self.nbytes // self.shape[0]


def pack_experts(weight: QTensor) -> PackedExperts:
    experts, outputs, inner = weight.shape
    layout = pack_of(weight)
    each = packed_bytes(layout, outputs, inner)

    def fill(data: Tensor) -> None:
        for expert in range(experts):
            parts = {name: part[expert] for name, part in weight.parts.items()}
            pack_into(QTensor(weight.scheme, parts, (outputs, inner)), layout, data.data_ptr() + expert * each)

    data = prepared(weight, str(layout), experts * each, _slabs.take, fill)
    return PackedExperts(data, layout, (experts, outputs, inner))


def _accepts_floats(*, dtype: torch.dtype | None = None, **facts: Any) -> bool:
    return dtype is torch.float32 and isa_is_chosen()


def _accepts(*, weights: tuple[QTensor, ...] | None = None, **facts: Any) -> bool:
    if weights is None or not _accepts_floats(**facts):
        return False
    return all(
        weight.scheme.name in FORMATS
        and weight.shape[-1] % FORMATS[weight.scheme.name][1] == 0
        and storage_of(weight).is_cpu
        and storage_of(weight).is_contiguous()
        for weight in weights
    )


def _accepts_bf16(*, weights: tuple[QTensor, ...] | None = None, **facts: Any) -> bool:
    return weights is not None and _accepts_floats(**facts) and all(pack_of(weight) >= 0 for weight in weights)


def _accepts_int8(*, weights: tuple[QTensor, ...] | None = None, **facts: Any) -> bool:
    return (
        weights is not None
        and _accepts_bf16(weights=weights, **facts)
        and not any(weight.is_dense or weight.shape[-1] % 32 for weight in weights)
    )


@route.provider("native", on="cpu", accepts=_accepts_floats)
def run_route(logits: Tensor, bias: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    if rule.group_best > 2:
        return route.body(logits, bias, rule)
    rows, wide_bias = float_rows(logits), None if bias is None else float_rows(bias)
    weights = torch.empty(len(rows), rule.per_token)
    chosen = torch.empty(len(rows), rule.per_token, dtype=torch.int32)
    _native.route(address(rows), address(wide_bias), address(weights), address(chosen), len(rows), rule.plain)
    return weights, chosen


@add_gated.provider("native", on="cpu", accepts=_accepts_floats)
def run_add_gated(x: Tensor, delta: Tensor, gate: Tensor) -> Tensor:
    rows, branch, gates = float_rows(x), float_rows(delta), float_rows(gate)
    y = torch.empty_like(rows)
    _native.add_gated(address(rows), address(branch), address(gates), address(y), *rows.shape)
    return y


def _run(rounding: int, x: Tensor, chosen: Tensor, weights: Tensor, *others: Any) -> Tensor:
    *matrices, gate_bias, up_bias, down_bias, kind = others
    rows, factors, ids = float_rows(x), float_rows(weights), chosen.contiguous()
    biases = [None if bias is None else float_rows(bias) for bias in (gate_bias, up_bias, down_bias)]
    described = []
    for matrix, bias in zip(matrices, biases, strict=True):
        storage, each, code = part_of(matrix)
        described.append((address(storage), address(bias), each, code))
    experts, inner, hidden = matrices[0].shape
    y = torch.empty_like(rows)
    _native.expert_mlp(
        address(rows),
        address(ids),
        address(factors),
        address(y),
        *ids.shape,
        experts,
        hidden,
        inner,
        described,
        FUNCTIONS[kind],
        rounding,
    )
    return y


def part_of(matrix: QTensor | PackedExperts) -> tuple[Tensor, int, int]:
    """The storage of stacked matrices, the bytes of one of them, and their pack or format."""
    if isinstance(matrix, PackedExperts):
        return matrix.data, matrix.bytes_of_one, matrix.pack
    storage = storage_of(matrix)
    return storage, storage[0].numel() * storage.element_size(), FORMATS[matrix.scheme.name][0]


@expert_mlp.provider("native", on="cpu", accepts=_accepts)
def run_expert_mlp(*args: Any) -> Tensor:
    return _run(_FLOAT, *args)


@expert_mlp_int8.provider("native", on="cpu", accepts=_accepts_int8, prepare=pack_experts)
def run_expert_mlp_int8(*args: Any) -> Tensor:
    return _run(_INT8, *args)


@expert_mlp_bf16.provider("native", on="cpu", accepts=_accepts_bf16, prepare=pack_experts)
def run_expert_mlp_bf16(*args: Any) -> Tensor:
    return _run(_BF16, *args)
