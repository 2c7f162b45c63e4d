"""Grouped-query attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import HEADS, KV_HEADS, WeightAxis
from bankfull.choices import EVICTION
from bankfull.declared import Trait
from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, stack
from bankfull.layers.mixer import Angles
from bankfull.layers.norm import RMSNorm
from bankfull.ops import (
    HeadNorms,
    PagedMeta,
    Unnormed,
    attend,
    paged_attention,
    rotate,
    write_pages,
    write_pages_fp8,
    write_pages_int4,
    write_pages_int8,
)
from bankfull.ops.pages.rounded import FP8, INT4, int4_group, is_rounded
from bankfull.state.mask import Mask, Sight
from bankfull.state.spec import Paged, StateSpec, TensorSpec
from bankfull.state.storage import LayerStates


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of an attention layer."""

    count: int
    kv: int
    size: int
    scale: float
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it; None: to all tokens before it."""
    cap: float | None = None
    """Soft cap of the attention scores: cap * tanh(score / cap)."""
    block: int = 0
    """Tokens of a block, aligned to position 0, that see each other in both directions; 0 = causal. The same in all
    layers of a model, and without a window."""
    mask: Mask | None = None
    """A sparse mask, instead of a window."""

    @property
    def queries(self) -> WeightAxis:
        """The axis of all heads' queries, and of what they attend to."""
        return HEADS(self.count, self.size)

    @property
    def keys(self) -> WeightAxis:
        """The axis of all heads' keys, and of their values."""
        return KV_HEADS(self.kv, self.size)

    @property
    def sight(self) -> Sight:
        """What a query sees, as attention operations and pages take it."""
        return self.window if self.mask is None else self.mask


Norm = Callable[[Tensor], Tensor]
WRITES = {torch.int8: write_pages_int8, FP8: write_pages_fp8, INT4: write_pages_int4}
Product = Callable[[Any], Tensor]


