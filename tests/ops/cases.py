"""Generated inputs for every operation: one seed, one case, the same on every device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.attention import Heads
from bankfull.ops import Epilogue, HeadNorms, HeadWeights, PagedMeta, RecurrentMeta, Unnormed
from bankfull.ops.pages.rounded import int4_group, is_rounded
from bankfull.ops.pointwise.body import _KINDS as KINDS
from bankfull.weights.formats import SCHEMES, fp8_groups, groups, mxfp4, rows
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.formats.two_of_four import PAIRS, packed_halves
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.scheme import Scheme
from bankfull.weights.sparse_source import KERNEL_COLUMNS

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
NAN = float("nan")
WEIGHTS = {**SCHEMES, mxfp4.MXFP4: mxfp4.SCHEME}
"""Every scheme that kernels multiply."""


@dataclass(slots=True)
class Case:
    args: tuple[Any, ...]
    dtype: torch.dtype
    """Dtype of the arithmetic, which determines the tolerance."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts that a layer would pass when it binds the operation."""
    written: tuple[int, ...] = ()
    """Indices of arguments that the operation writes to."""
    provided: torch.dtype | None = None
    """Dtype of a provider's arithmetic, if it may be coarser than the body's."""

    def to(self, device: str) -> Case:
        return replace(self, args=tuple(moved(arg, device) for arg in self.args))


def moved(value: Any, device: str) -> Any:
    """An argument on another device, with the same memory layout."""
    if isinstance(value, Tensor):
        if device == "meta":
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return there.copy_(value)
    if isinstance(value, QTensor):
        parts = {name: moved(part, device) for name, part in value.parts.items()}
        return replace(value, parts=parts, outliers=moved(value.outliers, device))
    if isinstance(value, PagedMeta):
        names = ("pages", "slots", "starts", "lengths", "ancestors")
        return replace(value, **{name: moved(getattr(value, name), device) for name in names})
    if isinstance(value, RecurrentMeta):
        names = ("read", "write", "starts", "kepts")
        return replace(value, **{name: moved(getattr(value, name), device) for name in names})
    if isinstance(value, Unnormed):
        names = ("x", "delta", "weight", "joined")
        return replace(value, **{name: moved(getattr(value, name), device) for name in names})
    if isinstance(value, HeadWeights):
        return replace(value, stored=moved(value.stored, device))
    if isinstance(value, HeadNorms):
        return replace(value, q=moved(value.q, device), k=moved(value.k, device))
    if isinstance(value, Epilogue):
        return value._replace(bias=moved(value.bias, device))
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


def fused_in(args: tuple[Any, ...]) -> dict[str, bool]:
    """The facts of the binding of an operation that is called with these arguments."""
    if not isinstance(epilogue := args[-1], Epilogue):
        return {}
    return {"normed": isinstance(args[0], Unnormed), "gated": bool(epilogue.gate), "best": epilogue.best}


def flat(args: tuple[Any, ...]) -> list[Any]:
    """The arguments with those of an epilogue, which is the last one, in its place."""
    return [*args[:-1], *args[-1]] if args and isinstance(args[-1], Epilogue) else list(args)


