"""Parts that the families share: a transformer's layers under their usual tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from bankfull.axes import HEAD, HIDDEN, VOCAB
from bankfull.errors import ModelError
from bankfull.layers.attention import Attention, Heads
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed, Head, Module
from bankfull.layers.linear import Embedding, Linear, Projection
from bankfull.layers.mixer import Mixer
from bankfull.layers.mlp import GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.layers.rope import Rope
from bankfull.models.fields import FULL, SLIDING, ConfigFields
from bankfull.models.registry import Config
from bankfull.spread.gathered import GatheredLinear, gathered_linear
from bankfull.weights.qtensor import QTensor

#: Defaults of the fields that a transformer's configuration may leave out.
TRANSFORMER = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def heads_of(
    fields: ConfigFields, *, scale: float | None = None, window: int | None = None, cap: float | None = None
) -> Heads:
    count = fields.size("num_attention_heads")
    kv = fields.size_or_none("num_key_value_heads") or count
    size = fields.size_or_none("head_dim") or fields.size("hidden_size") // count
    if count % kv:
        raise ModelError(f"The model's configuration has {count} attention heads, which {kv} key heads cannot share.")
    return Heads(count, kv, size, size**-0.5 if scale is None else scale, window, cap)


def windows_of(fields: ConfigFields, default: Sequence[str]) -> list[int | None]:
    """The sliding window of each layer by `layer_types`: a number of tokens, or None for full attention."""
    types = fields.per_layer("layer_types", (FULL, SLIDING), default)
    window = fields.size_or_none("sliding_window")
    if window is None and SLIDING in types:
        raise ModelError("The model's configuration has layers of type 'sliding_attention' but no 'sliding_window'.")
    return [window if kind == SLIDING else None for kind in types]


def same_window(fields: ConfigFields) -> int | None:
    """The sliding window of families in which all layers are equal."""
    window = fields.size_or_none("sliding_window")
    kind = FULL if window is None else SLIDING
    fields.per_layer("layer_types", (kind,), [kind] * fields.layers())
    return window


def attention(
    fields: ConfigFields, build: Build, heads: Heads, *, qkv_bias: bool, out_bias: bool, **more: Any
) -> Attention:
    hidden = fields.size("hidden_size")
    return Attention(
        build,
        heads,
        Linear(build.at("q_proj"), hidden, heads.queries, qkv_bias, int8_when_batched=True),
        Linear(build.at("k_proj"), hidden, heads.keys, qkv_bias, int8_when_batched=True),
        Linear(
            build.at("v_proj"), hidden, heads.keys, qkv_bias
        ),  # rounding it would cost a fifth of all accuracy loss, and it is small
        Linear(build.at("o_proj"), heads.queries, hidden, out_bias, int8_when_batched=True),
        **more,
    )


def head_norms(fields: ConfigFields, build: Build, heads: Heads, offset: float = 0.0) -> dict[str, RMSNorm]:
    """Norms of each head's queries and keys, as arguments of `attention`."""
    eps = fields.number("rms_norm_eps")
    return {name: RMSNorm(build.at(name), HEAD(heads.size), eps, offset) for name in ("q_norm", "k_norm")}


def gated_mlp(
    fields: ConfigFields,
    build: Build,
    activation: str = "hidden_act",
    inner: int | None = None,
    stacks: bool = True,
) -> GatedMLP:
    """`inner`: the layer's width, where it is not the model's. `stacks`: as for `GatedMLP`."""
    inner, bias = fields.size("intermediate_size") if inner is None else inner, fields.flag("mlp_bias")
    return GatedMLP.read(build, fields.size("hidden_size"), inner, fields.text(activation), bias=bias, stacks=stacks)


def rope_of(fields: ConfigFields, build: Build, heads: Heads) -> Rope:
    fields.only("rope_local_base_freq")
    fields.only("partial_rotary_factor", 1)
    scaling, made_for = fields.object_or_none("rope_scaling"), fields.size("max_position_embeddings")
    return Rope(build, heads.size, fields.number("rope_theta"), scaling, made_for)


def partial_rope(fields: ConfigFields, build: Build, heads: Heads) -> Rope:
    """RoPE over the first dimensions of a head only."""
    scaling, made_for = fields.object_or_none("rope_scaling"), fields.size("max_position_embeddings")
    return Rope(build, rotated_size(fields, heads), fields.number("rope_theta"), scaling, made_for)


