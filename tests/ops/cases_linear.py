"""Generated inputs for linear attention and the delta rule."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.ops.cases import Case, Maker, recurrent


def taylor_features(make: Maker) -> Case:
    return Case((make.normal(make.size(1, 9), make.size(1, 4), make.pick.choice((1, 3, 8, 16))),), make.dtype)


def linear_attention(make: Maker) -> Case:
    meta, slots = recurrent(make)
    tokens, heads = int(meta.q_start[-1]), make.size(1, 4)
    normalized = bool(make.size(0, 1))
    # A normalized head with one feature does not depend on its query.
    key, value = make.pick.choice((2 if normalized else 1, 5, 16, 33)), make.pick.choice((1, 7, 16, 40))
    wide = torch.promote_types(make.dtype, torch.float32)
    q, k, v = make.normal(tokens, heads, key), make.normal(tokens, heads, key), make.normal(tokens, heads, value)
    slopes = make.normal(heads, dtype=wide).abs() * 0.3
    state = make.state(slots, heads, key, value)
    if not normalized:
        return Case((q, k, v, slopes, state, None, meta), make.dtype, written=(4,))
    # Positive features, as those of a Taylor expansion: the sum that divides stays away from zero.
    q, k, normalizer = q.abs() + 0.5, k.abs() + 0.5, make.state(slots, heads, key).abs() + 0.5
    return Case((q, k, v, slopes, state, normalizer, meta), make.dtype, written=(4, 5))


def delta_rule(make: Maker) -> Case:
    meta, slots = recurrent(make)
    tokens, key_heads, shared = int(meta.q_start[-1]), make.size(1, 3), make.size(1, 3)
    heads, key, value = key_heads * shared, make.pick.choice((2, 5, 16, 33)), make.pick.choice((1, 7, 16, 40))
    wide = torch.promote_types(make.dtype, torch.float32)
    q, k = make.normal(tokens, key_heads, key), make.normal(tokens, key_heads, key)
    v, a, b = make.normal(tokens, heads, value), make.normal(tokens, heads), make.normal(tokens, heads)
    rate, shift = -make.normal(heads, dtype=wide).exp(), make.normal(heads, dtype=wide)
    return Case((q, k, v, a, b, rate, shift, make.state(slots, heads, key, value), meta), make.dtype, written=(7,))


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function for function in (taylor_features, linear_attention, delta_rule)
}
