"""Streams in a model's top layers: lines beside the main one that predict the tokens after the newest one.

Stream j of a row predicts the token j + 1 places after the newest one. It enters the top layers with the state that
the model had there before the newest token was sampled, mapped together with that token's embedding, plus an embedding
of its own. The top layers run with the model's own weights and the streams' adapters. A stream reads the model's own
keys and values of all computed tokens, and those of the streams before it. It writes its own to KV slots after the
computed tokens, in the model's own pages: the row's next step writes these slots in every layer before it reads them.
So streams need no state of their own, and never change the model's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from bankfull.declared import Trait
from bankfull.decode.strategy import OwnModel
from bankfull.decode.stream_tree import Continuations
from bankfull.errors import ConfigError
from bankfull.layers.adapted import Adapted, Adapter, Product, adapted_attention, own_product
from bankfull.layers.attention import Attention
from bankfull.layers.batch import Batch
from bankfull.layers.decoder import Block, Decoder
from bankfull.layers.linear import Linear
from bankfull.ops import embedding
from bankfull.speculation import STREAMED
from bankfull.state.spec import Recurrent, Shared
from bankfull.weights.streams import Map, StreamWeights

CANDIDATES = 10
"""Tokens of each stream that may become drafts."""
EPS = 1e-6

MakeProduct = Callable[[Tensor], Product]


def unit(x: Tensor) -> Tensor:
    """x with a root mean square of 1."""
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype)


def enter(states: Tensor, newest: Tensor, entry: Adapter, embeddings: Tensor) -> Tensor:
    """(rows, streams, d) the streams' states before the top layers. `states` (rows, d): the model's state there, from
    which the newest token was sampled. `newest` (rows, d): the embedding of that token."""
    mapped = entry(torch.cat((unit(states).to(newest.dtype), unit(newest)), -1))
    return (states + mapped)[:, None] + embeddings


def after(hidden: Tensor, parents: Tensor, leave: Adapter) -> Tensor:
    """(..., d) hidden states of streams, given the tokens before their own: the early exit that estimates how a
    candidate follows another one. `parents` (..., d): rows of the model's head, those of the tokens before."""
    return hidden + leave(torch.cat((unit(hidden), unit(parents)), -1))


def top_attention(model: Decoder, layers: int) -> list[Attention]:
    """The mixers of the top layers; raises ConfigError where streams cannot run in them."""
    recurrent = any(isinstance(state, Recurrent) for states in model.states() for state in states)
    STREAMED.refuse("streaming", {Trait.RECURRENT: recurrent})
    if not 0 < layers < len(model.blocks):
        raise ConfigError(
            f"Streams in {layers} top layers are not possible: the model has {len(model.blocks)} layers, and at least "
            "one must come before them."
        )
    top = model.blocks[-layers:]
    STREAMED.refuse("streaming", {Trait.TOP_ATTENTION: all(map(takes_streams, top))})
    return [block.mixer for block in top if isinstance(block.mixer, Attention)]


def takes_streams(block: Block) -> bool:
    """Whether streams can run in a layer."""
    return isinstance(block.mixer, Attention) and block.feed is not None and not block.norm_last


def stream_block(block: Block, attention: Attention, maps: Mapping[str, Map], make: MakeProduct) -> Block:
    """The block with the adapters of its streams. `make`: a product with a matrix."""
    assert block.feed is not None
    down, up = maps["feed"]
    return replace(
        block,
        mixer=attention,
        feed=Adapted(block.feed, Adapter(make(down), make(up), bent=True)),
        before_mixer=copy(block.before_mixer),  # a block sets the reader of its norms
        before_feed=copy(block.before_feed),
    )


def stream_attention(attention: Attention, shared: Shared, maps: Mapping[str, Map], make: MakeProduct) -> Attention:
    qkv, out = (Adapter(make(down), make(up)) for down, up in (maps["qkv"], maps["out"]))
    return adapted_attention(attention, qkv, out, shared)


