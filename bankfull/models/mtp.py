"""The multi-token-prediction module of DeepSeek-V3 checkpoints as a model: one decoder layer after the last one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.batch import Batch
from bankfull.layers.decoder import Decoder
from bankfull.layers.eagle import DraftLogits, EagleHead
from bankfull.layers.norm import RMSNorm
from bankfull.models.deepseek import block_of, fields_of, prediction_modules
from bankfull.models.registry import Config, rank_config
from bankfull.spread.gathered import gathered_linear
from bankfull.spread.tokens import spread_tokens

FAMILIES_WITH_MODULES = ("deepseek_v3",)


def build_mtp(config: Config, target: Decoder) -> EagleHead:
    """The checkpoint's first module, with the target model's embedding, RoPE, head, kernels and dtypes."""
    build = replace(target.head.build.together, prefix="")
    kind, layer = config.get("model_type"), len(target.blocks)
    layers = build.at("model").at("layers")
    at = layers.at(layer)
    if kind not in FAMILIES_WITH_MODULES:
        families = ", ".join(FAMILIES_WITH_MODULES)
        raise ModelError(
            f"speculative='mtp' needs a checkpoint with a multi-token-prediction module ({families}), and this model "
            f"is a {kind!r}; choose another way of speculative decoding."
        )
    if build.shard is not None:
        config = rank_config(config, *build.split, build.experts is not None).own
    fields = fields_of(config)
    if not prediction_modules(fields) or not at.has("eh_proj.weight"):
        raise ModelError(
            "speculative='mtp' needs the checkpoint's multi-token-prediction module, and these files do not contain "
            f"one (model.layers.{layer}.eh_proj.weight); use the original checkpoint, or choose another way."
        )
    hidden, eps = target.hidden, fields.number("rms_norm_eps")
    of_embedding, of_hidden = (RMSNorm(at.at(name), hidden, eps) for name in ("enorm", "hnorm"))
    join = gathered_linear(at.at("eh_proj"), 2 * hidden, hidden)

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
