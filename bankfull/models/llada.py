"""LLaDA: a Llama whose tokens see the whole sequence, trained to predict masked tokens. Names and fields are OLMo's."""

from __future__ import annotations

from typing import Any

from bankfull.errors import ModelError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Embedding, Linear
from bankfull.layers.mlp import GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.models.common import head_of, heads_of, rope_of
from bankfull.models.diffusion import denoising, seeing_blocks
from bankfull.models.fields import ConfigFields
from bankfull.models.registry import Config, Family
from bankfull.ranks.splitting import Splitting

LLADA: dict[str, Any] = {
    "activation_type": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "include_bias": False,
    "include_qkv_bias": False,
    "weight_tying": True,
    "mlp_ratio": 4,
}
NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_sequence_length",
}
"""Fields under their usual names, and under LLaDA's."""


def build_llada(config: Config, build: Build) -> Decoder:
    fields = ConfigFields({usual: config.get(own) for usual, own in NAMES.items()} | dict(config), LLADA)
    for name, supported in (
        ("block_type", "llama"),
        ("layer_norm_type", "rms"),
        ("block_group_size", 1),
        ("layer_norm_with_affine", True),
        ("rope", True),
    ):
        fields.only(name, supported)
    for name in ("alibi", "attention_layer_norm", "input_emb_norm", "multi_query_attention", "scale_logits"):
        fields.only(name, False)
    fields.only("clip_qkv")
    heads = seeing_blocks(heads_of(fields))
    hidden, eps, bias = fields.size("hidden_size"), fields.number("rms_norm_eps"), fields.flag("include_bias")
    qkv_bias = bias or fields.flag("include_qkv_bias")
    inner = fields.size_or_none("mlp_hidden_size") or int(fields.number("mlp_ratio") * hidden)
    root = build.at("model").at("transformer")
    vocab = _embedded(fields)
    embed = Embedding(root.at("wte"), vocab, hidden)

    def block(at: Build) -> Block:
        return Block(
            Attention(
                at,
                heads,
                Linear(at.at("q_proj"), hidden, heads.queries, qkv_bias, int8_when_batched=True),
                Linear(at.at("k_proj"), hidden, heads.keys, qkv_bias, int8_when_batched=True),
                Linear(at.at("v_proj"), hidden, heads.keys, qkv_bias),
                Linear(at.at("attn_out"), heads.queries, hidden, bias, int8_when_batched=True),
            ),
            before_mixer=RMSNorm(at.at("attn_norm"), hidden, eps),
            feed=GatedMLP.read(
                at, hidden, inner, fields.text("activation_type"), ("ff_proj", "up_proj", "ff_out"), bias
            ),
            before_feed=RMSNorm(at.at("ff_norm"), hidden, eps),
        )

    blocks = [block(root.at("blocks").at(layer)) for layer in range(fields.layers())]
    model = Decoder(
        vocab,
        hidden,
        fields.size("max_position_embeddings"),
        embed=lambda batch: embed(batch.tokens),
        blocks=blocks,
        norm=RMSNorm(root.at("ln_f"), hidden, eps),
        head=head_of(fields, build, embed, name="model.transformer.ff_out", tied="weight_tying"),
        ropes={"global": rope_of(fields, build, heads)},
    )
    return denoising(model, fields)


def _embedded(fields: ConfigFields) -> int:
    """Rows of the embedding: `embedding_size`, which may be padded, or the vocabulary."""
    vocab = fields.size("vocab_size")
    rows = fields.size_or_none("embedding_size") or vocab
    if rows < vocab:
        raise ModelError(
            f"The model's configuration has embedding_size = {rows}, less than its vocabulary of {vocab} tokens; use "
            "the file that belongs to the model."
        )
    return rows


def _split(s: Splitting) -> None:
    for usual, own in (
        ("num_attention_heads", "n_heads"),
        ("num_key_value_heads", "n_kv_heads"),
        ("hidden_size", "d_model"),
    ):
        s.whole = {**s.whole, usual: s.whole.get(usual) or s.whole.get(own)}
    s.heads()
    s.own |= {"n_heads": s.own["num_attention_heads"], "n_kv_heads": s.own["num_key_value_heads"]}
    s.feed_width("mlp_hidden_size", int(s.whole.get("mlp_ratio", 4) * s.size("hidden_size")))


FAMILY = Family(build_llada, split=_split)
