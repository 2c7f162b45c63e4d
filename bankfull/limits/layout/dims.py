"""What a layout divides in a model, in numbers and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bankfull.ranks.mesh import MeshFacts, MeshSpec


@dataclass(frozen=True, slots=True)
class AttentionDims:
    """One attention layer, for one token."""

    heads: int
    kv_heads: int
    """0: all heads share one latent."""
    query: int
    """Numbers of one head's query."""
    result: int
    """Numbers of one head's result."""
    kv: int
    """Numbers of the key and value of one K/V head, or of the latent."""


@dataclass(frozen=True, slots=True)
class ExpertDims:
    experts: int
    per_token: int
    width: int


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer's weights, by how a layout places them, and of its state."""

    split: float = 0.0
    """All bytes that are split over tensor ranks, those of the feed-forward layer included."""
    copied: float = 0.0
    """Bytes that are the same on all ranks of a stage: norms, routers, projections to latents."""
    kv: float = 0.0
    """Projections to keys and values: split over as many tensor ranks as there are K/V heads."""
    experts: float = 0.0
    """Routed experts: split over expert ranks, and the width of each over the tensor ranks that are left."""
    token_state: float = 0.0
    """Paged state per token."""
    sequence_state: float = 0.0
    """Recurrent state per sequence."""
    feed: float = 0.0
    """The feed-forward layer's part of `split`: split over its own ranks, if there are any."""
    feed_copied: float = 0.0
    """The feed-forward layer's part of `copied`."""


@dataclass(frozen=True, slots=True)
class LayerDims:
    branches: int = 2
    """Results that tensor ranks have to add: of the mixer and of the feed-forward layer."""
    attention: AttentionDims | None = None
    experts: ExpertDims | None = None
    width: int = 0
    """Inner width of a dense feed-forward layer."""
    bytes: LayerBytes = field(default_factory=LayerBytes)

    @property
    def fed(self) -> bool:
        """Whether there is a feed-forward layer."""
        return bool(self.width or self.experts is not None or self.bytes.feed)

    def facts(self, layers: int) -> MeshFacts:
        """What a mesh must divide."""
        attention, routed = self.attention, self.experts
        return MeshFacts(
            layers,
            0 if attention is None else attention.heads,
            0 if attention is None else attention.kv_heads,
            0 if routed is None else routed.experts,
            {"feed-forward width": self.width} if self.width else {},
            0 if routed is None else routed.width,
        )


@dataclass(frozen=True, slots=True)
class ModelDims:
    hidden: int
    vocab: int
    layers: tuple[LayerDims, ...]
    item_bytes: int
    """Bytes of one number of an activation."""
    embedding_bytes: float = 0.0
    head_bytes: float = 0.0
    """0: the head is the embedding."""
    copied_bytes: float = 0.0
    """Outside of the layers, on the first and on the last stage: the last norm, position embeddings."""

    def check(self, mesh: MeshSpec) -> None:
        """Refuse a mesh that does not divide the model."""
        experts = any(layer.experts is not None for layer in self.layers)
        for facts in {str(one): one for layer in self.layers if (one := layer.facts(len(self.layers)))}.values():
            # Layers without experts do not stand in the way of those that have some.
            mesh.check(facts if facts.experts or not experts else _without_experts(facts, mesh))

    def feed_share(self, active: bool) -> float:
        """Fraction of the layers' matrices that is in feed-forward layers: without routed experts, or with those that
        are `active` for a token."""
        routed = [
            layer.bytes.experts * layer.experts.per_token / layer.experts.experts if active and layer.experts else 0.0
            for layer in self.layers
        ]
        whole = sum(layer.bytes.split + layer.bytes.kv for layer in self.layers) + sum(routed)
        return (sum(layer.bytes.feed for layer in self.layers) + sum(routed)) / whole if whole else 0.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model's weights, each tensor once."""
        layers = sum(
            sizes.split + sizes.copied + sizes.kv + sizes.experts for sizes in (one.bytes for one in self.layers)
        )
        return layers + self.embedding_bytes + self.head_bytes + self.copied_bytes

    @property
    def state_bytes(self) -> tuple[float, float]:
        """Bytes of state per token and per sequence."""
        per_layer: Sequence[LayerBytes] = [layer.bytes for layer in self.layers]
        return sum(one.token_state for one in per_layer), sum(one.sequence_state for one in per_layer)


def _without_experts(facts: MeshFacts, mesh: MeshSpec) -> MeshFacts:
    """So many experts that ranks always divide them, and not all are hot."""
    return MeshFacts(facts.layers, facts.heads, facts.kv_heads, mesh.ep * (1 + mesh.hot), facts.widths)
