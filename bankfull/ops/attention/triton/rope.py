"""New queries and keys: norm, RoPE and KV page writes in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.attention.body import HeadNorms
from bankfull.ops.attention.triton.head_tile import HeadTile
from bankfull.ops.pages.side import Cache
from bankfull.ops.triton.launch import cdiv, overlapped, start_next, wait_for_inputs
from bankfull.ops.triton.rows import HeadRows, contiguous_rows

NUMBERS = 4096
"""Elements per program: 32 for each thread, to keep enough loads in flight."""


class Turn(NamedTuple):
    """Norm and RoPE of a step's queries and keys; without weights or angles, there is none."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    cos_token: int = 0
    sin_token: int = 0
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0

    @classmethod
    def of(cls, angles: tuple[Tensor, Tensor] | None, norms: HeadNorms | None) -> Turn:
        turn = cls()
        if angles is not None:
            cos, sin = (contiguous_rows(part) for part in angles)
            turn = turn._replace(cos=cos, sin=sin, cos_token=cos.stride(0), sin_token=sin.stride(0))
        if norms is not None:
            q, k = contiguous_rows(norms.q), contiguous_rows(norms.k)
            turn = turn._replace(q_weight=q, k_weight=k, eps=norms.eps, offset=norms.offset)
        return turn

    def compiled(self, tile: HeadTile) -> HeadTile:
        return tile._replace(half=1 if self.cos is None else self.cos.shape[1], shifted=bool(self.offset))


@triton.jit
def normed(x, inverse, weight, dims, inside, offset, SHIFTED: tl.constexpr, KIND: tl.constexpr):
    """x / rms(x) * weight, rounded as in the body of `rms_norm`."""
    own = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        return (x * inverse[:, None] * (offset + own)).to(KIND).to(tl.float32)
    return ((x * inverse[:, None]).to(KIND).to(tl.float32) * own).to(KIND).to(tl.float32)


@triton.jit
def normed_and_rotated(rows, inside, tokens, weight, turn, TILE: tl.constexpr):
    """Heads at the pointers `rows` after norm (if there is a weight) and RoPE (if there are angles), in their own
    dtype.
    Each dimension's partner is loaded a second time: it comes from the cache, and avoids a shuffle between threads."""
    dims = tl.arange(0, TILE.padded)
    x = tl.load(rows[:, None] + dims[None, :], mask=inside[:, None] & (dims < TILE.size)[None, :], other=0.0)
    KIND: tl.constexpr = x.dtype
    if weight is None and turn.cos is None:
        return x
    x = x.to(tl.float32)
    y = x
    if weight is not None:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / TILE.size + turn.eps)
        y = normed(x, inverse, weight, dims, dims < TILE.size, turn.offset, TILE.shifted, KIND)
    if turn.cos is not None:
        rotating = dims < 2 * TILE.half
        partner = tl.where(dims < TILE.half, dims + TILE.half, dims - TILE.half)
        other = tl.load(rows[:, None] + partner[None, :], mask=inside[:, None] & rotating[None, :], other=0.0)
        other = other.to(tl.float32)
        if weight is not None:
            other = normed(other, inverse, weight, partner, rotating, turn.offset, TILE.shifted, KIND)
        angle = dims % TILE.half
        met = inside[:, None] & rotating[None, :]
        cos = turn.cos + tokens[:, None] * turn.cos_token + angle[None, :]
        sin = turn.sin + tokens[:, None] * turn.sin_token + angle[None, :]
        c, s = tl.load(cos, mask=met, other=1.0).to(tl.float32), tl.load(sin, mask=met, other=0.0).to(tl.float32)
        y = y * c + tl.where(dims < TILE.half, -1.0, 1.0)[None, :] * other * s
    return y.to(KIND)


@triton.jit(do_not_specialize=["count"])
def rotate_and_write(
    q,
    k,
    v,
    rotated,
    rotated_k,
    cache,
    slots,
    turn,
    count,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (head, tokens): HEADS query heads (0 if queries stay unchanged), then keys, then values. Keys are also
    stored to `rotated_k` if it is given."""
    start_next(OVERLAP)
    wait_for_inputs(OVERLAP)
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = token < count
    dims = tl.arange(0, TILE.padded)
    k_pages, v_pages = cache
    # Triton gives a name one type in all branches; queries, keys and values may differ in dtype and size.
    if head < HEADS:
        query = normed_and_rotated(q.at + token * q.token + head * q.head, inside, token, turn.q_weight, turn, TILE)
        query_places = rotated.at + (token * rotated.token + head * TILE.size)[:, None] + dims[None, :]
        tl.store(query_places, query, mask=inside[:, None] & (dims < TILE.size)[None, :])
    else:
        slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
        frame, place = slot // TILE.page, slot % TILE.page
        if head < HEADS + KEY_HEADS:
            own = head - HEADS
            key = normed_and_rotated(k.at + token * k.token + own * k.head, inside, token, turn.k_weight, turn, TILE)
            known = inside[:, None] & (dims < TILE.size)[None, :]
            offsets = frame * k_pages.frame + place * k_pages.place + own * k_pages.head
            key_places = k_pages.at + offsets[:, None] + dims[None, :]
            tl.store(key_places, key.to(k_pages.at.dtype.element_ty), mask=known)
            if rotated_k is not None:
                tl.store(rotated_k + ((token * KEY_HEADS + own) * TILE.size)[:, None] + dims[None, :], key, mask=known)
        else:
            own = head - HEADS - KEY_HEADS
            numbers = tl.arange(0, TILE.padded_values)
            met = inside[:, None] & (numbers < TILE.values)[None, :]
            value = tl.load(v.at + (token * v.token + own * v.head)[:, None] + numbers[None, :], mask=met, other=0.0)
            offsets = frame * v_pages.frame + place * v_pages.place + own * v_pages.head
            value_places = v_pages.at + offsets[:, None] + numbers[None, :]
            tl.store(value_places, value.to(v_pages.at.dtype.element_ty), mask=met)


def launch_rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, slots: Tensor, turn: Turn, keep: bool
) -> tuple[Tensor, Tensor]:
    """The final queries, and the final keys (only with `keep`); keys and values are written to their pages."""
    (count, heads, size), key_heads = q.shape, v.shape[1]
    changes = turn.cos is not None or turn.q_weight is not None
    rotated = torch.empty((count, heads, size), dtype=q.dtype, device=q.device) if changes else q
    rotated_keys = torch.empty((count, key_heads, size), dtype=k.dtype, device=k.device) if changes and keep else None
    tile = turn.compiled(HeadTile.of(q, cache))
    tokens = NUMBERS // max(tile.padded, tile.padded_values)
    given = (HeadRows.of(part) for part in (q, k, v, rotated))
    turned = heads if changes else 0
    rotate_and_write[(turned + 2 * key_heads, cdiv(count, tokens))](
        *given, rotated_keys, cache, slots, turn, count, turned, key_heads, tokens, tile, num_warps=4, **overlapped(q)
    )
    return rotated, k if rotated_keys is None else rotated_keys
