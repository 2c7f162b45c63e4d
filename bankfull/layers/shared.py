"""Cross-layer attention: a layer with queries of its own over the keys and values of an earlier layer.

It neither computes nor writes keys and values, so its state is `Shared`: the model keeps one KV cache for both layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Norm
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles, Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.ops import HeadNorms, PagedMeta, Unnormed, attend, paged_attention, rotate
from bankfull.state.spec import Shared, StateSpec
from bankfull.state.storage import LayerStates


class SharedAttention:
    def __init__(
        self,
        build: Build,
        owner: Attention,
        layer: int,
        q: Linear,
        out: Linear,
        *,
        rope: str | None = "global",
        q_norm: Norm | None = None,
        sinks: Tensor | None = None,
        rotates_first: bool = False,
    ) -> None:
        """`owner`: the attention of the earlier layer number `layer`. Its window, cap and scale apply. `rotates_first`:
        as in `Attention`."""
        heads = owner.heads
        if q.outer % heads.size or q.outer // heads.size % heads.kv:
            raise ModelError(
                f"A layer shares the keys and values of layer {layer}, whose {heads.kv} heads of size {heads.size} do "
                f"not fit its {q.outer} query dimensions."
            )
        self.heads = replace(heads, count=q.outer // heads.size)
        self.owner, self.rope, self.rounded = owner, rope, owner.rounded
        self.q, self.out = q, out
        self.q_norm, self.rotates_first = q_norm, rotates_first
        self.sinks = None if sinks is None else sinks.to(build.at_least_float32)
        self.states: tuple[StateSpec, ...] = (Shared(layer),)
        self._rotate = build.bind(rotate)
        self._attend = build.bind(paged_attention, heads=self.heads, pages=build.pages)
        self._norms = (
            HeadNorms(q_norm.weight, q_norm.weight, q_norm.eps, q_norm.offset) if isinstance(q_norm, RMSNorm) else None
        )
        plain = not self.rounded and not rotates_first and (self._norms is None) == (q_norm is None)
        self._all = build.bind_if_offered(attend, heads=self.heads, pages=build.pages) if plain else None

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> PagedMeta:
        return self.owner.plan(batch, groups)

    def norms(self, rows: int) -> bool:
        return self.q.norms(rows)

    def run(self, x: Tensor | Unnormed, states: LayerStates, meta: Any, angles: Angles | None) -> Tensor:
        h = self.heads
        (state,) = states
        q = self.q(x).unflatten(-1, (-1, h.size))
        if self._all is not None:
            pages = state["k"], state["v"]
            mixed = self._all(q, None, None, *pages, meta, angles, self._norms, h.scale, h.sight, h.cap, self.sinks)
            return self.out(mixed.flatten(1))
        q = self._turned(q, angles)
        scales = (state["k_scale"], state["v_scale"]) if self.rounded else (None, None)
        mixed = self._attend(q, state["k"], state["v"], meta, h.scale, h.sight, h.cap, *scales, self.sinks)
        return self.out(mixed.flatten(1))

    def _turned(self, q: Tensor, angles: Angles | None) -> Tensor:
        if self.q_norm is not None and not self.rotates_first:
            q = self.q_norm(q)
        if angles is not None:
            q = self._rotate(q, *angles)
        if self.q_norm is not None and self.rotates_first:
            q = self.q_norm(q)
        return q

    def queries(self, x: Tensor, angles: Angles | None) -> Tensor:
        """The queries (tokens, heads, size) of normed rows, as attention reads them."""
        return self._turned(self.q(x).unflatten(-1, (-1, self.heads.size)), angles)


def owner_of(mixers: Sequence[Mixer], layer: int, owner: int) -> Attention:
    """The attention of layer `owner`, whose keys and values layer `layer` may share. `mixers`: of earlier layers."""
    if not 0 <= owner < layer:
        raise ModelError(
            f"Layer {layer} shares the keys and values of layer {owner}, which does not come before it; name an "
            "earlier layer."
        )
    mixer = mixers[owner]
    if not isinstance(mixer, Attention):
        raise ModelError(
            f"Layer {layer} shares the keys and values of layer {owner}, which has none of its own; name the layer "
            "that computes them."
        )
    return mixer
