"""Llama 2/3/3.x and everything built like it: SmolLM2, Mistral."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Head
from bankfull.layers.linear import Embedding, Linear
from bankfull.layers.mlp import GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.models.registry import Config, Family


def heads_of(config: Config, **more: Any) -> Heads:
    count = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // count
    return Heads(count, config.get("num_key_value_heads") or count, size, scale=size**-0.5, **more)


def attention(config: Config, build: Build, heads: Heads, *, qkv_bias: bool, out_bias: bool, **more: Any) -> Attention:
    """Four linears under their customary names."""
    hidden, query, kv = config["hidden_size"], heads.count * heads.size, heads.kv * heads.size
    return Attention(
        build, heads,
        Linear(build.at("q_proj"), hidden, query, qkv_bias),
        Linear(build.at("k_proj"), hidden, kv, qkv_bias),
        Linear(build.at("v_proj"), hidden, kv, qkv_bias),
        Linear(build.at("o_proj"), query, hidden, out_bias),
        **more,
    )  # fmt: skip


def gated_mlp(config: Config, build: Build, kind: str, bias: bool = False) -> GatedMLP:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return GatedMLP(
        build,
        Linear(build.at("gate_proj"), hidden, inner, bias),
        Linear(build.at("up_proj"), hidden, inner, bias),
        Linear(build.at("down_proj"), inner, hidden, bias),
        kind,
    )


def rope_of(config: Config, build: Build, heads: Heads) -> Rope:
    size = int(heads.size * (config.get("partial_rotary_factor") or 1.0))
    theta = config.get("rope_theta") or 10000.0
    return Rope(build, size, theta, config.get("rope_scaling"), config["max_position_embeddings"])


def head_of(config: Config, build: Build, embed: Embedding, cap: float | None = None) -> Head:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    tied = config.get("tie_word_embeddings", False)
    project = Linear(build.at("lm_head"), hidden, vocab, weight=embed.table if tied else None)
    return Head(build, project, cap)


def tied_head(config: Config) -> tuple[str, ...]:
    return (r"^lm_head\.weight$",) if config.get("tie_word_embeddings", False) else ()


def build_llama(config: Config, build: Build) -> Decoder:
    hidden, eps = config["hidden_size"], config["rms_norm_eps"]
    heads = heads_of(config, window=config.get("sliding_window"))
    bias = bool(config.get("attention_bias", False))
    root = build.at("model")
    embed = Embedding(root.at("embed_tokens"), config["vocab_size"], hidden)

    def block(at: Build) -> Block:
        return Block(
            attention(config, at.at("self_attn"), heads, qkv_bias=bias, out_bias=bias),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=gated_mlp(config, at.at("mlp"), config.get("hidden_act", "silu"), bool(config.get("mlp_bias", False))),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
        )

    def embed_tokens(batch: Batch) -> Tensor:
        return embed(batch.tokens)

    return Decoder(
        config["vocab_size"], hidden, config["max_position_embeddings"],
        embed=embed_tokens,
        blocks=[block(root.at("layers").at(i)) for i in range(config["num_hidden_layers"])],
        norm=RMSNorm(root.at("norm"), hidden, eps),
        head=head_of(config, build, embed),
        ropes={"global": rope_of(config, build, heads)},
    )  # fmt: skip


FAMILY = Family(build_llama, tied_head)