class Maker:
    """Draws from one seed: sizes from `pick`, values from torch's generator. dtypes and weight schemes alternate, so
    that
    consecutive seeds cover all combinations."""

    def __init__(self, seed: int, dtype: torch.dtype | None = None) -> None:
        self.seed, self.pick = seed, Random(seed)
        self.numbers = torch.Generator().manual_seed(seed)
        self.dtype = dtype or FLOATS[seed % len(FLOATS)]

    def size(self, low: int, high: int) -> int:
        return self.pick.randint(low, high)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Non-contiguous half of the time: a slice of something larger, or a transposed tensor."""
        layout = self.pick.choice(("dense", "dense", "sliced", "transposed"))
        if layout == "dense" or not shape:
            drawn = torch.randn(shape, generator=self.numbers, dtype=torch.float64)
        elif layout == "sliced":
            wider = (*shape[:-1], shape[-1] + 3)
            drawn = torch.randn(wider, generator=self.numbers, dtype=torch.float64).to(dtype or self.dtype)[..., 2:-1]
        else:
            drawn = torch.randn(shape[::-1], generator=self.numbers, dtype=torch.float64)
            drawn = drawn.to(dtype or self.dtype).permute(*reversed(range(len(shape))))
        return drawn.to(dtype or self.dtype)

    def state(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers, dtype=torch.promote_types(self.dtype, torch.float32))

    def ids(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self.numbers)

    def scheme(self) -> Scheme:
        schemes = list(WEIGHTS.values())
        return schemes[self.seed // len(FLOATS) % len(schemes)]

    def columns(self, scheme: Scheme, most: int = 3) -> int:
        """Of a weight in blocks. Kernels of sparse weights take multiples of 64."""
        return (KERNEL_COLUMNS if scheme.is_sparse else scheme.block) * self.size(1, most)

    def weight(self, scheme: Scheme, outer: int, inner: int) -> QTensor:
        """Random values in a dense scheme; in a block scheme random codes, with scales that keep values near one."""
        if scheme.is_sparse:
            parts = scheme.empty((outer, inner))
            parts["values"].copy_(torch.randn(parts["values"].shape, generator=self.numbers, dtype=torch.float64))
            pairs = torch.tensor([first | second << 2 for first, second in PAIRS], dtype=torch.uint8)
            drawn = pairs[torch.randint(len(pairs), (outer, inner // 4), generator=self.numbers)]
            parts["positions"].copy_(packed_halves(drawn))
            return QTensor(scheme, parts, (outer, inner))
        if scheme.is_dense:
            data = torch.randn(outer, inner, generator=self.numbers, dtype=torch.float64).to(DTYPES[scheme.name])
            return QTensor(scheme, {"data": data}, (outer, inner))
        if scheme.name in _CODED:
            parts = scheme.empty((outer, inner))
            codes, scales = parts["codes"], parts["scales"]
            codes.view(torch.uint8).random_(256, generator=self.numbers)
            if codes.is_floating_point():
                codes.copy_(codes.to(torch.float32).nan_to_num())
            scales.copy_(torch.rand(scales.shape, generator=self.numbers).add(0.5).div(_CODED[scheme.name]))
            if "zeros" in parts:
                parts["zeros"].random_(_CODED[scheme.name] + 1, generator=self.numbers)
            return QTensor(scheme, parts, (outer, inner))
        if scheme.name not in _HALVES and scheme.name != mxfp4.MXFP4:
            return quantize(torch.randn(outer, inner, generator=self.numbers), scheme.name)
        blocks = torch.randint(256, (outer, scheme.row_bytes(inner)), generator=self.numbers, dtype=torch.uint8)
        each = blocks.view(-1, scheme.block_bytes)
        if scheme.name == mxfp4.MXFP4:  # an exponent in place of a float16
            each[:, 0] = each[:, 0] % 4 + mxfp4.BIAS - 5
        for at in _HALVES.get(scheme.name, ()):
            scale = torch.rand(len(each), 1, generator=self.numbers).add(0.5).div(_LARGEST[scheme.name]).half()
            each[:, at : at + 2] = scale.view(torch.uint8)
        return QTensor(scheme, {"blocks": blocks}, (outer, inner))


#: Offsets of the blocks' float16 scales, and roughly the largest product of code and inner scale.
_HALVES = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q2_k": (80, 82),
    "q3_k": (108,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}
_LARGEST = {
    "q4_0": 8,
    "q4_1": 16,
    "q5_0": 16,
    "q5_1": 32,
    "q8_0": 128,
    "q2_k": 45,
    "q3_k": 128,
    "q4_k": 945,
    "q5_k": 1953,
    "q6_k": 4096,
}
_LARGEST_CODES = {"int8": 128, "int4": 8, "int3": 4, "int2": 2, "uint4": 16, "uint3": 8, "uint2": 4}
_CODED = {scheme.name: _LARGEST_CODES[scheme.name.split("_")[0]] for scheme in groups.SCHEMES}
_CODED |= {rows.INT8_ROW: 128, rows.FP8: 448, fp8_groups.FP8_G128: 448}
"""The largest code of each scheme with separate codes and scales."""


def linear(make: Maker) -> Case:
    scheme = make.scheme()
    inner = make.size(1, 300) if scheme.block == 1 else make.columns(scheme)
    count, outer = make.size(1, 40), make.size(1, 70)
    weight = make.weight(scheme, outer, inner)
    lead = (count,) if make.size(0, 3) else (2, count)
    bias = make.normal(outer) if make.size(0, 1) else None
    return Case((make.normal(*lead, inner), weight, Epilogue(bias)), make.dtype, {"weight": weight})


def linear_int8(make: Maker) -> Case:
    """Few rows: with many, a kernel may be more precise than the operation."""
    scheme = make.scheme()
    inner = 32 * make.size(1, 9) if scheme.block == 1 else make.columns(scheme)
    weight = make.weight(scheme, make.size(1, 70), inner)
    bias = make.normal(weight.shape[0]) if make.size(0, 1) else None
    return Case((make.normal(make.size(1, 8), inner), weight, Epilogue(bias)), make.dtype, {"weight": weight})


def linear_hadamard(make: Maker) -> Case:
    """Many rows in bfloat16: with few, a kernel may compute `linear_int8`, and any may be rounded to bfloat16 first."""
    scheme = make.scheme()
    inner = math.lcm(scheme.block, 64) * make.size(1, 3)
    weight = make.weight(scheme, make.size(1, 70), inner)
    bias = make.normal(weight.shape[0]) if make.size(0, 1) else None
    x = make.normal(make.size(14, 50), inner).to(torch.bfloat16).to(make.dtype)
    return Case((x, weight, Epilogue(bias)), make.dtype, {"weight": weight}, provided=torch.bfloat16)


def linear_bf16(make: Maker) -> Case:
    """A kernel may also round block-quantized weights."""
    made = linear(make)
    return made if made.args[1].is_dense else replace(made, provided=torch.bfloat16)


def clear_winner(made: Case, make: Maker) -> Case:
    """Outputs so far apart that rounding does not change their order; in float64 any."""
    x, weight, _ = made.args
    bias = make.normal(weight.shape[0]) if make.dtype == torch.float64 else None
    if bias is None:
        steps = torch.randperm(weight.shape[0], generator=make.numbers).to(make.dtype)
        bias = steps * 64 * weight.shape[1]
    return replace(made, args=(x, weight, Epilogue(bias, best=True)))


def best_linear(make: Maker) -> Case:
    return clear_winner(linear(make), make)


def best_linear_bf16(make: Maker) -> Case:
    return clear_winner(linear_bf16(make), make)


def best_linear_int8(make: Maker) -> Case:
    return clear_winner(linear_int8(make), make)


def best_linear_hadamard(make: Maker) -> Case:
    return clear_winner(linear_hadamard(make), make)


def gated_linear(make: Maker) -> Case:
    scheme = make.scheme()
    inner = make.columns(scheme, 3 if scheme.block > 1 else 70)
    weight = make.weight(scheme, 2 * make.size(1, 40), inner)
    bias = make.normal(weight.shape[0]) if make.size(0, 1) else None
    x = make.normal(make.size(1, 20), inner)
    return Case((x, weight, Epilogue(bias, make.pick.choice(sorted(KINDS)))), make.dtype, {"weight": weight})


def unnormed(make: Maker, rows: int, inner: int) -> Unnormed:
    """`joined` is filled with NaN: the operation must overwrite it."""
    x, delta = make.normal(rows, inner), make.normal(rows, inner)
    return Unnormed(
        x, delta, make.normal(inner), 1e-5, make.pick.choice((0.0, 1.0)), torch.full((rows, inner), NAN, dtype=x.dtype)
    )


def normed_linear(make: Maker) -> Case:
    made = linear(make)
    x, *others = made.args
    return replace(made, args=(unnormed(make, x.numel() // x.shape[-1], x.shape[-1]), *others))


def normed_best_linear(make: Maker) -> Case:
    made = best_linear(make)
    x, *others = made.args
    return replace(made, args=(unnormed(make, x.numel() // x.shape[-1], x.shape[-1]), *others))


def normed_gated_linear(make: Maker) -> Case:
    made = gated_linear(make)
    x, *others = made.args
    return replace(made, args=(unnormed(make, *x.shape), *others))


def embedding(make: Maker) -> Case:
    scheme = make.scheme()
    inner = make.size(1, 90) if scheme.block == 1 else make.columns(scheme, 2)
    count = make.size(1, 50)
    table = make.weight(scheme, count, inner)
    scale = make.pick.choice((1.0, 5.5))
    return Case((make.ids(make.size(1, 40), count), table, make.dtype, scale), make.dtype, {"weight": table})


def rms_norm(make: Maker) -> Case:
    size = make.size(1, 130)
    lead = (make.size(1, 40),) if make.size(0, 1) else (make.size(1, 12), make.size(1, 9))
    offset = make.pick.choice((0.0, 1.0))
    return Case((make.normal(*lead, size), make.normal(size), make.pick.choice((1e-6, 1e-5)), offset), make.dtype)


def add(make: Maker) -> Case:
    shape = make.size(1, 40), make.size(1, 130)
    return Case((make.normal(*shape), make.normal(*shape)), make.dtype)


def add_rms_norm(make: Maker) -> Case:
    shape = make.size(1, 40), make.size(1, 130)
    offset = make.pick.choice((0.0, 1.0))
    return Case((make.normal(*shape), make.normal(*shape), make.normal(shape[1]), 1e-5, offset), make.dtype)


def layer_norm(make: Maker) -> Case:
    size = make.size(2, 130)
    return Case((make.normal(make.size(1, 40), size), make.normal(size), make.normal(size), 1e-5), make.dtype)


def activate(make: Maker) -> Case:
    kind = make.pick.choice(list(KINDS))
    return Case((make.normal(make.size(1, 40), make.size(1, 99)), kind), make.dtype)


def activate_mul(make: Maker) -> Case:
    kind = make.pick.choice(list(KINDS))
    shape = (make.size(1, 40), make.size(1, 99))
    return Case((make.normal(*shape), make.normal(*shape), kind), make.dtype)


def soft_cap(make: Maker) -> Case:
    return Case((make.normal(make.size(1, 40), make.size(1, 99)) * 40, make.pick.choice((1.5, 30.0))), make.dtype)


def rope_angles(make: Maker) -> Case:
    precise = torch.float64 if make.dtype == torch.float64 else torch.float32
    half = make.size(1, 64)
    frequencies = 1.0 / 10000 ** (torch.arange(half, dtype=precise) / half)
    return Case((make.ids(make.size(1, 40), 5000), frequencies, make.pick.choice((1.0, 1.19)), make.dtype), make.dtype)


def rotate(make: Maker) -> Case:
    tokens, half = make.size(1, 40), make.size(1, 32)
    size = 2 * half + make.pick.choice((0, 0, 7))
    angles = make.normal(tokens, half, dtype=torch.float64)
    x = make.normal(tokens, make.size(1, 9), size)
    return Case((x, angles.cos().to(make.dtype), angles.sin().to(make.dtype)), make.dtype)


def sequences(make: Maker, most: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """q_start and kv_len of one to five ragged sequences with at most `most` queries in total."""
    counts = [make.size(1, max(1, most // 5)) if make.size(0, 1) else 1 for _ in range(make.size(1, 5))]
    lengths = [count + make.pick.choice((0, make.size(0, 60))) for count in counts]
    return np.concatenate(([0], np.cumsum(counts))), np.array(lengths)


def paged(
    make: Maker, kv: int, size: int, values: int, window: int | None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, PagedMeta]:
    """Pages as the pools lay them out: strided frames in any order, filled with NaN where no sequence may read."""
    dtype = dtype or make.dtype
    page = make.pick.choice((1, 3, 16))
    q_start, kv_len = sequences(make)
    used = [-(-int(length) // page) for length in kv_len]
    order = list(range(1, sum(used) + 3))
    make.pick.shuffle(order)
    frames = torch.full((len(order) + 1, 2, page, kv * (size + values)), NAN, dtype=dtype)
    k_pages = frames[:, 1, :, : kv * size].unflatten(-1, (kv, size))
    v_pages = frames[:, 1, :, kv * size :].unflatten(-1, (kv, values))
    table = torch.zeros(len(kv_len), max(used), dtype=torch.long)
    slots = []
    for i, (count, length) in enumerate(zip(np.diff(q_start).tolist(), kv_len.tolist(), strict=True)):
        table[i, : used[i]] = torch.tensor([order.pop() for _ in range(used[i])])
        seen = 0 if window is None else max(0, length - count + 1 - window)
        # A page is free again once it has left every window: then it must not be read.
        live = range(seen // page * page, length)
        for at in live:
            frame = table[i, at // page]
            k_pages[frame, at % page] = torch.randn(kv, size, generator=make.numbers).to(dtype)
            v_pages[frame, at % page] = torch.randn(kv, values, generator=make.numbers).to(dtype)
        slots += [int(table[i, at // page]) * page + at % page for at in range(length - count, length)]
        table[i, : seen // page] = 0
    meta = PagedMeta(q_start, kv_len, table, torch.tensor(slots), page, on_device(q_start), on_device(kv_len))
    return k_pages, v_pages, meta


def trees(make: Maker, q_start: np.ndarray) -> Tensor:
    """Masks of random trees among the new tokens of some sequences, which have fewer than 64."""
    masks: list[int] = []
    for count in np.diff(q_start).tolist():
        paths = [1]
        for token in range(1, count):
            paths.append(paths[make.pick.choice((token - 1, make.size(0, token - 1)))] | 1 << token)
        masks += paths if make.size(0, 3) else [0] * count
    return torch.tensor(masks)


def on_device(counts: np.ndarray) -> Tensor:
    """Counts as GPU kernels read them."""
    return torch.from_numpy(counts.astype(np.int32))


def paged_attention(make: Maker, values: int | None = None) -> Case:
    kv, groups, size = make.size(1, 4), make.pick.choice((1, 1, 2, 3, 8)), make.pick.choice((1, 5, 16, 64))
    window, cap = make.pick.choice((None, None, 1, 7, 33)), make.pick.choice((None, 2.0, 50.0))
    heads = Heads(kv * groups, kv, size, make.pick.choice((size**-0.5, 0.3)), window, cap)
    in_pairs = () if size % 8 or values else (torch.uint8,)
    dtype = make.pick.choice((make.dtype, make.dtype, torch.bfloat16, torch.int8, torch.float8_e4m3fn, *in_pairs))
    floats = make.dtype if is_rounded(dtype) else dtype
    k_pages, v_pages, meta = paged(make, kv, size, size if values is None else values, window, floats)
    meta = replace(meta, ancestors=make.pick.choice((None, trees(make, meta.q_start))))
    scales: tuple[Tensor, ...] = ()
    if is_rounded(dtype):
        (k_pages, k_scales), (v_pages, v_scales) = rounded(make, k_pages, dtype), rounded(make, v_pages, dtype)
        scales = k_scales, v_scales
    q = make.normal(int(meta.q_start[-1]), heads.count, size)
    sinks = make.pick.choice((None, 3 * make.normal(heads.count, dtype=torch.float32)))
    args = (q, k_pages, v_pages, meta, heads.scale, window, cap, *(scales or (None, None)), sinks)
    # Over narrow pages a provider may multiply in bfloat16, as tiles do.
    provided = torch.bfloat16 if dtype is torch.bfloat16 or is_rounded(dtype) else None
    return Case(args, make.dtype, {"heads": heads, "pages": dtype}, provided=provided)


def attend(make: Maker) -> Case:
    kv, groups, size = make.size(1, 3), make.pick.choice((1, 2, 3, 4)), make.pick.choice((4, 16, 64))
    window, cap = make.pick.choice((None, None, 1, 7, 33)), make.pick.choice((None, None, 50.0))
    heads = Heads(kv * groups, kv, size, size**-0.5, window, cap)
    k_pages, v_pages, meta = paged(make, kv, size, size, window)
    meta = replace(meta, ancestors=make.pick.choice((None, trees(make, meta.q_start))))
    tokens = int(meta.q_start[-1])
    # As a stacked projection leaves them: adjacent in one row.
    q, k, v = make.normal(tokens, kv * (groups + 2), size).split((kv * groups, kv, kv), 1)
    turns = make.normal(tokens, make.pick.choice((size // 2, size // 4)), dtype=torch.float64)
    angles = make.pick.choice((None, (turns.cos().to(make.dtype), turns.sin().to(make.dtype))))
    norms = HeadNorms(make.normal(size), make.normal(size), 1e-5, make.pick.choice((0.0, 1.0)))
    rest = (make.pick.choice((None, norms)), heads.scale, window, cap)
    sinks = make.pick.choice((None, 3 * make.normal(heads.count, dtype=torch.float32)))
    args = (q, k, v, k_pages, v_pages, meta, angles, *rest, sinks)
    return Case(args, make.dtype, {"heads": heads, "pages": make.dtype}, written=(3, 4))


def rounded(make: Maker, pages: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Codes and scales instead of values; NaN values become NaN scales."""
    stored = pages.shape[-1] // (2 if dtype is torch.uint8 else 1)
    codes = torch.empty(*pages.shape[:-1], stored + 3, dtype=torch.int8)[..., 1:-2]
    codes.random_(-127, 128, generator=make.numbers)
    scales = torch.rand(pages.shape[:-1], generator=make.numbers).add(0.5).div(64)
    if dtype is torch.uint8:
        groups = pages.shape[-1] // int4_group(pages.shape[-1])
        scales = (8 * scales).unsqueeze(-1).repeat(*[1] * scales.dim(), groups).to(torch.bfloat16)
        return codes.view(dtype), scales.masked_fill(pages.isnan().any(-1, keepdim=True), NAN)
    if dtype is not torch.int8:
        codes[(codes == 127) | (codes == -1)] = 1  # the codes of NaN, which are never written
        codes, scales = codes.view(dtype), scales / 4
    return codes, scales.masked_fill(pages.isnan().any(-1), NAN)


