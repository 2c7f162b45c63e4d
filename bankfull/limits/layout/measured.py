"""The dimensions of a model that the meter has built."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bankfull.layers.attention import Attention
from bankfull.layers.decoder import Block
from bankfull.layers.experts import Experts
from bankfull.layers.latent import LatentAttention
from bankfull.layers.parallel_mixer import ParallelMixer
from bankfull.layers.placement import Role
from bankfull.layers.shared import SharedAttention
from bankfull.limits.layout.dims import AttentionDims, ExpertDims, LayerBytes, LayerDims, ModelDims
from bankfull.limits.model.memory import tensor_bytes
from bankfull.limits.model.recipe import Recipe
from bankfull.state.spec import Paged, Recurrent, StateSpec

LAYER = re.compile(r"\.(\d+)\.")
ROUTED = re.compile(r"\bexperts\b")
KEYS = re.compile(r"\b(k_proj|v_proj)\b")
FUSED = re.compile(r"\b(qkv_proj|c_attn|query_key_value)\b")
COPIED = re.compile(r"\b(q_a_proj|kv_a_proj_with_mqa|router|gate|shared_expert_gate)\.weight$")
"""Matrices that every tensor rank needs whole: projections to latents, and routers."""


def dims_of(recipe: Recipe) -> ModelDims:
    metered = recipe.metered()
    model = metered.model
    layers = [_layer(block) for block in model.blocks]
    weights: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tables: list[float] = []
    copied = 0.0
    for name, tensor in metered.shapes.read.items():
        of_feed = metered.build.weights[name].role is Role.FEED
        size = tensor_bytes(recipe, tensor)
        match = LAYER.search(name)
        if match is not None:
            number = int(match[1])
            for part, share in _parts(name, tensor.shape, of_feed, layers[number]):
                weights[number][part] += share * size
        elif len(tensor.shape) == 2 and tensor.shape[0] == model.vocab:
            tables.append(size)
        else:
            copied += size
    placed = tuple(
        replace(layer, bytes=LayerBytes(**weights[number], **_state(block.mixer.states)))
        for number, (layer, block) in enumerate(zip(layers, model.blocks, strict=True))
    )
    embedding, *head = [*tables, 0.0]
    return ModelDims(model.hidden, model.vocab, placed, recipe.dtype.itemsize, embedding, sum(head), copied)


def _parts(name: str, shape: tuple[int, ...], of_feed: bool, layer: LayerDims) -> Iterator[tuple[str, float]]:
    """How a tensor is placed, with the share of it that is."""
    attention = layer.attention
    if ROUTED.search(name):
        yield "experts", 1.0
    elif len(shape) == 1 or COPIED.search(name):
        yield "copied", 1.0
        if of_feed:
            yield "feed_copied", 1.0
    elif attention is not None and attention.kv_heads and KEYS.search(name):
        yield "kv", 1.0
    elif attention is not None and attention.kv_heads and FUSED.search(name):
        keys = 2 * attention.kv_heads / (attention.heads + 2 * attention.kv_heads)
        yield "kv", keys
        yield "split", 1 - keys
    else:
        yield "split", 1.0
        if of_feed:
            yield "feed", 1.0


def _layer(block: Block) -> LayerDims:
    feed: Any = block.feed
    experts = None
    if isinstance(feed, Experts):
        experts = ExpertDims(feed.rule.experts, feed.rule.per_token, feed.shape.inner)
    width = 0 if experts is not None else int(getattr(getattr(feed, "up", None), "outer", 0))
    together = block.feed is None or block.add_branches is not None
    return LayerDims(1 if together else 2, _attention(block.mixer), experts, width)


def _attention(mixer: object) -> AttentionDims | None:
    if isinstance(mixer, ParallelMixer):
        return next((dims for one in mixer.mixers if (dims := _attention(one)) is not None), None)
    if isinstance(mixer, Attention):
        heads = mixer.heads
        return AttentionDims(heads.count, heads.kv, heads.size, heads.size, 2 * heads.size)
    if isinstance(mixer, SharedAttention):  # its keys and values are those of an earlier layer
        heads = mixer.heads
        return AttentionDims(heads.count, heads.kv, heads.size, heads.size, 0)
    if isinstance(mixer, LatentAttention):
        shape = mixer.shape
        return AttentionDims(shape.heads, 0, shape.width, shape.rank, shape.width)
    return None


def _state(states: tuple[StateSpec, ...]) -> dict[str, float]:
    paged = sum(tensor.nbytes for one in states if isinstance(one, Paged) for tensor in one.tensors)
    kept = sum(tensor.nbytes for one in states if isinstance(one, Recurrent) for tensor in one.tensors)
    return {"token_state": float(paged), "sequence_state": float(kept)}
