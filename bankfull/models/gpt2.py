"""GPT-2: learned positions, layer norms, biases everywhere, one matrix for queries, keys and values, a tied head."""

from __future__ import annotations

from torch import Tensor

from bankfull.axes import POSITIONS
from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Embedding, Linear, split_linear
from bankfull.layers.mlp import MLP
from bankfull.layers.norm import AddThen, LayerNorm
from bankfull.models.common import head_of, tied_head
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ops import add
from bankfull.ranks.splitting import Splitting

GPT2 = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


def build_gpt2(config: Config, build: Build) -> Decoder:
    fields = ConfigFields(config, GPT2)
    fields.only("add_cross_attention", False)
    hidden, vocab = fields.size("hidden_size"), fields.size("vocab_size")
    inner = fields.size_or_none("intermediate_size") or 4 * hidden
    made_for, eps = fields.size("max_position_embeddings"), fields.number("layer_norm_epsilon")
    count, size = _heads(fields, hidden)
    scaled, by_layer = fields.flag("scale_attn_weights"), fields.flag("scale_attn_by_inverse_layer_idx")
    # The first published files have no prefix.
    root = build if build.has("wte.weight") else build.at("transformer")
    tokens = Embedding(root.at("wte"), vocab, hidden)
    places = Embedding(root.at("wpe"), POSITIONS(made_for), hidden)
    place = build.bind(add)

    def norm(at: Build) -> AddThen:
        return AddThen(at, LayerNorm(at, hidden, eps))

    def block(layer: int) -> Block:
        at = root.at("h").at(layer)
        attn = at.at("attn")
        scale = (size**-0.5 if scaled else 1.0) / (layer + 1 if by_layer else 1)
        heads = Heads(count, count, size, scale)
        outers = (heads.queries, heads.keys, heads.keys)
        q, k, v = split_linear(attn.at("c_attn"), hidden, outers, True, int8_when_batched=(True, True, False))
        out = Linear(attn.at("c_proj"), heads.queries, hidden, True, int8_when_batched=True)
        return Block(
            Attention(attn, heads, q, k, v, out, rope=None),
            before_mixer=norm(at.at("ln_1")),
            feed=MLP.read(
                at.at("mlp"), hidden, inner, fields.text("activation_function"), ("c_fc", "c_proj"), bias=True
            ),
            before_feed=norm(at.at("ln_2")),
        )

    def embed(batch: Batch) -> Tensor:
        return place(tokens(batch.tokens), places(batch.positions))

    return Decoder(
        vocab,
        hidden,
        made_for,
        embed=embed,
        blocks=[block(layer) for layer in range(fields.layers())],
        norm=norm(root.at("ln_f")),
        head=head_of(fields, build, tokens),
        ropes={},
    )


def _heads(fields: ConfigFields, hidden: int) -> tuple[int, int]:
    count, size = fields.size("num_attention_heads"), fields.size_or_none("head_dim")
    if size is None and hidden % count:
        raise ModelError(
            f"The model's configuration has a hidden size of {hidden}, which is no multiple of its {count} heads."
        )
    return count, size or hidden // count


def _split(s: Splitting) -> None:
    s.heads()
    s.feed_width("intermediate_size", 4 * s.size("hidden_size"))


FAMILY = Family(build_gpt2, tied_head, split=_split)
