"""SDAR: block diffusion in the layout of a dense Qwen 3. Tokens of a block see each other and all blocks before, so
finished blocks have an exact KV cache."""

from __future__ import annotations

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, head_norms, heads_of, prenorm_decoder, tied_head
from bankfull.models.diffusion import denoising, seeing_blocks
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

SDAR = TRANSFORMER | {"head_dim": 128, "block_size": 4, "mask_token_id": 151669}


def build_sdar(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, SDAR)
    fields.only("use_sliding_window", False)
    block, bias = fields.size("block_size"), fields.flag("attention_bias")
    heads = seeing_blocks(heads_of(fields), block)

    def mixer(layer: int, at: Build) -> Attention:
        return attention(fields, at, heads, qkv_bias=bias, out_bias=bias, **head_norms(fields, at, heads))

    return denoising(prenorm_decoder(fields, build, heads, mixer), fields, block)


FAMILY = Family(build_sdar, tied_head, split=split_transformer)
