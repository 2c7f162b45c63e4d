"""Generated inputs for the operations of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.layers.latent import LatentShape
from bankfull.ops import HeadWeights, PagedMeta
from bankfull.weights.qtensor import QTensor
from tests.ops.cases import Case, Maker, paged, trees

SMALLEST = 8
"""Numbers of the shortest latent: quantized rows are whole blocks."""


def _weights(make: Maker, heads: int, outputs: int, columns: int, across: bool) -> HeadWeights:
    """Matrices of all heads in any scheme whose blocks fit the rows; a head's rows are a part of a larger matrix."""
    scheme = make.scheme()
    rows, inner = (columns, outputs) if across else (outputs, columns)
    whole = make.weight(scheme, heads * (rows + 3), inner).reshape_leading(heads, rows + 3)
    parts = {name: part[:, 2:-1] for name, part in whole.parts.items()}
    return HeadWeights(QTensor(scheme, parts, (heads, rows, inner)), across)


def _sizes(make: Maker) -> tuple[int, int, int, int]:
    """Heads, rank, nope and rope; rank and nope are whole blocks of the scheme."""
    block = make.scheme().block
    rank = block * make.size(1, 2) if block > 1 else make.pick.choice((SMALLEST, 20, 64))
    nope = block if block > 1 else make.pick.choice((4, 10, 16))
    return make.pick.choice((1, 3, 8, 20)), rank, nope, make.pick.choice((2, 8, 16))


def _angles(make: Maker, tokens: int, rope: int) -> tuple[Tensor, Tensor]:
    turns = make.normal(tokens, rope // 2, dtype=torch.float64)
    return turns.cos().to(make.dtype), turns.sin().to(make.dtype)


def _shape(heads: int, rank: int, nope: int, rope: int, value: int, window: int | None = None) -> LatentShape:
    return LatentShape(7, heads, rank, nope, rope, value, (nope + rope) ** -0.5, None, window)


def head_products(make: Maker) -> Case:
    heads, columns, outputs, _ = _sizes(make)
    weight = _weights(make, heads, outputs, columns, bool(make.size(0, 1)))
    x = make.normal(make.size(1, 40), heads, columns)
    return Case((x, weight), make.dtype, {"weight": weight.stored})


def absorb_queries(make: Maker) -> Case:
    heads, rank, nope, rope = _sizes(make)
    weight = _weights(make, heads, rank, nope, bool(make.size(0, 1)))
    tokens = make.size(1, 40)
    q = make.normal(tokens, heads, nope + rope)
    facts = {"weight": weight.stored, "latent": _shape(heads, rank, nope, rope, nope)}
    return Case((q, *_angles(make, tokens, rope), weight), make.dtype, facts)


def _pages(make: Maker, rank: int, rope: int, window: int | None) -> tuple[Tensor, PagedMeta]:
    dtype = make.pick.choice((make.dtype, make.dtype, torch.bfloat16))
    pages, _, meta = paged(make, 1, rank + rope, 1, window, dtype)
    return pages, meta


def write_latents(make: Maker) -> Case:
    _, rank, _, rope = _sizes(make)
    pages, _, meta = paged(make, 1, rank + rope, 1, None)
    tokens = len(meta.slots)
    args = (make.normal(tokens, rank + rope), make.normal(rank), 1e-6, *_angles(make, tokens, rope), pages, meta.slots)
    facts = {"pages": pages.dtype, "latent": _shape(1, rank, 4, rope, 4)}
    return Case(args, make.dtype, facts, written=(5,))


def latent_attention(make: Maker) -> Case:
    heads, rank, nope, rope = _sizes(make)
    window = make.pick.choice((None, None, None, 1, 7, 33))
    pages, meta = _pages(make, rank, rope, window)
    q = make.normal(int(meta.q_start[-1]), heads, rank + rope)
    meta = _with_trees(make, meta)
    facts = {"pages": pages.dtype, "latent": _shape(heads, rank, nope, rope, nope, window)}
    provided = torch.bfloat16 if pages.dtype is torch.bfloat16 else None
    return Case((q, pages, rank, meta, (nope + rope) ** -0.5, window), make.dtype, facts, provided=provided)


def _with_trees(make: Maker, meta: PagedMeta) -> PagedMeta:
    return replace(meta, ancestors=make.pick.choice((None, trees(make, meta.q_start))))


def expanded_attention(make: Maker) -> Case:
    heads, rank, nope, rope = _sizes(make)
    window = make.pick.choice((None, None, None, 1, 7, 33))
    pages, meta = _pages(make, rank, rope, window)
    tokens, value = int(meta.q_start[-1]), make.size(1, 20)
    keys = _weights(make, heads, nope, rank, bool(make.size(0, 1)))
    values = _weights(make, heads, value, rank, False)
    q = make.normal(tokens, heads, nope + rope)
    angles, scale = _angles(make, tokens, rope), 0.3 * (nope + rope) ** -0.5
    facts = {"pages": pages.dtype, "latent": _shape(heads, rank, nope, rope, value, window), "weight": keys.stored}
    return Case((q, *angles, pages, _with_trees(make, meta), keys, values, scale, window), make.dtype, facts)


GENERATORS: dict[str, Callable[[Maker], Case]] = {
    function.__name__: function
    for function in (head_products, absorb_queries, write_latents, latent_attention, expanded_attention)
}
