"""The kernel of latent attention on the tape; see forms.py."""

from __future__ import annotations

from torch import Tensor

from bankfull.ops.native.tape import forms
from bankfull.ops.native.tape.forms import Outputs, form
from bankfull.ops.native.tape.instruction import Instruction
from bankfull.ops.native.tape.record import Recorder
from bankfull.ops.reference.attention import PagedMeta


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
    if not forms.paged_attention(rec, out, q, pages, pages[..., :rank], meta, scale, window):
        return False
    node = rec.nodes[-1]
    assert isinstance(node, Instruction)
    node.label = "latent"
    return True
