"""EAGLE heads as models: one decoder layer over the target model's embedding, features, and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, VOCAB, joined
from bankfull.errors import ConfigError
from bankfull.layers.adapted import narrows_own
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.eagle import DraftLogits, EagleHead, Features, FusedBlock
from bankfull.layers.linear import Linear
from bankfull.layers.norm import AddThen, RMSNorm
from bankfull.models.common import TRANSFORMER, gated_mlp, heads_of, rope_of
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import rank_config
from bankfull.ranks.shard import Shard
from bankfull.spread.gathered import gathered_linear
from bankfull.spread.tokens import spread_tokens
from bankfull.weights.eagle import EagleFiles, EagleSource, usual_taps
from bankfull.weights.qtensor import QTensor


def build_eagle(files: EagleFiles, target: Decoder) -> EagleHead:
    """The head for this target model, with the target's kernels, dtypes and device. Raises ModelError for a head of
    another model."""
    layers = len(target.blocks)
    files.suit(target.hidden, target.vocab, layers)
    target_build = target.head.build.together
    source = EagleSource(files, narrows_own(target_build.activations))
    shard = None if target_build.shard is None else Shard(target_build.shard.group)
    build = replace(target_build, source=source, prefix="", shard=shard, weights={})
    fields = eagle_fields(_rank_config(files, build.tensor_ranks), target.max_positions)
    hidden, eps = target.hidden, fields.number("rms_norm_eps")
    same = AddThen(build, lambda x: x)
    features: Features
    block: Block
    if files.fused:
        taps = files.taps or usual_taps(layers)
        fuse = gathered_linear(build.at("fc"), joined(*[HIDDEN(hidden)] * len(taps)), hidden, build.has("fc.bias"))
        block = fused_block(fields, build, hidden)

        def embed(batch: Batch) -> Tensor:
            assert batch.features is not None
            return torch.cat((target.embed(batch), batch.features), -1)

        def features(hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
            return fuse(torch.cat([tapped[layer] for layer in taps], -1))
    else:
        taps = ()
        join = gathered_linear(build.at("fc"), joined(*[HIDDEN(hidden)] * 2), hidden, build.has("fc.bias"))
        block = Block(before_mixer=same, **_branches(fields, build, hidden, hidden))

        def embed(batch: Batch) -> Tensor:
            assert batch.features is not None
            return join(torch.cat((target.embed(batch), batch.features), -1))

        def features(hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
            return hidden

    model = Decoder(
        target.vocab,
        hidden,
        max(fields.size("max_position_embeddings"), target.max_positions),
        embed=embed,
        blocks=[block],
        norm=same,
        head=_head(files, build, target, eps),
        ropes={"global": rope_of(fields, build, heads_of(fields))},
    )
    return EagleHead(spread_tokens(model, build), features, taps)


def eagle_fields(config: Mapping[str, Any], max_positions: int) -> ConfigFields:
    """The configuration of a head for a model with that context."""
    defaults = {"num_hidden_layers": 1, "max_position_embeddings": max_positions}
    return ConfigFields(config, {**TRANSFORMER, **defaults})


def fused_block(fields: ConfigFields, build: Build, hidden: int) -> FusedBlock:
    """The layer of an EAGLE-3 head."""
    at, eps = build.at("layer"), fields.number("rms_norm_eps")
    return FusedBlock(
        before_mixer=RMSNorm(at.at("hidden_norm"), hidden, eps),
        before_embedding=RMSNorm(at.at("input_layernorm"), hidden, eps),
        **_branches(fields, build, joined(*[HIDDEN(hidden)] * 2), hidden),
    )


def _branches(fields: ConfigFields, build: Build, inner: int, hidden: int) -> dict[str, Any]:
    """The layer's attention, which reads rows of `inner` columns, and its feed-forward layer, as a block has them."""
    at, eps = build.at("layer"), fields.number("rms_norm_eps")
    return {
        "mixer": _attention(at.at("self_attn"), heads_of(fields), inner, hidden),
        "feed": gated_mlp(fields, at.at("mlp")),
        "before_feed": RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
    }


def _attention(build: Build, heads: Heads, inner: int, hidden: int) -> Attention:
    query, kv = heads.queries, heads.keys

    def linear(name: str, columns: int, rows: int) -> Linear:
        at = build.at(name)
        return Linear(at, columns, rows, at.has("bias"), int8_when_batched=name != "v_proj")

    return Attention(
        build,
        heads,
        linear("q_proj", inner, query),
        linear("k_proj", inner, kv),
        linear("v_proj", inner, kv),
        linear("o_proj", query, hidden),
    )


def _head(files: EagleFiles, build: Build, target: Decoder, eps: float) -> DraftLogits:
    """A head with its own rows, or those of the target model's head that the vocabulary names, or all of them."""
    norm = RMSNorm(build.at("norm"), target.hidden, eps) if files.fused else None
    ids, at, head = files.vocabulary, build.at("lm_head"), target.head
    count = target.vocab if ids is None else len(ids)
    if at.has("weight"):

        def stored(rows: Tensor | None = None) -> QTensor:
            shape = (VOCAB(count), HIDDEN(target.hidden))
            return at.weight("weight", shape) if rows is None else at.rows_of("weight", shape, rows)

        return DraftLogits(build, gathered_linear(at, target.hidden, VOCAB(count)), stored, target.vocab, ids, norm)
    if ids is None:
        return DraftLogits(build, head.project, head.stored, target.vocab, None, norm, head.cap)

    def chosen(rows: Tensor | None = None) -> QTensor:
        return head.stored(ids if rows is None else ids[rows])

    project = gathered_linear(build, target.hidden, count, stored=chosen)
    return DraftLogits(build, project, chosen, target.vocab, ids, norm, head.cap)


def _rank_config(files: EagleFiles, ranks: int) -> Mapping[str, Any]:
    """The configuration with a tensor rank's share of the layer's heads and width."""
    if ranks == 1:
        return files.config
    try:
        return rank_config({**files.config, "model_type": "llama"}, ranks, ranks, spread=False)
    except ConfigError as error:
        raise ConfigError(f"The heads in {files.name} do not suit the layout: {error}") from None