def rotated_size(fields: ConfigFields, heads: Heads) -> int:
    part = fields.number("partial_rotary_factor")
    if not 0 < part <= 1:
        raise ModelError(f"The model's configuration has partial_rotary_factor = {part}, which is not in (0, 1].")
    return int(heads.size * part)


def tied_head(config: Config) -> tuple[str, ...]:
    """The pattern of a tied head's copy of the embedding. A separate head is always read, so it is never ignored."""
    return (r"^lm_head\.weight$",)


def head_of(
    fields: ConfigFields,
    build: Build,
    embed: Embedding,
    cap: float | None = None,
    name: str = "lm_head",
    tied: str = "tie_word_embeddings",
) -> Head:
    """The embedding's table again, where the field `tied` says so, or the matrix `name`."""
    vocab, hidden = embed.rows, embed.table.shape[1]
    at = build.at_stage(False, True).at(name)
    if fields.flag(tied):
        linear = Linear(at, hidden, embed.table.shape[0], weight=embed.table, int8_when_batched=True)
        project: Projection = linear if embed.share is None else GatheredLinear(at, linear, embed.share)
        return Head(build, project, embed.stored, cap)

    def stored(rows: Tensor | None = None) -> QTensor:
        shape = (VOCAB(vocab), HIDDEN(hidden))
        return at.weight("weight", shape) if rows is None else at.rows_of("weight", shape, rows)

    return Head(build, gathered_linear(at, hidden, VOCAB(vocab), int8_when_batched=True), stored, cap)


def decoder(
    fields: ConfigFields,
    build: Build,
    blocks: Sequence[Block],
    ropes: Mapping[str, Rope],
    *,
    root: Build | None = None,
    embed_scale: float = 1.0,
    norm_offset: float = 0.0,
    cap: float | None = None,
    logit_scale: float = 1.0,
    norm_name: str = "norm",
) -> Decoder:
    """Blocks between an embedding, a last norm and a head. `root`: the prefix of all names but the head's."""
    root = root or build.at("model")
    vocab, hidden = fields.size("vocab_size"), fields.size("hidden_size")
    tied = fields.flag("tie_word_embeddings")
    embed = Embedding(root.at_stage(True, tied).at("embed_tokens"), vocab, hidden, embed_scale, spread=True)

    norm = RMSNorm(root.at(norm_name), hidden, fields.number("rms_norm_eps"), norm_offset)
    if logit_scale != 1.0:
        assert not norm_offset, "the norm's weight carries the scale"
        norm.weight = norm.weight * logit_scale

    def embed_tokens(batch: Batch) -> Tensor:
        return embed(batch.tokens)

    return Decoder(
        vocab,
        hidden,
        fields.size("max_position_embeddings"),
        embed=embed_tokens,
        blocks=blocks,
        norm=norm,
        head=head_of(fields, build, embed, cap),
        ropes=ropes,
    )


def prenorm_decoder(
    fields: ConfigFields,
    build: Build,
    heads: Heads,
    mixer: Callable[[int, Build], Mixer],
    feed: Callable[[ConfigFields, Build], Module] = gated_mlp,
    rope: Callable[[ConfigFields, Build, Heads], Rope] = rope_of,
    feed_of: Callable[[int, Build], Feed] | None = None,
    **more: Any,
) -> Decoder:
    """Llama's structure, which most families share: x + mix(norm(x)), then x + feed(norm(x)), and one RoPE.

    `feed_of` replaces `feed` where layers differ: it gets the layer's number and the names below the layer. `more`:
    arguments of `decoder`."""
    hidden, eps = fields.size("hidden_size"), fields.number("rms_norm_eps")

    def block(layer: int) -> Block:
        at = build.at("model").at("layers").at(layer)
        return Block(
            mixer(layer, at.at("self_attn")),
            before_mixer=RMSNorm(at.at("input_layernorm"), hidden, eps),
            feed=feed(fields, at.at("mlp")) if feed_of is None else feed_of(layer, at),
            before_feed=RMSNorm(at.at("post_attention_layernorm"), hidden, eps),
        )

    # RoPE comes last: by then the file's tensors have confirmed the sizes that it allocates.
    blocks = [block(layer) for layer in range(fields.layers())]
    return decoder(fields, build, blocks, {"global": rope(fields, build, heads)}, **more)
