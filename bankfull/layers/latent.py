"""Multi-head latent attention (DeepSeek): pages hold one latent and one RoPE key per token, for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bankfull.axes import HEAD, HEADS, HIDDEN, LATENT, as_axis, joined
from bankfull.choices import EVICTION, PAGE_TYPES
from bankfull.declared import Trait
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles
from bankfull.layers.norm import RMSNorm
from bankfull.ops import (
    HeadWeights,
    PagedMeta,
    absorb_queries,
    expanded_attention,
    head_products,
    latent_attention,
    write_latents,
)
from bankfull.ops.latent.body import expansion_pays
from bankfull.ops.pages.rounded import is_rounded, pages_name
from bankfull.state.spec import Paged, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates
from bankfull.weights.qtensor import QTensor

NORM_EPS = 1e-6
"""Epsilon of the norms of latents; checkpoints do not state it."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The shape of a latent attention layer."""

    hidden: int
    heads: int
    rank: int
    """Numbers of the latent of keys and values."""
    nope: int
    """Numbers of a head's query and key without RoPE."""
    rope: int
    """Numbers of a head's query and of the shared key with RoPE."""
    value: int
    """Numbers of a head's value."""
    scale: float
    q_rank: int | None = None
    """Numbers of the latent of queries; None: queries are projected directly."""
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it; None: to all tokens before it."""

    @property
    def width(self) -> int:
        """Numbers in the cache per token and layer."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Adjacent sequences of a step that attend in the same way."""

    expanded: bool
    tokens: slice | None
    """The sequences' tokens in the step; None: all."""
    meta: PagedMeta


@dataclass(frozen=True, slots=True)
class LatentMeta:
    slots: Tensor
    parts: tuple[LatentPart, ...]