class StreamStack:
    """The streams of one model, ready to run."""

    def __init__(self, target: Decoder, streams: StreamWeights, count: int) -> None:
        """`count`: streams to run."""
        layers = len(streams.layers)
        mixers = top_attention(target, layers)
        heads = [mixer.heads for mixer in mixers]
        streams.suit(
            target.hidden,
            target.vocab,
            [(each.count + 2 * each.kv) * each.size for each in heads],
            [each.count * each.size for each in heads],
        )
        self.build, self.count, self.first = target.head.build, count, len(target.blocks) - layers
        build, make = self.build, self._product
        blocks = [
            stream_block(block, stream_attention(mixer, _shared(target, number), maps, make), maps, make)
            for number, (block, mixer, maps) in enumerate(
                zip(target.blocks[-layers:], mixers, streams.layers, strict=True), self.first
            )
        ]
        self._embed = target.embed
        self._entry, self._exit = (Adapter(make(d), make(u), bent=True) for d, u in (streams.entry, streams.exit))
        self._embeddings = streams.embeddings[:count].to(build.device, build.dtype)
        self._vocabulary = streams.vocabulary.to(build.device)
        self._most = min(CANDIDATES, len(self._vocabulary))
        self._rows = target.head.stored().rows(self._vocabulary)
        self._project = Linear(build, target.hidden, len(self._vocabulary), weight=self._rows)
        self._row = build.bind(embedding, weight=self._rows)
        self._cap = target.head.cap
        model = replace(target, embed=features_of, blocks=blocks, norm=copy(target.norm))
        self.own = OwnModel(model, build.kit, reads_features=True)

    def _product(self, weight: Tensor) -> Linear:
        return own_product(self.build, weight)

    def enter(self, states: Tensor, batch: Batch, first: Tensor, lines: Tensor | None) -> None:
        """Set the batch's features: `lines` of (rows * streams), or all. `states` (rows, d): those that entered the top
        layers, from which the rows' newest tokens were sampled. `first`: the newest tokens' lines in the batch."""
        entering = enter(states, self._embed(batch)[first], self._entry, self._embeddings).flatten(0, 1)
        batch.features = entering if lines is None else entering[lines]

    def continuations(self, hidden: Tensor, present: Tensor | None, chances: bool = True) -> Continuations:
        """Continuations from hidden states (rows, streams, d). `present` (rows, streams): which of them were computed;
        None: all. `chances`: whether logprobs are wanted; else logits, which give the same order of the candidates
        after a token, and need no sum over the vocabulary."""
        rows, count, size = hidden.shape
        logits = self._capped(self._project(hidden.flatten(0, 1)).float()).view(rows, count, -1)
        best = logits.topk(self._most, -1)
        tokens, scores = self._vocabulary[best.indices], best.values
        if chances:
            scores = scores - logits.logsumexp(-1, keepdim=True)
            if present is not None:
                scores = scores.masked_fill(~present[:, :, None], -torch.inf)
        if count == 1:
            return Continuations(tokens, _bounded(scores[:, 0]), scores.new_zeros(rows, 0, self._most, self._most))
        scored = self._row(best.indices.flatten(), self._rows, self.build.dtype, 1.0).view(rows, count, -1, size)
        known = hidden[:, 1:, None].expand(-1, -1, self._most, -1)
        exits = after(known.reshape(-1, size), scored[:, :-1].reshape(-1, size), self._exit).view_as(known)
        follows = self._capped((exits @ scored[:, 1:].mT).float())
        if not chances:
            return Continuations(tokens, scores[:, 0], follows)
        # The estimates redistribute the probability that the stream gives to its candidates.
        follows = follows.log_softmax(-1) + scores[:, 1:].logsumexp(-1)[:, :, None, None]
        return Continuations(tokens, _bounded(scores[:, 0]), _bounded(follows))

    def _capped(self, logits: Tensor) -> Tensor:
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)


def features_of(batch: Batch) -> Tensor:
    assert batch.features is not None, "streams enter before they run"
    return batch.features


def _bounded(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp_max(0)


def _shared(target: Decoder, layer: int) -> Shared:
    """The state of a layer of the target model, from the layers behind it."""
    (state,) = target.states()[layer]
    owner = state if isinstance(state, Shared) else Shared(layer)
    return Shared(owner.layer - len(target.blocks), owner.state)


def stream_lines(room: Sequence[int], count: int) -> list[int]:
    """The lines of (rows * count) that rows with this much room have."""
    return [row * count + stream for row, slots in enumerate(room) for stream in range(slots)]
