"""GPT-NeoX and Pythia: attention and feed-forward side by side, RoPE over a part of each head, layer norms, biases."""

from __future__ import annotations

import torch
from torch import Tensor

from bankfull.axes import HEADS
from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Embedding, Linear, split_linear
from bankfull.layers.mlp import MLP
from bankfull.layers.norm import AddThen, LayerNorm
from bankfull.models.common import head_of, partial_rope
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ops import add
from bankfull.ranks.splitting import split_transformer

GPT_NEOX = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "attention_bias": True,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "qkv_by_head": True,
}


def build_gpt_neox(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, GPT_NEOX)
    hidden, inner, vocab = (fields.size(name) for name in ("hidden_size", "intermediate_size", "vocab_size"))
    eps, bias = fields.number("layer_norm_eps"), fields.flag("attention_bias")
    count, size = fields.size("num_attention_heads"), fields.size_or_none("head_dim")
    if size is None and hidden % count:
        raise ModelError(
            f"The model's configuration has a hidden_size of {hidden}, which is no multiple of its {count} heads."
        )
    size = size or hidden // count
    heads = Heads(count, count, size, size**-0.5)
    by_head = fields.flag("qkv_by_head")
    order, stored = (by_part(heads), HEADS(count, 3 * size)) if by_head else (None, None)
    plus = build.bind(add) if fields.flag("use_parallel_residual") else None
    root = build.at("gpt_neox")
    tokens = Embedding(root.at("embed_in"), vocab, hidden)

    def norm(at: Build) -> AddThen:
        return AddThen(at, LayerNorm(at, hidden, eps))

    def block(at: Build) -> Block:
        attn = at.at("attention")
        outers, at_qkv = (heads.queries, heads.keys, heads.keys), attn.at("query_key_value")
        q, k, v = split_linear(at_qkv, hidden, outers, bias, (True, True, False), order=order, stored=stored)
        out = Linear(attn.at("dense"), heads.queries, hidden, bias, int8_when_batched=True)
        return Block(
            Attention(attn, heads, q, k, v, out),
            before_mixer=norm(at.at("input_layernorm")),
            feed=MLP.read(
                at.at("mlp"), hidden, inner, fields.text("hidden_act"), ("dense_h_to_4h", "dense_4h_to_h"), bias=True
            ),
            before_feed=norm(at.at("post_attention_layernorm")),
            add_branches=plus,
        )

    def embed(batch: Batch) -> Tensor:
        return tokens(batch.tokens)

    blocks = [block(root.at("layers").at(layer)) for layer in range(fields.layers())]
    return Decoder(
        vocab,
        hidden,
        fields.size("max_position_embeddings"),
        embed=embed,
        blocks=blocks,
        norm=norm(root.at("final_layer_norm")),
        head=head_of(fields, build, tokens, name="embed_out"),
        ropes={"global": partial_rope(fields, build, heads)},
    )


def by_part(heads: Heads) -> Tensor:
    """Files hold queries, keys and values head by head; this order puts queries first, then keys, then values."""
    return torch.arange(3 * heads.count * heads.size).view(heads.count, 3, heads.size).transpose(0, 1).flatten()


def ignored(config: Config) -> tuple[str, ...]:
    """A tied head's copy of the embedding, and the masks that early files contain."""
    return (r"^embed_out\.weight$", r"\.attention\.(masked_)?bias$")


FAMILY = Family(build_gpt_neox, ignored, split=split_transformer)
