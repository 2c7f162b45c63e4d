"""The multi-token-prediction module of DeepSeek-V3 checkpoints as a model: one decoder layer after the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.axes import HIDDEN, joined
from bankfull.declared import Trait
from bankfull.layers.batch import Batch
from bankfull.layers.decoder import Decoder
from bankfull.layers.eagle import DraftLogits, EagleHead
from bankfull.layers.norm import RMSNorm
from bankfull.models.deepseek import block_of, fields_of, prediction_modules
from bankfull.models.registry import Config, rank_config
from bankfull.speculation import SPECULATIVE
from bankfull.spread.gathered import gathered_linear
from bankfull.spread.tokens import spread_tokens
from bankfull.weights.source import TensorSource

FAMILIES_WITH_MODULES = ("deepseek_v3",)


def has_module(config: Config, source: TensorSource) -> bool:
    """Whether the files of a model contain a module that this engine runs."""
    if config.get("model_type") not in FAMILIES_WITH_MODULES:
        return False
    fields = fields_of(config)
    return prediction_modules(fields) > 0 and source.has(f"model.layers.{fields.layers()}.eh_proj.weight")


def build_mtp(config: Config, target: Decoder) -> EagleHead:
    """The checkpoint's first module, with the target model's embedding, RoPE, head, kernels and dtypes."""
    build = replace(target.head.build.together, prefix="")
    layer = len(target.blocks)
    layers = build.at("model").at("layers")
    at = layers.at(layer)
    SPECULATIVE["mtp"].refuse("speculative='mtp'", {Trait.PREDICTION_MODULE: has_module(config, build.source)})
    if build.shard is not None:
        config = rank_config(config, *build.split, build.experts is not None)
    fields = fields_of(config)
    hidden, eps = target.hidden, fields.number("rms_norm_eps")
    of_embedding, of_hidden = (RMSNorm(at.at(name), hidden, eps) for name in ("enorm", "hnorm"))
    join = gathered_linear(at.at("eh_proj"), joined(*[HIDDEN(hidden)] * 2), hidden)

    def embed(batch: Batch) -> Tensor:
        assert batch.features is not None
        return join(torch.cat((of_embedding(target.embed(batch)), of_hidden(batch.features)), -1))

    def features(hidden: Tensor, tapped: Mapping[int, Tensor]) -> Tensor:
        return hidden

    head = target.head
    model = Decoder(
        target.vocab,
        hidden,
        target.max_positions,
        embed=embed,
        blocks=[block_of(config, layers)(layer)],
        norm=RMSNorm(at.at("shared_head").at("norm"), hidden, eps),
        head=DraftLogits(build, head.project, head.stored, target.vocab, None, None, head.cap),
        ropes=target.ropes,
    )
    return EagleHead(spread_tokens(model, build), features, ())