def write_pages(make: Maker) -> Case:
    kv, size = make.size(1, 4), make.size(1, 33)
    k_pages, _, meta = paged(make, kv, size, size, None)
    return Case((make.normal(len(meta.slots), kv, size), k_pages, meta.slots), make.dtype, written=(1,))


def move_tokens(make: Maker) -> Case:
    """Rows whose accepted drafts move to the front, in frames with segments of several sizes."""
    page, rows, drafts = make.pick.choice((1, 3, 16)), make.size(1, 4), make.size(1, 9)
    sizes = [make.pick.choice((2, 4, 6, 64, 130)) for _ in range(make.size(1, 4))]
    firsts = np.cumsum([0, *(size * page for size in sizes)]).tolist()
    pages = 1 + rows * -(-(drafts + 5) // page)
    shape = (pages, firsts[-1] + make.pick.choice((0, 6)))
    frames = torch.randint(0, 256, shape, dtype=torch.uint8, generator=make.numbers)
    order = list(range(1, pages))
    make.pick.shuffle(order)
    table = torch.tensor(order).view(rows, -1)
    places = torch.zeros(2, rows, drafts, dtype=torch.long)
    for row in range(rows):
        begin, path = make.size(0, 5), sorted(make.pick.sample(range(drafts), make.size(0, drafts)))
        for move, pair in enumerate(zip(path, range(len(path)), strict=True)):
            for side, node in enumerate(pair):
                places[side, row, move] = table[row, (begin + node) // page] * page + (begin + node) % page
    segments = tuple(zip(firsts[:-1], sizes, strict=True))
    return Case((frames, segments, page, places[0], places[1]), make.dtype, written=(0,))


def write_pages_int8(make: Maker) -> Case:
    """New values of many magnitudes, occasionally only zeros."""
    kv, size = make.size(1, 4), make.size(1, 33)
    k_pages, _, meta = paged(make, kv, size, size, None)
    new = make.normal(len(meta.slots), kv, size) * 10.0 ** make.size(-6, 6)
    new[make.size(0, len(new) - 1)] *= make.pick.choice((0, 1))
    return Case((new, *rounded(make, k_pages), meta.slots), make.dtype, {"pages": torch.int8}, written=(1, 2))


def write_pages_fp8(make: Maker) -> Case:
    """The same, with or without scales of a checkpoint."""
    made = write_pages_int8(make)
    new, codes, scales, slots = made.args
    fixed = make.pick.choice((None, make.normal(new.shape[1], dtype=torch.float32).abs() + 0.1))
    facts = {"pages": torch.float8_e4m3fn, "fixed": fixed is not None}
    return Case((new, codes.view(torch.float8_e4m3fn), scales, slots, fixed), make.dtype, facts, written=(1, 2))


def write_pages_int4(make: Maker) -> Case:
    kv, size = make.size(1, 4), make.pick.choice((8, 32, 48, 96))
    k_pages, _, meta = paged(make, kv, size, size, None)
    new = make.normal(len(meta.slots), kv, size) * 10.0 ** make.size(-6, 6)
    new[make.size(0, len(new) - 1)] *= make.pick.choice((0, 1))
    codes, scales = rounded(make, k_pages, torch.uint8)
    return Case((new, codes, scales, meta.slots), make.dtype, {"pages": torch.uint8}, written=(1, 2))


def recurrent(make: Maker) -> tuple[RecurrentMeta, int]:
    """Reads any slot, including slot 0 (the state before the first token); writes other slots; keeps several states."""
    counts = [make.size(1, 9) if make.size(0, 1) else 1 for _ in range(make.size(1, 4))]
    kept = [make.size(1, min(count, 4)) for count in counts]
    slots = 2 + len(counts) + sum(kept)
    places = list(range(1, slots))
    make.pick.shuffle(places)
    read = [make.pick.choice((0, places.pop())) for _ in counts]
    write = [[places.pop() for _ in range(k)] + [0] * (max(kept) - k) for k in kept]
    q_start = np.concatenate(([0], np.cumsum(counts)))
    meta = RecurrentMeta(
        q_start, np.array(kept), torch.tensor(read), torch.tensor(write), on_device(q_start), on_device(np.array(kept))
    )
    return meta, slots


def causal_conv(make: Maker) -> Case:
    meta, slots = recurrent(make)
    channels, width = make.size(1, 40), make.size(2, 5)
    # A slot has the dtype of the recurrent state, independent of the activations.
    state = make.state(slots, channels, width - 1)
    bias = make.normal(channels) if make.size(0, 1) else None
    x = make.normal(int(meta.q_start[-1]), channels)
    return Case((x, make.normal(channels, width), bias, state, meta), make.dtype, written=(3,))


def selective_scan(make: Maker) -> Case:
    meta, slots = recurrent(make)
    tokens, channels, size = int(meta.q_start[-1]), make.size(1, 40), make.pick.choice((1, 5, 16))
    wide = torch.promote_types(make.dtype, torch.float32)
    state = make.state(slots, channels, size)
    delta = torch.nn.functional.softplus(make.normal(tokens, channels))
    a = -make.normal(channels, size, dtype=wide).exp()
    b, c = make.normal(tokens, size), make.normal(tokens, size)
    x, d = make.normal(tokens, channels), make.normal(channels, dtype=wide)
    return Case((x, delta, a, b, c, d, state, meta), make.dtype, written=(6,))


def causal_conv_silu(make: Maker) -> Case:
    return causal_conv(make)


def scale_columns(make: Maker) -> Case:
    columns = make.size(1, 130)
    return Case((make.normal(make.size(1, 40), columns), make.normal(columns)), make.dtype)


def gather_columns(make: Maker) -> Case:
    """Rows may be columns of wider ones."""
    inner, wider = make.size(1, 130), make.size(0, 3)
    x = make.normal(make.size(1, 40), inner + wider)[:, :inner]
    order = torch.randperm(inner, generator=torch.Generator().manual_seed(inner)).to(torch.int32)
    return Case((x, order), make.dtype)


def ssd_scan(make: Maker) -> Case:
    """Operands are columns of wider rows, as a layer gets them."""
    meta, slots = recurrent(make)
    groups, per_group = make.pick.choice((1, 2, 3)), make.pick.choice((1, 2, 4))
    tokens, heads = int(meta.q_start[-1]), groups * per_group
    size, n = make.pick.choice((1, 4, 10, 16)), make.pick.choice((1, 5, 16, 20))
    wide = torch.promote_types(make.dtype, torch.float32)
    whole = make.normal(tokens, heads * size + 2 * groups * n + heads)
    x, b, c, dt = whole.split((heads * size, groups * n, groups * n, heads), dim=1)
    b, c = (part.unflatten(1, (groups, n)) for part in (b, c))
    a, d, bias = -make.normal(heads, dtype=wide).exp(), make.normal(heads, dtype=wide), make.normal(heads, dtype=wide)
    limits = make.pick.choice(((0.0, math.inf), (0.1, 1.5)))
    state = make.state(slots, heads, size, n)
    args = (x.unflatten(1, (heads, size)), dt, a, b, c, d, bias, limits, state, meta)
    return Case(args, make.dtype, written=(8,))


def gated_rms_norm(make: Maker) -> Case:
    groups, part = make.pick.choice((1, 2, 3)), make.size(3, 50)
    tokens, columns = make.size(1, 40), groups * part
    whole = make.normal(tokens, columns + 7)
    gate = whole[:, :columns]
    args = (make.normal(tokens, columns), gate, make.normal(columns), 1e-5, groups, bool(make.size(0, 1)))
    return Case(args, make.dtype)


def diagonal_scan(make: Maker) -> Case:
    meta, slots = recurrent(make)
    tokens, channels, pairs = int(meta.q_start[-1]), make.size(1, 40), make.pick.choice((1, 3, 8, 20))
    wide = torch.promote_types(make.dtype, torch.float32)
    size = torch.sigmoid(make.normal(pairs, channels, dtype=wide))
    turn = make.normal(pairs, channels, dtype=wide)
    decay = torch.stack((size * turn.cos(), size * turn.sin()))
    out = make.normal(2, pairs, channels, dtype=wide)
    x, d = make.normal(tokens, channels), make.normal(channels, dtype=wide)
    return Case((x, decay, out, d, make.state(slots, 2, pairs, channels), meta), make.dtype, written=(4,))


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function
    for function in (
        linear,
        linear_bf16,
        linear_int8,
        linear_hadamard,
        best_linear,
        best_linear_bf16,
        best_linear_int8,
        best_linear_hadamard,
        gated_linear,
        normed_linear,
        normed_best_linear,
        normed_gated_linear,
        embedding,
        rms_norm,
        add,
        attend,
        add_rms_norm,
        layer_norm,
        activate,
        activate_mul,
        soft_cap,
        rope_angles,
        rotate,
        paged_attention,
        move_tokens,
        write_pages,
        write_pages_int8,
        write_pages_fp8,
        write_pages_int4,
        causal_conv,
        causal_conv_silu,
        selective_scan,
        gather_columns,
        scale_columns,
        ssd_scan,
        gated_rms_norm,
        diagonal_scan,
    )
}


def case(name: str, seed: int, dtype: torch.dtype | None = None) -> Case:
    made = GENERATORS[name](Maker(seed, dtype))
    made.facts = {"dtype": made.dtype, **fused_in(made.args), **made.facts}
    return made


from tests.ops import (  # noqa: E402  (last: they use what stands above)
    cases_collectives,
    cases_experts,
    cases_latent,
    cases_linear,
    cases_outliers,
    cases_partial,
    cases_ranks,
    cases_w8a8,
)

for more in (
    cases_collectives,
    cases_experts,
    cases_latent,
    cases_linear,
    cases_outliers,
    cases_partial,
    cases_ranks,
    cases_w8a8,
):
    GENERATORS |= more.GENERATORS
