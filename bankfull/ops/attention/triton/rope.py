"""New queries and keys: norm, RoPE and KV page writes in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import HeadNorms
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs

NUMBERS = 4096
"""Elements per program: 32 for each thread, to keep enough loads in flight."""


@triton.jit
def normed(x, inverse, weight, dims, inside, offset, SHIFTED: tl.constexpr, KIND: tl.constexpr):
    """x / rms(x) * weight, rounded as in the body of `rms_norm`."""
    own = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        return (x * inverse[:, None] * (offset + own)).to(KIND).to(tl.float32)
    return ((x * inverse[:, None]).to(KIND).to(tl.float32) * own).to(KIND).to(tl.float32)


@triton.jit
def normed_and_rotated(
    rows,
    inside,
    tokens,
    weight,
    cos,
    sin,
    cos_token,
    sin_token,
    eps,
    offset,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Heads at the pointers `rows` after norm (if there is a weight) and RoPE (if there are angles), in their own
    dtype.
    Each dimension's partner is loaded a second time: it comes from the cache, and avoids a shuffle between threads."""
    dims = tl.arange(0, PADDED)
    x = tl.load(rows[:, None] + dims[None, :], mask=inside[:, None] & (dims < SIZE)[None, :], other=0.0)
    KIND: tl.constexpr = x.dtype
    if weight is None and cos is None:
        return x
    x = x.to(tl.float32)
    y = x
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
        y = normed(x, inverse, weight, dims, dims < SIZE, offset, SHIFTED, KIND)
    if cos is not None:
        rotating = dims < 2 * HALF
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        other = tl.load(rows[:, None] + partner[None, :], mask=inside[:, None] & rotating[None, :], other=0.0)
        other = other.to(tl.float32)
        if weight is not None:
            other = normed(other, inverse, weight, partner, rotating, offset, SHIFTED, KIND)
        angle = dims % HALF
        met = inside[:, None] & rotating[None, :]
        c = tl.load(cos + tokens[:, None] * cos_token + angle[None, :], mask=met, other=1.0).to(tl.float32)
        s = tl.load(sin + tokens[:, None] * sin_token + angle[None, :], mask=met, other=0.0).to(tl.float32)
        y = y * c + tl.where(dims < HALF, -1.0, 1.0)[None, :] * other * s
    return y.to(KIND)


@triton.jit(do_not_specialize=["count"])
def rotate_and_write(
    q,
    k,
    v,
    rotated_q,
    rotated_k,
    k_pages,
    v_pages,
    slots,
    cos,
    sin,
    q_weight,
    k_weight,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    rotated_token,
    k_frame,
    k_place,
    k_page_head,
    v_frame,
    v_place,
    v_page_head,
    cos_token,
    sin_token,
    count,
    eps,
    offset,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr,
    HALF: tl.constexpr,
    SHIFTED: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (head, tokens): HEADS query heads (0 if queries stay unchanged), then keys, then values. Keys are also
    stored to `rotated_k` if it is given."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    dims = tl.arange(0, PADDED)
    # Triton gives a name one type in all branches; queries, keys and values may differ in dtype and size.
    if head < HEADS:
        query = normed_and_rotated(
            q + token * q_token + head * q_head,
            inside,
            token,
            q_weight,
            cos,
            sin,
            cos_token,
            sin_token,
            eps,
            offset,
            SIZE,
            PADDED,
            HALF,
            SHIFTED,
        )
        query_places = rotated_q + (token * rotated_token + head * SIZE)[:, None] + dims[None, :]
        tl.store(query_places, query, mask=inside[:, None] & (dims < SIZE)[None, :])
    else:
        slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
        frame, place = slot // PAGE, slot % PAGE
        if head < HEADS + KEY_HEADS:
            own = head - HEADS
            key = normed_and_rotated(
                k + token * k_token + own * k_head,
                inside,
                token,
                k_weight,
                cos,
                sin,
                cos_token,
                sin_token,
                eps,
                offset,
                SIZE,
                PADDED,
                HALF,
                SHIFTED,
            )
            key_places = k_pages + (frame * k_frame + place * k_place + own * k_page_head)[:, None] + dims[None, :]
            tl.store(key_places, key.to(k_pages.dtype.element_ty), mask=inside[:, None] & (dims < SIZE)[None, :])
            if rotated_k is not None:
                key_places = rotated_k + ((token * KEY_HEADS + own) * SIZE)[:, None] + dims[None, :]
                tl.store(key_places, key, mask=inside[:, None] & (dims < SIZE)[None, :])
        else:
            own = head - HEADS - KEY_HEADS
            numbers = tl.arange(0, PADDED_VALUES)
            met = inside[:, None] & (numbers < VALUES)[None, :]
            value = tl.load(v + (token * v_token + own * v_head)[:, None] + numbers[None, :], mask=met, other=0.0)
            value_places = v_pages + (frame * v_frame + place * v_place + own * v_page_head)[:, None] + numbers[None, :]
            tl.store(value_places, value.to(v_pages.dtype.element_ty), mask=met)


def launch_rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The final queries, and the final keys (only with `keep`); keys and values are written to their pages."""
    count, heads, size = q.shape
    key_heads, values = v.shape[1:]
    changes = angles is not None or norms is not None
    rotated = torch.empty((count, heads, size), dtype=q.dtype, device=q.device) if changes else q
    rotated_keys = torch.empty((count, key_heads, size), dtype=k.dtype, device=k.device) if changes and keep else None
    cos, sin = angles or (None, None)
    padded, padded_values = (max(16, power_of_two(n)) for n in (size, values))
    tokens = NUMBERS // max(padded, padded_values)
    rotate_and_write[((heads if changes else 0) + 2 * key_heads, triton.cdiv(count, tokens))](
        q,
        k,
        v,
        rotated,
        rotated_keys,
        k_pages,
        v_pages,
        slots,
        cos,
        sin,
        norms and norms.q,
        norms and norms.k,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        rotated.stride(0),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        count,
        norms.eps if norms else 0.0,
        norms.offset if norms else 0.0,
        heads if changes else 0,
        key_heads,
        size,
        values,
        padded,
        padded_values,
        1 if cos is None else cos.shape[1],
        bool(norms and norms.offset),
        k_pages.shape[1],
        tokens,
        num_warps=4,
        **overlapped(q),
    )
    return rotated, k if rotated_keys is None else rotated_keys
