"""OPT: learned positions, layer norms, biases everywhere, and feed-forward layers without a gate."""

from __future__ import annotations

from torch import Tensor

from bankfull.axes import POSITIONS
from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Module
from bankfull.layers.linear import Embedding, Linear
from bankfull.layers.mlp import MLP
from bankfull.layers.norm import AddThen, LayerNorm
from bankfull.models.common import head_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ops import add
from bankfull.ranks.splitting import Splitting

OPT = {
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
EPS = 1e-5
POSITION_OFFSET = 2
"""Unused rows at the start of the position table, a convention of the training framework."""


def build_opt(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, OPT)
    hidden, inner, vocab = fields.size("hidden_size"), fields.size("ffn_dim"), fields.size("vocab_size")
    outer = fields.size_or_none("word_embed_proj_dim") or hidden
    made_for, bias = fields.size("max_position_embeddings"), fields.flag("enable_bias")
    norm_first, affine = fields.flag("do_layer_norm_before"), fields.flag("layer_norm_elementwise_affine")
    count, size = fields.size("num_attention_heads"), fields.size_or_none("head_dim")
    if size is None and hidden % count:
        raise ModelError(
            f"The model's configuration has a hidden_size of {hidden}, which is no multiple of its {count} heads."
        )
    size = size or hidden // count
    heads = Heads(count, count, size, size**-0.5)
    root = build.at("model").at("decoder")
    tokens = Embedding(root.at("embed_tokens"), vocab, outer)
    places = Embedding(root.at("embed_positions"), POSITIONS(made_for + POSITION_OFFSET), hidden)
    places.table = places.table.rows(slice(POSITION_OFFSET, None))
    place = build.bind(add)
    widen = None if outer == hidden else Linear(root.at("project_in"), outer, hidden)
    narrow = None if outer == hidden else Linear(root.at("project_out"), hidden, outer)

    def norm(at: Build) -> AddThen:
        return AddThen(at, LayerNorm(at, hidden, EPS, affine))

    def block(at: Build) -> Block:
        attn = at.at("self_attn")
        outers = {"q_proj": heads.queries, "k_proj": heads.keys, "v_proj": heads.keys}
        q, k, v = (Linear(attn.at(name), hidden, outer, bias) for name, outer in outers.items())
        out = Linear(attn.at("out_proj"), heads.queries, hidden, bias)
        return Block(
            Attention(attn, heads, q, k, v, out, rope=None),
            before_mixer=norm(at.at("self_attn_layer_norm")),
            feed=MLP.read(
                at, hidden, inner, fields.text("activation_function"), ("fc1", "fc2"), bias, int8_when_batched=False
            ),
            before_feed=norm(at.at("final_layer_norm")),
            norm_last=not norm_first,
        )

    def embed(batch: Batch) -> Tensor:
        x = tokens(batch.tokens)
        return place(x if widen is None else widen(x), places(batch.positions))

    has_norm = norm_first and not fields.flag("_remove_final_layer_norm")
    return Decoder(
        vocab,
        outer,
        made_for,
        embed=embed,
        blocks=[block(root.at("layers").at(i)) for i in range(fields.layers())],
        norm=AddThen(root, in_turn(norm(root.at("final_layer_norm")) if has_norm else None, narrow)),
        head=head_of(fields, build, tokens),
        ropes={},
        stream_size=hidden,
    )


def in_turn(*modules: Module | None) -> Module:
    def run(x: Tensor) -> Tensor:
        for module in modules:
            x = x if module is None else module(x)
        return x

    return run


def _split(s: Splitting) -> None:
    s.heads()
    s.feed_width("ffn_dim")


FAMILY = Family(build_opt, tied_head, split=_split)