class Attention:
    def __init__(
        self,
        build: Build,
        heads: Heads,
        q: Linear,
        k: Linear,
        v: Linear,
        out: Linear,
        *,
        rope: str | None = "global",
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        state: StateSpec | None = None,
        sinks: Tensor | None = None,
        rotates_first: bool = False,
    ) -> None:
        """`sinks`: one logit for each head, which only adds to the denominator of its softmax. `rotates_first`: RoPE
        comes before the norms of queries and keys, not after them."""
        self.heads = heads = evicting(heads, build.kv_evict)
        self.rope = rope
        self.q, self.k, self.v = q, k, v
        self.out: Product = out
        self.q_norm, self.k_norm = q_norm, k_norm
        self.rotates_first = rotates_first
        self.sinks = None if sinks is None else sinks.to(build.at_least_float32)
        self.rounded = is_rounded(build.pages)
        paged = Paged(page_tensors(heads, build.pages), heads.sight)
        self.states: tuple[StateSpec, ...] = (paged if state is None else state,)
        self._rotate = build.bind(rotate)
        self.fixed = _checkpoint_scales(build, heads) if build.pages is FP8 else ((), ())
        wanted = {"fixed": True} if self.fixed[0] else {}
        self._write = build.bind(WRITES.get(build.pages, write_pages), pages=build.pages, **wanted)
        self._attend = build.bind(paged_attention, heads=heads, pages=build.pages)
        self.qkv = stack(build, (q, k, v))
        self.adapter: Product | None = None
        """A branch that is added to queries, keys and values."""
        self.norms_of_heads = _norms(q_norm, k_norm)
        plain = not self.rounded and not rotates_first and (self.norms_of_heads is None) == (q_norm is None)
        self._all = build.bind_if_offered(attend, heads=heads, pages=build.pages) if plain else None

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> PagedMeta:
        return batch.paged(groups, self.heads.block)

    def norms(self, rows: int) -> bool:
        return self.qkv is not None and self.adapter is None and self.qkv.norms(rows)

    def _project(self, x: Tensor | Unnormed) -> tuple[Tensor, Tensor, Tensor]:
        h = self.heads
        shares, added = (h.count, h.kv, h.kv), None if self.adapter is None else self.adapter(x)
        if self.qkv is not None:
            whole = self.qkv(x)
            q, k, v = (whole if added is None else whole + added).unflatten(-1, (-1, h.size)).split(shares, 1)
            return q, k, v
        q, k, v = (part(x).unflatten(-1, (-1, h.size)) for part in (self.q, self.k, self.v))
        if added is None:
            return q, k, v
        to_q, to_k, to_v = added.unflatten(-1, (-1, h.size)).split(shares, 1)
        return q + to_q, k + to_k, v + to_v

    def _turned(self, q: Tensor, k: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        if angles is not None and self.rotates_first:
            q, k = self._rotate(q, *angles), self._rotate(k, *angles)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None and not self.rotates_first:
            q, k = self._rotate(q, *angles), self._rotate(k, *angles)
        return q, k

    def projected(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of normed rows (tokens, heads, size), as attention reads them."""
        q, k, v = self._project(x)
        return *self._turned(q, k, angles), v

    def run(self, x: Any, states: LayerStates, meta: PagedMeta, angles: Angles | None) -> Tensor:
        return self.result(x, self.mixed(x, states, meta, angles))

    def result(self, x: Any, mixed: Tensor) -> Tensor:
        """The layer's output, from its input and from the values that each head attends to."""
        return self.out(mixed)

    def mixed(self, x: Any, states: LayerStates, meta: PagedMeta, angles: Angles | None) -> Tensor:
        """The values that each head attends to, before the output projection."""
        h = self.heads
        (state,) = states
        q, k, v = self._project(x)
        if self._all is not None:
            pages = state["k"], state["v"]
            y = self._all(q, k, v, *pages, meta, angles, self.norms_of_heads, h.scale, h.sight, h.cap, self.sinks)
            return y.flatten(1)
        q, k = self._turned(q, k, angles)
        scales = (state["k_scale"], state["v_scale"]) if self.rounded else ()
        self._write(k, state["k"], *scales[:1], meta.slots, *self.fixed[0])
        self._write(v, state["v"], *scales[1:], meta.slots, *self.fixed[1])
        held = scales or (None, None)
        y = self._attend(q, state["k"], state["v"], meta, h.scale, h.sight, h.cap, *held, self.sinks)
        return y.flatten(1)


def evicting(heads: Heads, evict: Mask | None) -> Heads:
    """The heads of a layer in which tokens between the first and the last ones are evicted. Layers with a window or a
    mask of their own forget tokens already."""
    if evict is None or heads.sight is not None:
        return heads
    EVICTION.refuse("kv_evict", {Trait.DIFFUSION: bool(heads.block)})
    return replace(heads, mask=evict)


def _norms(q_norm: Norm | None, k_norm: Norm | None) -> HeadNorms | None:
    """The norms of queries and keys for a fused kernel; None where there are none, or of another kind."""
    if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)
    return None


def page_tensors(heads: Heads, dtype: torch.dtype) -> tuple[TensorSpec, ...]:
    """A token's part of a page: its key and value, and their scales if they are rounded."""
    kind = str(dtype).removeprefix("torch.")
    scales: tuple[int, ...] = (heads.kv,)
    stored, scale_kind = heads.size, "float32"
    if dtype is INT4:
        if heads.size % 8:
            raise ModelError(
                f"An int4 KV cache needs heads whose size is a multiple of 8, and here it is {heads.size}; use "
                "kv_dtype=int8."
            )
        stored, scales, scale_kind = heads.size // 2, (heads.kv, heads.size // int4_group(heads.size)), "bfloat16"
    numbers = tuple(TensorSpec(name, (heads.kv, stored), kind) for name in ("k", "v"))
    if not is_rounded(dtype):
        return numbers
    return (*numbers, *(TensorSpec(name, scales, scale_kind) for name in ("k_scale", "v_scale")))


def _checkpoint_scales(build: Build, heads: Heads) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Scales of fp8 keys and of fp8 values that the checkpoint has, one per head; empty if it has none."""
    scales: list[tuple[Tensor, ...]] = []
    for part in ("k", "v"):
        names = (f"{part}_scale", f"{part}_proj.{part}_scale")
        name = next((name for name in names if build.has(name)), None)
        scales.append(() if name is None else (_per_head(build, name, heads.kv),))
    return (scales[0], scales[1]) if all(scales) else ((), ())


def _per_head(build: Build, name: str, count: int) -> Tensor:
    shape = build.shape(name)
    if prod(shape) not in (1, count):
        raise ModelError(
            f"The KV scale {build.prefix}.{name} has shape {shape}, but {count} heads need one scale, or one each; use "
            "kv_dtype=int8."
        )
    scales = build.tensor(name, tuple(map(KV_HEADS, shape)), torch.float32).flatten().expand(count).contiguous()
    if not scales.is_meta and not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"The KV scale {build.prefix}.{name} is not a positive number; use kv_dtype=int8.")
    return scales
