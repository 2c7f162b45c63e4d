"""Dream: a Qwen 2 whose tokens see the whole sequence. It was initialized from Qwen 2.5, so the hidden state of a
position predicts the token of the next one."""

from __future__ import annotations

from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder, tied_head
from bankfull.models.diffusion import denoising, seeing_blocks
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import split_transformer

DREAM = TRANSFORMER | {"mask_token_id": 151666}


def build_dream(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, DREAM)
    fields.only("use_sliding_window", False)
    fields.only("use_mrope", False)
    fields.only("block_size")  # a later Dream that sees blocks, and predicts a position's own token
    heads = seeing_blocks(heads_of(fields))

    def mixer(layer: int, at: Build) -> Attention:
        return attention(fields, at, heads, qkv_bias=True, out_bias=False)

    return denoising(prenorm_decoder(fields, build, heads, mixer), fields, shifted=True)


FAMILY = Family(build_dream, tied_head, split=split_transformer)
