"""Inputs of latent attention with the sizes of DeepSeek-V2-Lite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.ops import HeadWeights, PagedMeta
from bankfull.weights.qtensor import QTensor
from tests.gpu.place import CUDA, DEVICE
from tests.gpu.real import Draw, Made, Mix, mixes, paged
from tests.ops.cases import Case

HEADS, RANK, NOPE, ROPE, VALUE = (16, 512, 128, 64, 128) if CUDA else (3, 20, 8, 4, 12)
SCALE = (NOPE + ROPE) ** -0.5


def _weights(draw: Draw, *shape: int, across: bool = False) -> HeadWeights:
    return HeadWeights(QTensor.dense(draw.normal(*shape) * shape[1 if across else 2] ** -0.5), across)


def _angles(draw: Draw, tokens: int) -> tuple[Tensor, Tensor]:
    turns = draw.normal(tokens, ROPE // 2, dtype=torch.float32)
    return turns.cos().to(draw.dtype), turns.sin().to(draw.dtype)


def _pages(draw: Draw, mix: Mix) -> tuple[Tensor, PagedMeta]:
    frames, _, meta = paged(draw, mix, draw.dtype)
    return draw.normal(frames.shape[0], frames.shape[1], 1, RANK + ROPE), meta


def head_products(draw: Draw, tokens: int) -> Made:
    weight = _weights(draw, HEADS, VALUE, RANK)
    yield "", Case((draw.normal(tokens, HEADS, RANK), weight), draw.dtype, {"weight": weight.stored})


def absorb_queries(draw: Draw, tokens: int) -> Made:
    weight = _weights(draw, HEADS, NOPE, RANK, across=True)
    q = draw.normal(tokens, HEADS, NOPE + ROPE)
    yield "", Case((q, *_angles(draw, tokens), weight), draw.dtype, {"weight": weight.stored})


def write_latents(draw: Draw, tokens: int) -> Made:
    pages = draw.normal(tokens // 16 + 2, 16, 1, RANK + ROPE)
    slots = torch.randperm(pages.shape[0] * 16, device=DEVICE)[:tokens]
    kv, weight = draw.normal(tokens, RANK + ROPE), draw.normal(RANK)
    args = (kv, weight, 1e-6, *_angles(draw, tokens), pages, slots)
    yield "", Case(args, draw.dtype, {"pages": draw.dtype}, written=(5,))


def latent_attention(draw: Draw, tokens: int) -> Made:
    for mix in mixes(draw, tokens):
        pages, meta = _pages(draw, mix)
        q = draw.normal(tokens, HEADS, RANK + ROPE)
        yield mix.name, Case((q, pages, RANK, meta, SCALE), draw.dtype, {"pages": draw.dtype})


def expanded_attention(draw: Draw, tokens: int) -> Made:
    for mix in mixes(draw, tokens):
        if mix.name not in ("prompt", "chunk"):
            continue
        pages, meta = _pages(draw, mix)
        keys, values = _weights(draw, HEADS, NOPE, RANK), _weights(draw, HEADS, VALUE, RANK)
        q = draw.normal(tokens, HEADS, NOPE + ROPE)
        args = (q, *_angles(draw, tokens), pages, meta, keys, values, SCALE)
        yield mix.name, Case(args, draw.dtype, {"pages": draw.dtype, "weight": keys.stored})


GENERATORS: dict[str, Callable[[Draw, int], Made]] = {
    function.__name__: function
    for function in (head_products, absorb_queries, write_latents, latent_attention, expanded_attention)
}
