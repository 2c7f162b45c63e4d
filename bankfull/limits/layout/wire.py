"""Bytes on the wire of a layout, as formulas: every collective of a step, and the bytes that a rank sends in it.

A step runs n tokens and computes r rows of logits. Context ranks share its tokens evenly. p is the number of ranks of
the collective, h the hidden size, b the bytes of a number.

| layout | collective | per | bytes sent by a rank |
|---|---|---|---|
| tensor | all-reduce | branch of a layer, embedding | 2 (p-1)/p n h b |
| tensor, sp=megatron | reduce-scatter and all-gather | branch of a layer | the same |
| tensor | all-gather of logits | step | (p-1)/p r vocabulary b |
| pipeline | send of hidden states | border of stages | n h b |
| context | all-gather of queries, keys, values | attention layer | (p-1)/p n (queries + keys + values) b |
| context | all-to-all of results with log-sum-exp | attention layer | (p-1)/p n heads (result + 1) 4 |
| context, sp=ulysses | all-to-all of queries, keys, values; of results | attention layer | (p-1)/p of a rank's tokens |
| expert | all-to-all to experts, and back | layer with experts | (p-1)/p of a rank's tokens x experts per token |
| feed-forward | send from t ranks to f, and back | feed-forward layer | n h b f/t there, n h b t/f back |

Where feed-forward layers have ranks of their own, these ranks add up the branches of their layers, and exchange tokens
with experts. Tokens of hot experts stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bankfull.limits.layout.dims import AttentionDims, LayerDims, ModelDims
from bankfull.limits.machine.links import Interconnect
from bankfull.ranks.mesh import MeshSpec

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
ALL_TO_ALL, SEND = "all-to-all", "send"
PARTIAL_BYTES = 4
"""Bytes of a number of a partial result of attention, and of its log-sum-exp: they are merged in float32."""


@dataclass(frozen=True, slots=True)
class WireExchange:
    """Equal collectives of a step."""

    axis: str
    """The axis of the mesh whose ranks take part."""
    what: str
    kind: str
    ranks: int
    size: float
    """Bytes: of the tensor (all-reduce, reduce-scatter), of the gathered one (all-gather), of what one rank holds
    (all-to-all), of the message (send)."""
    count: float = 1.0
    by_feeds: bool = False
    """Whether only the ranks of feed-forward layers send it."""

    @property
    def sent_once(self) -> float:
        """Bytes that one rank sends in one of them, in a ring."""
        if self.ranks == 1:
            return 0.0
        if self.kind == SEND:
            return self.size
        rounds = 2 if self.kind == ALL_REDUCE else 1
        return rounds * (self.ranks - 1) / self.ranks * self.size

    @property
    def sent(self) -> float:
        return self.count * self.sent_once

    @property
    def hops(self) -> int:
        """Consecutive messages of one of them. The messages of an all-to-all leave at once."""
        if self.ranks == 1:
            return 0
        return {ALL_REDUCE: 2 * (self.ranks - 1), ALL_TO_ALL: 1, SEND: 1}.get(self.kind, self.ranks - 1)

    def seconds(self, mesh: MeshSpec, links: Interconnect, efficiency: float = 1.0) -> float:
        """Alpha-beta time of all of them. `efficiency`: fraction of the bandwidth that is reached."""
        return self.count * links.link(span(mesh, self.axis)).seconds(self.hops, self.sent_once / efficiency)


def span(mesh: MeshSpec, axis: str) -> int:
    """Consecutive ranks within which the groups of an axis lie."""
    return {"tp": mesh.tp, "pp": mesh.ranks}.get(axis, mesh.stage_ranks)


def exchanges(
    dims: ModelDims, mesh: MeshSpec, tokens: float, rows: float, stage: int | None = None
) -> list[WireExchange]:
    """The collectives of a step in which a rank of a stage takes part; of all stages in turn by default."""
    stages = range(mesh.pp) if stage is None else (stage,)
    collectives: list[WireExchange] = []
    for one in stages:
        collectives += _of_stage(dims, mesh, tokens, rows, one)
    return [one for one in collectives if one.ranks > 1 and one.size > 0]


def sent_bytes(dims: ModelDims, mesh: MeshSpec, tokens: float, rows: float, stage: int = 0) -> float:
    """Bytes that each rank of a stage sends in a step, of the side that sends more."""
    collectives = exchanges(dims, mesh, tokens, rows, stage)
    return max(sum(one.sent for one in collectives if one.by_feeds == side) for side in (False, True))


def _of_stage(dims: ModelDims, mesh: MeshSpec, tokens: float, rows: float, stage: int) -> Iterator[WireExchange]:
    own_tokens = tokens / mesh.cp
    hidden = own_tokens * dims.hidden * dims.item_bytes
    scattered = mesh.sp == "megatron"
    if stage == 0:
        kind = REDUCE_SCATTER if scattered else ALL_REDUCE
        yield WireExchange("tp", "embedding", kind, mesh.tp, hidden)
    first, last = mesh.stages(len(dims.layers))[stage]
    for layer in dims.layers[first:last]:
        yield from _of_layer(dims, layer, mesh, tokens)
    if stage < mesh.pp - 1:
        yield WireExchange(
            "pp", "hidden states to the next stage", SEND, mesh.pp, hidden / (mesh.tp if scattered else 1)
        )
        return
    own_rows = rows / mesh.cp
    if scattered:
        yield WireExchange("tp", "rows of the head", ALL_GATHER, mesh.tp, own_rows * dims.hidden * dims.item_bytes)
    yield WireExchange("tp", "logits", ALL_GATHER, mesh.tp, own_rows * dims.vocab * dims.item_bytes)


def _of_layer(dims: ModelDims, layer: LayerDims, mesh: MeshSpec, tokens: float) -> Iterator[WireExchange]:
    own_tokens = tokens / mesh.cp
    hidden = own_tokens * dims.hidden * dims.item_bytes
    if layer.attention is not None:
        yield from _of_attention(dims, layer.attention, mesh, tokens)
    routed, apart = layer.experts is not None and mesh.ep > 1, mesh.ffn > 0 and layer.fed
    added = 1 if apart else layer.branches - routed
    if mesh.sp == "megatron":
        yield WireExchange("tp", "tokens of all ranks", ALL_GATHER, mesh.tp, hidden, added)
        yield WireExchange("tp", "sum of a branch", REDUCE_SCATTER, mesh.tp, hidden, added)
    else:
        yield WireExchange("tp", "sum of a branch", ALL_REDUCE, mesh.tp, hidden, added)
    if apart:
        ways = mesh.ffn / mesh.tp
        yield WireExchange("ffn", "rows to feed-forward ranks", SEND, mesh.stage_ranks, hidden * ways)
        yield WireExchange("ffn", "rows back", SEND, mesh.stage_ranks, hidden / ways, by_feeds=True)
        if not routed:
            yield WireExchange("ffn", "sum of a branch", ALL_REDUCE, mesh.ffn, hidden, by_feeds=True)
    if routed and layer.experts is not None:
        # Each rank of the stage routes its share of the tokens; a split expert has them on all of its ranks.
        copies = tokens / mesh.feed_ranks * layer.experts.per_token * mesh.expert_tp
        size = copies * dims.hidden * dims.item_bytes * max(0.0, 1 - mesh.hot / layer.experts.experts)
        yield WireExchange("ep", "tokens to experts", ALL_TO_ALL, mesh.ep, size, by_feeds=apart)
        yield WireExchange("ep", "results of experts", ALL_TO_ALL, mesh.ep, size, by_feeds=apart)
        if mesh.sp != "megatron":
            axis = "ffn" if apart else "tp"
            yield WireExchange(axis, "results of all ranks", ALL_GATHER, mesh.feed_tp, hidden, by_feeds=apart)


def _of_attention(dims: ModelDims, own: AttentionDims, mesh: MeshSpec, tokens: float) -> Iterator[WireExchange]:
    if mesh.cp == 1:
        return
    heads, item = own.heads / mesh.tp, dims.item_bytes
    queries = heads * own.query
    if mesh.sp == "ulysses":
        each = tokens / mesh.cp * item
        # Every context rank receives its K/V heads, at least one: copies count.
        keys = mesh.cp * max(1.0, own.kv_heads / mesh.head_ranks) * own.kv if own.kv_heads else mesh.cp * own.kv
        yield WireExchange("cp", "tokens for heads", ALL_TO_ALL, mesh.cp, each * (queries + keys))
        yield WireExchange("cp", "heads for tokens", ALL_TO_ALL, mesh.cp, each * heads * own.result)
        return
    keys = max(1.0, own.kv_heads / mesh.tp) * own.kv
    yield WireExchange("cp", "queries, keys and values", ALL_GATHER, mesh.cp, tokens * (queries + keys) * item)
    partial = tokens * heads * (own.result + 1) * PARTIAL_BYTES
    yield WireExchange("cp", "results with log-sum-exp", ALL_TO_ALL, mesh.cp, partial)


def kv_bytes(dims: ModelDims, tokens: int) -> float:
    """Bytes of state that go from a prefill engine to a decode engine."""
    each, once = dims.state_bytes
    return tokens * each + once


def summed(found: Sequence[WireExchange]) -> list[WireExchange]:
    """Equal collectives together."""
    counts: dict[WireExchange, float] = {}
    for one in found:
        same = replace(one, count=1.0)
        counts[same] = counts.get(same, 0.0) + one.count
    return [replace(one, count=count) for one, count in counts.items() if count]
