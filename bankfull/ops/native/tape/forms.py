"""The kernels of each operation. A form records them and returns True, or False where only the torch body computes it.

The providers' `accepts` has checked types and layouts of weights before, when the operation was bound.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.ops.native.activation import CODES
from bankfull.ops.native.attention import PAGES, page_strides, storable, window_and_mask
from bankfull.ops.native.linear import FORMATS, storage_of
from bankfull.ops.native.tape.instruction import Fixed, Operand
from bankfull.ops.native.tape.record import TOKENS, Recorder
from bankfull.ops.reference.attention import PagedMeta
from bankfull.ops.reference.rounded_pages import ROUNDED, head_numbers
from bankfull.ops.reference.ssm import RecurrentMeta
from bankfull.state.mask import Sight
from bankfull.weights.qtensor import QTensor

Outputs = tuple[Tensor, ...]
Form = Callable[..., bool]
FORMS: dict[str, Form] = {}


def form(function: Form) -> Form:
    FORMS[function.__name__] = function
    return function


def _floats(tensor: Tensor | None) -> Fixed | None:
    """A weight in float32, as the kernel reads it."""
    return None if tensor is None else Fixed(tensor.to(torch.float32).contiguous())


def _is_float(*tensors: Tensor) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)


@form
def embedding(rec: Recorder, out: Outputs, ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> bool:
    if dtype is not torch.float32:
        return False
    code, block, block_bytes = FORMATS[table.scheme.name]
    rec.emit(
        "embedding",
        {"ids": rec.operand(ids), "table": Fixed(storage_of(table))},
        {"y": rec.view(out[0])},
        format=code,
        count=table.shape[0],
        columns=table.shape[1],
        row_bytes=table.shape[1] // block * block_bytes,
        scale=scale,
    )
    return True


@form
def rope_angles(
    rec: Recorder, out: Outputs, positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> bool:
    if dtype is not torch.float32 or frequencies.dtype is not torch.float32:
        return False
    rec.emit(
        "angles",
        {"positions": rec.operand(positions), "frequencies": _floats(frequencies)},
        {"cos": rec.view(out[0]), "sin": rec.view(out[1])},
        half=frequencies.shape[0],
        scale=scale,
    )
    return True


def _norm(
    rec: Recorder,
    x: Tensor,
    delta: Tensor | None,
    joined: Tensor | None,
    y: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
) -> bool:
    places = [None if t is None else rec.dense(t) for t in (x, delta, joined, y)]
    if places[0] is None or (delta is not None and places[1] is None) or not _is_float(x):
        return False
    rec.emit(
        "norm",
        {"x": places[0], "delta": places[1], "weight": _floats(weight)},
        {"joined": places[2], "y": places[3], "encoded": None},
        per_token=x.numel() // TOKENS // weight.shape[0],
        columns=weight.shape[0],
        eps=eps,
        offset=offset,
    )
    return True


@form
def rms_norm(rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> bool:
    return _norm(rec, x, None, None, out[0], weight, eps, offset)


@form
def add_rms_norm(
    rec: Recorder, out: Outputs, x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> bool:
    return _norm(rec, x, delta, out[0], out[1], weight, eps, offset)


@form
def layer_norm(rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    place = rec.dense(x)
    if place is None or not _is_float(x):
        return False
    columns = weight.shape[0]
    rec.emit(
        "layer_norm",
        {"x": place, "weight": _floats(weight), "bias": _floats(bias)},
        {"y": rec.view(out[0])},
        per_token=x.numel() // TOKENS // columns,
        columns=columns,
        eps=eps,
    )
    return True


def _pointwise(
    rec: Recorder,
    y: Tensor,
    code: int | None,
    x: Tensor,
    factor: Tensor | None = None,
    parameter: float = 0.0,
    label: str = "pointwise",
) -> bool:
    places = [rec.dense(x), None if factor is None else rec.dense(factor)]
    if code is None or not _is_float(x) or places[0] is None or (factor is not None and places[1] is None):
        return False
    if factor is not None and factor.shape != x.shape:
        return False
    rec.emit(
        "pointwise",
        {"x": places[0], "factor": places[1]},
        {"y": rec.view(y)},
        label=label,
        kind=code,
        per_token=x.numel() // TOKENS,
        parameter=parameter,
    )
    return True


@form
def activate(rec: Recorder, out: Outputs, x: Tensor, kind: str) -> bool:
    return _pointwise(rec, out[0], CODES.get(kind), x)


@form
def activate_mul(rec: Recorder, out: Outputs, gate: Tensor, up: Tensor, kind: str) -> bool:
    return _pointwise(rec, out[0], CODES.get(kind), gate, up)


@form
def soft_cap(rec: Recorder, out: Outputs, x: Tensor, cap: float) -> bool:
    return _pointwise(rec, out[0], CODES["soft_cap"], x, parameter=cap)


@form
def add(rec: Recorder, out: Outputs, x: Tensor, delta: Tensor) -> bool:
    return _is_float(delta) and _pointwise(rec, out[0], CODES["plus"], x, delta, label="add")


@form
def rotate(rec: Recorder, out: Outputs, x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    place = rec.dense(x)
    if place is None or not _is_float(x):
        return False
    _, heads, size = x.shape
    rec.emit(
        "rotate",
        {"x": place, "cos": rec.view(cos), "sin": rec.view(sin)},
        {"y": rec.view(out[0])},
        heads=heads,
        size=size,
        half=cos.shape[1],
    )
    return True


def _write(rec: Recorder, new: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor) -> bool:
    if not storable(pages, scales) or not _is_float(new):
        return False
    place = rec.view(new)
    frames, page_tokens, heads, _ = pages.shape
    rec.emit(
        "write",
        {"rows": place, "slots": rec.operand(slots)},
        {"pages": Fixed(pages), "scales": None if scales is None else Fixed(scales)},
        row_stride=place.stride // 4,
        heads=heads,
        size=head_numbers(pages),
        strides=page_strides(pages, scales),
        frames=frames,
        page_tokens=page_tokens,
        type=PAGES[pages.dtype],
    )
    return True


@form
def write_pages(rec: Recorder, out: Outputs, new: Tensor, pages: Tensor, slots: Tensor) -> bool:
    return _write(rec, new, pages, None, slots)


def _write_rounded(rec: Recorder, out: Outputs, *args: Tensor) -> bool:
    return len(args) == 4 and _write(rec, *args)  # not with scales of a checkpoint


FORMS |= {f"write_pages_{name}": _write_rounded for name in ROUNDED}


@form
def paged_attention(
    rec: Recorder,
    out: Outputs,
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: Sight = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> bool:
    if not _is_float(q) or not (storable(k_pages, k_scales) and storable(v_pages, v_scales)):
        return False
    place = rec.view(q)
    _, heads, size = q.shape
    near, mask = window_and_mask(window)
    rec.emit(
        "attention",
        {
            "q": place,
            "k_pages": Fixed(k_pages),
            "v_pages": Fixed(v_pages),
            "k_scales": None if k_scales is None else Fixed(k_scales),
            "v_scales": None if v_scales is None else Fixed(v_scales),
            "q_start": rec.operand(meta.q_start),
            "kv_len": rec.operand(meta.kv_len),
            "ancestors": None if meta.ancestors is None else rec.operand(meta.ancestors),
            "table": rec.operand(meta.pages),
            "sinks": _floats(sinks),
        },
        {"y": rec.view(out[0]), "encoded": None},
        q_token=place.stride // 4,
        k_strides=page_strides(k_pages, k_scales),
        v_strides=page_strides(v_pages, v_scales),
        frames=k_pages.shape[0],
        page_tokens=k_pages.shape[1],
        heads=heads,
        kv_heads=k_pages.shape[2],
        size=size,
        values=head_numbers(v_pages),
        window=near,
        mask=mask,
        block=meta.block,
        scale=scale,
        cap=cap or 0.0,
        type=PAGES[k_pages.dtype],
    )
    return True


def _recurrent(rec: Recorder, meta: RecurrentMeta) -> dict[str, Operand | None]:
    return {
        "q_start": rec.operand(meta.q_start),
        "kept": rec.operand(meta.kept),
        "read": rec.operand(meta.read),
        "write": rec.operand(meta.write),
    }


def _convolve(
    rec: Recorder,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    meta: RecurrentMeta,
    silu: bool,
) -> bool:
    if not _is_float(x, state) or not state.is_contiguous():
        return False
    place = rec.view(x)
    rec.emit(
        "conv",
        {"x": place, "weight": _floats(weight), "bias": _floats(bias), **_recurrent(rec, meta)},
        {"y": rec.view(y), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        width=weight.shape[1],
        x_token=place.stride // 4,
        silu=silu,
    )
    return True


@form
def causal_conv(
    rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> bool:
    return _convolve(rec, out[0], x, weight, bias, state, meta, False)


@form
def causal_conv_silu(
    rec: Recorder, out: Outputs, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> bool:
    return _convolve(rec, out[0], x, weight, bias, state, meta, True)


@form
def selective_scan(
    rec: Recorder,
    out: Outputs,
    x: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> bool:
    places = [rec.dense(x), rec.dense(delta)]
    if None in places or not _is_float(x, delta, b, c, state) or not state.is_contiguous():
        return False
    into, read_out = rec.view(b), rec.view(c)
    reads = {
        "x": places[0],
        "delta": places[1],
        "a": _floats(a),
        "b": into,
        "c": read_out,
        "d": _floats(d),
        **_recurrent(rec, meta),
    }
    rec.emit(
        "scan",
        reads,
        {"y": rec.view(out[0]), "state": Fixed(state)},
        slots=state.shape[0],
        channels=x.shape[1],
        size=a.shape[1],
        b_token=into.stride // 4,
        c_token=read_out.stride // 4,
    )
    return True


from bankfull.ops.native.tape import forms_experts as _experts  # noqa: E402, F401  (last: it uses what stands above)
