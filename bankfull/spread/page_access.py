"""Attention layers in steps, for ranks that exchange tensors between them: project, write pages, attend, finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from bankfull.layers.attention import WRITES, Attention, page_tensors
from bankfull.layers.build import Build
from bankfull.layers.latent import LatentAttention
from bankfull.layers.mixer import Angles
from bankfull.layers.shared import SharedAttention
from bankfull.ops import (
    PagedMeta,
    latent_attention,
    paged_attention,
    partial_attention,
    rms_norm,
    rotate,
    write_pages,
)
from bankfull.state.spec import Paged, StateSpec, TensorSpec
from bankfull.state.storage import StateTensors

Held = tuple[Tensor, "Tensor | int", Tensor | None, Tensor | None]
"""Pages of keys, of values (or the first columns of a key that are its value), and their scales."""


class PageAccess(Protocol):
    states: tuple[StateSpec, ...]
    rope: str | None
    heads: int
    """Query heads that attend here."""
    values: int
    """Numbers of a head's result, before `finish`."""
    sinks: Tensor | None
    block: int
    specs: Sequence[TensorSpec]
    """The tensors of a page."""

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Queries (tokens, heads, size), and the rows (tokens, heads, size) that go to the pages."""
        ...

    def write(self, rows: Sequence[Tensor], state: StateTensors, slots: Tensor) -> None: ...

    def attend(self, q: Tensor, state: StateTensors, meta: PagedMeta) -> Tensor: ...

    def partial(self, q: Tensor, state: StateTensors, meta: PagedMeta, ranks: int) -> Tensor: ...

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output, from its input and from the heads' results (tokens, columns)."""
        ...


def scratch(specs: Sequence[TensorSpec], frames: int, page_tokens: int, device: torch.device) -> StateTensors:
    """Pages for one layer of a step."""
    return {
        one.name: torch.empty(frames, page_tokens, *one.shape, dtype=getattr(torch, one.dtype), device=device)
        for one in specs
    }


class HeadPages:
    """Attention with keys and values, or with those of an earlier layer. `part`: of `parts` equal shares of the heads,
    the one whose pages are here; heads of keys and values are copied where they are fewer."""

    def __init__(self, build: Build, inner: Attention | SharedAttention, part: int = 0, parts: int = 1) -> None:
        whole = inner.heads
        kv = max(1, whole.kv // parts)
        own = replace(whole, count=whole.count // parts, kv=kv)
        first = part * whole.kv // parts
        self.inner, self.rope, self.own = inner, inner.rope, own
        self.heads, self.values, self.block = own.count, own.size, own.block
        queries = slice(part * own.count, (part + 1) * own.count)
        self.sinks = None if inner.sinks is None else inner.sinks[queries].contiguous()
        self.fixed: tuple[tuple[Tensor, ...], ...] = ((), ())
        owner = inner.owner if isinstance(inner, SharedAttention) else inner
        if isinstance(inner, SharedAttention):
            self.states: tuple[StateSpec, ...] = inner.states
        else:
            self.states = (Paged(page_tensors(own, build.pages), own.sight),) if parts > 1 else inner.states
            self.fixed = tuple(tuple(one[first : first + kv] for one in scales) for scales in inner.fixed)
        self.specs: Sequence[TensorSpec] = page_tensors(own, build.pages)
        self.rounded = owner.rounded
        wanted = {"fixed": True} if self.fixed[0] else {}
        self._write = build.bind(WRITES.get(build.pages, write_pages), pages=build.pages, **wanted)
        self._attend = build.bind(paged_attention, heads=own, pages=build.pages)
        self._partial = build.bind(partial_attention, heads=own, pages=build.pages)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        if isinstance(self.inner, SharedAttention):
            return self.inner.queries(x, angles), ()
        q, k, v = self.inner.projected(x, angles)
        return q, (k, v)

    def write(self, rows: Sequence[Tensor], state: StateTensors, slots: Tensor) -> None:
        for name, row, fixed in zip(("k", "v"), rows, self.fixed, strict=False):
            scales = (state[f"{name}_scale"],) if self.rounded else ()
            self._write(row, state[name], *scales, slots, *fixed)

    def _held(self, state: StateTensors) -> Held:
        return state["k"], state["v"], state.get("k_scale"), state.get("v_scale")

    def attend(self, q: Tensor, state: StateTensors, meta: PagedMeta) -> Tensor:
        k, v, *scales = self._held(state)
        h = self.own
        y: Tensor = self._attend(q, k, v, meta, h.scale, h.sight, h.cap, *scales, self.sinks)
        return y

    def partial(self, q: Tensor, state: StateTensors, meta: PagedMeta, ranks: int) -> Tensor:
        k, v, *scales = self._held(state)
        h = self.own
        y: Tensor = self._partial(q, k, v, meta, ranks, h.scale, h.sight, h.cap, *scales)
        return y

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.inner.out(mixed) if isinstance(self.inner, SharedAttention) else self.inner.result(x, mixed)


class LatentPages:
    """Latent attention with absorbed queries. All ranks that share the heads keep all latents."""

    block = 0
    sinks: Tensor | None = None

    def __init__(self, build: Build, inner: LatentAttention, parts: int = 1) -> None:
        s = inner.shape
        self.inner, self.rope, self.states = inner, inner.rope, inner.states
        self.heads, self.values = s.heads // parts, s.rank
        (state,) = inner.states
        assert isinstance(state, Paged)
        self.specs: Sequence[TensorSpec] = state.tensors
        facts = {"pages": build.pages, "latent": replace(s, heads=self.heads)}
        self._norm, self._rotate = build.bind(rms_norm), build.bind(rotate)
        self._write = build.bind(write_pages, pages=build.pages)
        self._attend = build.bind(latent_attention, **facts)
        self._partial = build.bind(partial_attention, **facts)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        assert angles is not None
        q, kv = self.inner.absorbed(x, angles)
        rank = self.inner.shape.rank
        latent = self._norm(kv[:, :rank], self.inner.kv_norm, self.inner.eps, 0.0)
        key = self._rotate(kv[:, None, rank:], *angles)
        return q, (torch.cat((latent[:, None], key), -1),)

    def write(self, rows: Sequence[Tensor], state: StateTensors, slots: Tensor) -> None:
        self._write(rows[0], state["latent"], slots)

    def attend(self, q: Tensor, state: StateTensors, meta: PagedMeta) -> Tensor:
        s = self.inner.shape
        y: Tensor = self._attend(q, state["latent"], s.rank, meta, s.scale, s.window)
        return y

    def partial(self, q: Tensor, state: StateTensors, meta: PagedMeta, ranks: int) -> Tensor:
        s = self.inner.shape
        y: Tensor = self._partial(q, state["latent"], s.rank, meta, ranks, s.scale, s.window)
        return y

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.inner.result(mixed.unflatten(1, (-1, self.inner.shape.rank)))
