"""The kernels of latent attention on the tape; see native/tape/forms.py."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.native import PAGES, page_strides, storable
from bankfull.ops.attention.tape import paged_attention
from bankfull.ops.latent.body import HeadWeights
from bankfull.ops.latent.native import strides_of
from bankfull.ops.native.tape.forms import Outputs, floats, form
from bankfull.ops.native.tape.instruction import Fixed, Instruction
from bankfull.ops.native.tape.record import Recorder


@form
def latent_attention(
    rec: Recorder,
    out: Outputs,
    q: Tensor,
    pages: Tensor,
    rank: int,
    meta: PagedMeta,
    scale: float,
    window: int | None = None,
) -> bool:
    if not paged_attention(rec, out, q, pages, pages[..., :rank], meta, scale, window):
        return False
    node = rec.nodes[-1]
    assert isinstance(node, Instruction)
    node.label = "latent"
    return True


def _products(
    rec: Recorder, label: str, x: Tensor, y: Tensor, weight: HeadWeights, angles: tuple[Tensor, Tensor] | None
) -> bool:
    layout = strides_of(weight)
    if layout is None or x.dtype is not torch.float32:
        return False
    numbers, by_head, by_column, by_output = layout
    place, result = rec.view(x), rec.view(y)
    rec.emit(
        "head_products",
        {
            "x": place,
            "weight": Fixed(numbers),
            "cos": None if angles is None else rec.view(angles[0]),
            "sin": None if angles is None else rec.view(angles[1]),
        },
        {"y": result},
        label,
        heads=weight.heads,
        columns=weight.columns,
        outputs=weight.outputs,
        half=0 if angles is None else angles[0].shape[1],
        x_token=place.stride // 4,
        x_head=x.shape[2],
        y_token=result.stride // 4,
        y_head=y.shape[2],
        w_head=by_head,
        w_column=by_column,
        w_output=by_output,
        narrow=numbers.dtype is torch.bfloat16,
    )
    return True


@form
def head_products(rec: Recorder, out: Outputs, x: Tensor, weight: HeadWeights) -> bool:
    return _products(rec, "head_products", x, out[0], weight, None)


@form
def absorb_queries(rec: Recorder, out: Outputs, q: Tensor, cos: Tensor, sin: Tensor, weight: HeadWeights) -> bool:
    return _products(rec, "absorb", q, out[0], weight, (cos, sin))


@form
def write_latents(
    rec: Recorder,
    out: Outputs,
    kv: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pages: Tensor,
    slots: Tensor,
) -> bool:
    if kv.dtype is not torch.float32 or not storable(pages, None):
        return False
    place = rec.view(kv)
    rec.emit(
        "latents",
        {
            "x": place,
            "weight": floats(weight),
            "cos": rec.view(cos),
            "sin": rec.view(sin),
            "slots": rec.operand(slots),
        },
        {"pages": Fixed(pages), "scales": None},
        x_token=place.stride // 4,
        rank=weight.shape[0],
        half=cos.shape[1],
        strides=page_strides(pages, None),
        frames=pages.shape[0],
        page_tokens=pages.shape[1],
        eps=eps,
        type=PAGES[pages.dtype],
    )
    return True
