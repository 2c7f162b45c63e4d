"""Memory of one rank of a layout: its weights, and its share of the state."""

from __future__ import annotations

from bankfull.limits.layout.dims import LayerDims, ModelDims
from bankfull.ranks.mesh import MeshSpec


def rank_weights(dims: ModelDims, mesh: MeshSpec, stage: int) -> float:
    """Bytes of weights on each rank of a stage; on those with most, where feed-forward layers have ranks of their own.
    A head that is the embedding lies on the first stage and on the last one."""
    mixers, feeds = side_weights(dims, mesh, stage)
    return max(mixers, feeds) if mesh.ffn else mixers + feeds


def side_weights(dims: ModelDims, mesh: MeshSpec, stage: int) -> tuple[float, float]:
    """Bytes of weights of a stage on a rank with mixers, and on one with feed-forward layers."""
    first, last = mesh.stages(len(dims.layers))[stage]
    mixers = sum(_mixer_weights(layer, mesh) for layer in dims.layers[first:last])
    begins, ends = stage == 0, stage == mesh.pp - 1
    if begins or (ends and not dims.head_bytes):
        mixers += dims.embedding_bytes / mesh.tp
    if ends:
        mixers += dims.head_bytes / mesh.tp
    mixers += dims.copied_bytes if begins or ends else 0.0
    return mixers, sum(_feed_weights(layer, mesh) for layer in dims.layers[first:last])


def _mixer_weights(layer: LayerDims, mesh: MeshSpec) -> float:
    weights = layer.bytes
    heads = 0 if layer.attention is None else layer.attention.kv_heads
    keys = weights.kv / (min(mesh.tp, heads) if heads else 1)
    return (weights.split - weights.feed) / mesh.tp + weights.copied - weights.feed_copied + keys


def _feed_weights(layer: LayerDims, mesh: MeshSpec) -> float:
    weights = layer.bytes
    experts = 0.0 if layer.experts is None else weights.experts * expert_share(layer.experts.experts, mesh)
    return weights.feed / mesh.feed_tp + weights.feed_copied + experts


def expert_share(experts: int, mesh: MeshSpec) -> float:
    """Fraction of the bytes of a layer's experts on the rank that has most: its own, and all hot ones of others."""
    return min(1.0, 1 / mesh.ep + mesh.hot / experts) / mesh.expert_tp


def most_weights(dims: ModelDims, mesh: MeshSpec) -> float:
    """Bytes of weights on the rank that has most."""
    return max(rank_weights(dims, mesh, stage) for stage in range(mesh.pp))


def state_share(dims: ModelDims, mesh: MeshSpec) -> float:
    """Fraction of a sequence's state on the rank that has most of it: of the paged or of the recurrent state, whichever
    is larger, so that both fit."""
    paged, kept = dims.state_bytes
    share = 0.0
    for first, last in mesh.stages(len(dims.layers)):
        layers = dims.layers[first:last]
        if paged:
            share = max(share, sum(one.bytes.token_state * kv_share(one, mesh) for one in layers) / paged)
        if kept:
            share = max(share, sum(one.bytes.sequence_state for one in layers) / mesh.tp / kept)
    return share or 1.0


def kv_share(layer: LayerDims, mesh: MeshSpec) -> float:
    """Fraction of a layer's K/V on one rank. Heads are split over tensor ranks, and copied where these are more; a
    latent is copied. Context ranks split the tokens; with Ulysses' exchange they split the heads."""
    heads = 0 if layer.attention is None else layer.attention.kv_heads
    by_heads = 1 / min(mesh.head_ranks, heads) if heads else 1.0
    return by_heads if mesh.sp == "ulysses" else by_heads / mesh.cp
