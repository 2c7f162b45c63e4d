"""The kernel of paged attention on the tape; see native/tape/forms.py."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.attention.body import PagedMeta
from bankfull.ops.attention.native import PAGES, page_strides, storable, window_and_mask
from bankfull.ops.native.tape.forms import Outputs, floats, form, is_float
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.pages.rounded import head_numbers
from bankfull.state.mask import Sight


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
    if not is_float(q) or not (storable(k_pages, k_scales) and storable(v_pages, v_scales)):
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
            "sinks": floats(sinks),
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
