"""Mamba: no attention; the state of a sequence has a constant size."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Embedding
from bankfull.layers.mixer import Mixer
from bankfull.layers.norm import RMSNorm
from bankfull.layers.ssm import MambaMixer, MambaShape
from bankfull.models.common import head_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

MAMBA = {
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": "auto",
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": True,
    "tie_word_embeddings": True,
}
LONGEST = 1 << 17
"""Tokens of the longest sequence. The recurrence has no limit, but a row's table of tokens has one."""


def build_mamba(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, MAMBA)
    hidden = fields.size("hidden_size")
    inner = fields.size_or_none("intermediate_size") or int(fields.number("expand") * hidden)
    rank = math.ceil(hidden / 16) if config.get("time_step_rank", "auto") == "auto" else fields.size("time_step_rank")
    shape = MambaShape(hidden, inner, fields.size("state_size"), rank, fields.size("conv_kernel"))
    bias, conv_bias = fields.flag("use_bias"), fields.flag("use_conv_bias")
    return backbone(fields, build, lambda at: MambaMixer(at, shape, bias=bias, conv_bias=conv_bias))


def backbone(fields: ConfigFields, build: Build, mixer: Callable[[Build], Mixer]) -> Decoder:
    """The structure of Mamba and Mamba-2: blocks of a norm and a mixer, without feed-forward layers."""
    fields.only("hidden_act", "silu", "swish")
    hidden, vocab, eps = fields.size("hidden_size"), fields.size("vocab_size"), fields.number("layer_norm_epsilon")
    root = build.at("backbone")
    embed = Embedding(root.at("embeddings"), vocab, hidden)
    # Branches run in the model's dtype; the residual stream may be wider, from the embedding to the last norm.
    stream = torch.promote_types(build.dtype, torch.float32) if fields.flag("residual_in_fp32") else build.dtype

    def block(at: Build) -> Block:
        return Block(mixer(at.at("mixer")), before_mixer=RMSNorm(at.at("norm"), hidden, eps))

    def embed_tokens(batch: Batch) -> Tensor:
        return embed(batch.tokens).to(stream)

    return Decoder(
        vocab,
        hidden,
        LONGEST,
        embed=embed_tokens,
        blocks=[block(root.at("layers").at(i)) for i in range(fields.layers())],
        norm=RMSNorm(root.at("norm_f"), hidden, eps),
        head=head_of(fields, build, embed),
        ropes={},
        stream=stream,
    )


def _split(s: Splitting) -> None:
    s.width("intermediate_size", int(s.whole.get("expand", 2) * s.size("hidden_size")))


FAMILY = Family(build_mamba, tied_head, split=_split)
