"""Generated inputs for partial attention, and for the exchange of its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tests.ops import cases
from tests.ops.cases import Case, Maker
from tests.ops.cases_collectives import group


def exchange_parts(make: Maker) -> Case:
    ranks = group(make)
    return Case((make.normal(ranks.size, make.size(1, 9), make.size(1, 40)), ranks), make.dtype)


def partial_attention(make: Maker) -> Case:
    """Each query sees at least the keys of its own page: a result without keys is `tests/parallel/test_merge.py`'s."""
    made = cases.paged_attention(make)
    q, k_pages, v_pages, meta, scale, window, cap, k_scales, v_scales, _ = made.args
    table = meta.pages.clone()
    for i, count in enumerate((meta.q_start[1:] - meta.q_start[:-1]).tolist()):
        old = (int(meta.kv_len[i]) - count) // meta.page_tokens
        gone = torch.rand(old, generator=make.numbers) < 0.5
        table[i, :old][gone] = -1
    latent = made.facts["pages"] is make.dtype and bool(make.size(0, 2) == 0)
    values = make.size(1, q.shape[2]) if latent else v_pages
    rest = (make.size(1, 4), scale, window, cap, k_scales, v_scales)
    return Case((q, k_pages, values, replace(meta, pages=table), *rest), make.dtype, made.facts, provided=made.provided)


def merge_partials(make: Maker) -> Case:
    tokens, heads = make.size(1, 9), make.size(1, 6)
    dtype = torch.promote_types(make.dtype, torch.float32)
    parts = 2 * make.normal(make.size(1, 4), tokens, heads, make.size(2, 20), dtype=dtype)
    sinks = make.pick.choice((None, 3 * make.normal(heads, dtype=torch.float32)))
    return Case((parts, make.dtype, sinks), make.dtype)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function for function in (exchange_parts, partial_attention, merge_partials)
}
