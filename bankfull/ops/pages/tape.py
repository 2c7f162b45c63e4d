"""The kernels of page writes on the tape; see native/tape/forms.py."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.attention.native import PAGES, page_strides, storable
from bankfull.ops.native.tape.forms import FORMS, Outputs, form, is_float
from bankfull.ops.native.tape.instruction import Fixed
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.pages.rounded import ROUNDED, head_numbers


def _write(rec: Recorder, new: Tensor, pages: Tensor, scales: Tensor | None, slots: Tensor) -> bool:
    if not storable(pages, scales) or not is_float(new):
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