class LatentAttention:
    def __init__(
        self,
        build: Build,
        shape: LatentShape,
        *,
        bias: bool = False,
        interleaved: bool = True,
        rope: str | None = "global",
        eps: float = NORM_EPS,
    ) -> None:
        """`bias`: of the projections to latents and of the output. `interleaved`: whether the checkpoint's RoPE rotates
        adjacent numbers; then the rows of its projections are reordered once, so that halves rotate."""
        if is_rounded(build.pages):
            name = pages_name(build.pages)
            PAGE_TYPES[name].refuse(f"kv_dtype={name}", {Trait.LATENT: True})
        if build.kv_evict is not None:
            EVICTION.refuse("kv_evict", {Trait.LATENT: True})
        assert rope is not None, "latent attention always has a RoPE key"
        self.shape = shape
        hidden, latent = shape.hidden, LATENT(shape.rank)
        self.rope: str | None = rope
        s = shape
        turned = _halves(s.rope) if interleaved else None
        queries, width = HEADS(s.heads, s.nope + s.rope), s.rank + s.rope
        order = None if turned is None else _order(s.heads, s.nope, turned)
        self.q_a: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if s.q_rank is None:
            self.q = _reordered(build.at("q_proj"), hidden, queries, order)
        else:
            rank = LATENT(s.q_rank)
            self.q_a = Linear(build.at("q_a_proj"), hidden, rank, bias, int8_when_batched=True)
            self.q_norm = RMSNorm(build.at("q_a_layernorm"), rank, eps)
            self.q = _reordered(build.at("q_b_proj"), rank, queries, order)
        rows = None if turned is None else _order(1, s.rank, turned)
        self.kv = _reordered(build.at("kv_a_proj_with_mqa"), hidden, joined(latent, HEAD(s.rope)), rows, bias)
        self.kv_norm = build.at("kv_a_layernorm").tensor("weight", (latent,))
        self.eps = eps
        self.absorbing, self.valuing = _head_weights(build, s)
        self.out = Linear(build.at("o_proj"), HEADS(s.heads, s.value), hidden, bias, int8_when_batched=True)
        row = TensorSpec("latent", (1, width), str(build.pages).removeprefix("torch."))
        self.states: tuple[StateSpec, ...] = (Paged((row,), s.window),)
        facts = {"pages": build.pages, "latent": s}
        self._absorb = build.bind(absorb_queries, weight=self.absorbing.stored, **facts)
        self._write = build.bind(write_latents, **facts)
        self._attend = build.bind(latent_attention, **facts)
        self._value = build.bind(head_products, weight=self.valuing.stored, **facts)
        self._expand = build.bind(expanded_attention, **facts)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> LatentMeta:
        meta = batch.paged(groups)
        return LatentMeta(meta.slots, self._parts(meta))

    def _parts(self, meta: PagedMeta) -> tuple[LatentPart, ...]:
        """Runs of sequences that attend in the same way. A captured step is always absorbed: its sequences are those of
        the replay, which the host does not know here. So is a step on the meter, whose cost must be linear in tokens,
        pairs and context lengths."""
        s = self.shape
        counts = np.diff(meta.q_start)
        known = meta.partition is None and not meta.slots.is_meta
        pays = [
            known and expansion_pays(new, length, s.rank, s.nope + s.value)
            for new, length in zip(counts.tolist(), meta.kv_len.tolist(), strict=True)
        ]
        if not any(pays):
            return (LatentPart(False, None, meta),)
        borders = [0, *(i for i in range(1, len(pays)) if pays[i] != pays[i - 1]), len(pays)]
        if len(borders) == 2:
            return (LatentPart(True, None, meta),)
        parts = []
        for first, last in pairwise(borders):
            tokens = slice(int(meta.q_start[first]), int(meta.q_start[last]))
            if tokens.start < tokens.stop:
                parts.append(LatentPart(pays[first], tokens, _of_sequences(meta, first, last, tokens)))
        return tuple(parts)

    def run(self, x: Tensor, states: LayerStates, meta: LatentMeta, angles: Angles | None) -> Tensor:
        (state,) = states
        assert angles is not None
        pages = state["latent"]
        q = self._queries(x)
        self._write(self.kv(x), self.kv_norm, self.eps, *angles, pages, meta.slots)
        mixed = [self._mix(part, q, angles, pages) for part in meta.parts]
        return self.out((mixed[0] if len(mixed) == 1 else torch.cat(mixed)).flatten(1))

    def _queries(self, x: Tensor) -> Tensor:
        low = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        return self.q(low).unflatten(-1, (self.shape.heads, self.shape.nope + self.shape.rope))

    def absorbed(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Queries for latents, and the rows from which latents and RoPE keys are made."""
        return self._absorb(self._queries(x), *angles, self.absorbing), self.kv(x)

    def result(self, mixed: Tensor) -> Tensor:
        """The layer's output from the latents that absorbed queries attended to (tokens, heads, rank)."""
        return self.out(self._value(mixed, self.valuing).flatten(1))

    def _mix(self, part: LatentPart, q: Tensor, angles: Angles, pages: Tensor) -> Tensor:
        s = self.shape
        if part.tokens is not None:
            q, angles = q[part.tokens], (angles[0][part.tokens], angles[1][part.tokens])
        if part.expanded:
            keys = self.absorbing.reversed()
            return self._expand(q, *angles, pages, part.meta, keys, self.valuing, s.scale, s.window)
        absorbed = self._absorb(q, *angles, self.absorbing)
        return self._value(self._attend(absorbed, pages, s.rank, part.meta, s.scale, s.window), self.valuing)


def _of_sequences(meta: PagedMeta, first: int, last: int, tokens: slice) -> PagedMeta:
    """The sequences first .. last of a step, whose tokens are alone in the operands."""
    starts = None if meta.starts is None else meta.starts[first : last + 1] - tokens.start
    return replace(
        meta,
        q_start=meta.q_start[first : last + 1] - tokens.start,
        kv_len=meta.kv_len[first:last],
        pages=meta.pages[first:last],
        slots=meta.slots[tokens],
        starts=starts,
        lengths=None if meta.lengths is None else meta.lengths[first:last],
        ancestors=None if meta.ancestors is None else meta.ancestors[tokens],
    )


def _halves(size: int) -> Tensor:
    """The order that puts the first numbers of all pairs before the second ones."""
    return torch.arange(size).view(-1, 2).T.flatten()


def _order(heads: int, before: int, turned: Tensor) -> Tensor:
    """Rows of `heads` heads of `before` rows, which stay, and rows that `turned` reorders."""
    order = torch.cat((torch.arange(before), before + turned))
    return (torch.arange(heads)[:, None] * len(order) + order).flatten()


def _reordered(build: Build, inner: int, outer: int, order: Tensor | None, bias: bool = False) -> Linear:
    """A linear layer whose outputs come in another order than the file's rows."""
    if order is None:
        return Linear(build, inner, outer, bias, int8_when_batched=True)
    weight = build.weight("weight", (outer, as_axis(inner, HIDDEN)), for_linear=True)
    linear = Linear(build, inner, outer, weight=weight.rows(order.to(weight.device)), int8_when_batched=True)
    if bias:
        stored = build.tensor("bias", (outer,))
        linear.bias = stored[order.to(stored.device)]
    return linear


def _head_weights(build: Build, s: LatentShape) -> tuple[HeadWeights, HeadWeights]:
    """The matrices that turn a query into one for latents, and a mixed latent into a value. Files hold them as one
    projection, or split, with the first one transposed (GGUF)."""
    latent = LATENT(s.rank)
    if build.has("k_b_proj.weight"):
        heads = HEADS(s.heads)
        keys = _multiplied(build, build.at("k_b_proj").weight("weight", (heads, latent, HEAD(s.nope))))
        values = _multiplied(build, build.at("v_b_proj").weight("weight", (heads, HEAD(s.value), latent)))
        return HeadWeights(keys), HeadWeights(values)
    each = s.nope + s.value
    whole = build.at("kv_b_proj").weight("weight", (HEADS(s.heads, each), latent)).reshape_leading(s.heads, each)
    parts = (_columns(whole, slice(0, s.nope)), _columns(whole, slice(s.nope, each)))
    keys, values = (_multiplied(build, part) for part in parts)
    return HeadWeights(keys, across=True), HeadWeights(values)


def _columns(whole: QTensor, rows: slice) -> QTensor:
    """These rows of each head's matrix, as a view."""
    parts = {name: part[:, rows] for name, part in whole.parts.items()}
    return QTensor(whole.scheme, parts, (whole.shape[0], rows.stop - rows.start, whole.shape[2]))


def _multiplied(build: Build, weight: QTensor) -> QTensor:
    """The matrices in a format that a kernel multiplies, or dequantized once for the torch body."""
    if build.kit.offers(head_products, dtype=build.dtype, weight=weight):
        return weight
    return QTensor.dense(weight.dequantize(build.dtype))
