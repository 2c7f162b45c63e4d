"""An EAGLE-3 head in training: one decoder layer that continues features of three layers of the frozen model.

The head is trained on its own predictions (training-time test). In step 1 the entry of a token reads the true feature
of the token before it; in step s it reads the feature that step s - 1 has predicted for that token. Its attention then
sees what it sees while drafting: entries with true features up to the newest known token, and its own predictions after
it. The result of each step learns the distribution that the model itself has for the next token, restricted to the
reduced vocabulary and projected by rows of the model's own head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from bankfull.assembly import Assembled
from bankfull.layers.attention import Attention
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Angles
from bankfull.layers.norm import RMSNorm
from bankfull.models.common import rope_of
from bankfull.models.eagle import eagle_fields, fused_block
from bankfull.ops import rms_norm
from bankfull.ops.cost import Cost
from bankfull.runtime.batch import bare_batch
from bankfull.train.gradients import training_build
from bankfull.train.states import Examples
from bankfull.train.trainer import RANKS, Acceptance
from bankfull.weights.eagle import BLOCKS, EagleFiles, usual_taps, write_eagle
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize

LOSS_DECAY = 0.8
"""Weight of a step's loss relative to that of the step before it."""
EPS, THETA = 1e-5, 10000.0
USUAL_SIZE = 64
"""Numbers of an attention head, for a model without attention."""


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences as a rectangle (sequences, longest); the lines of a sequence beyond its end are zeros."""

    embedded: Tensor
    states: Tensor
    """The states of `HiddenStates`."""
    tokens: Tensor
    starts: list[int]
    """The first token of each answer."""
    ends: list[int]


class UnfoldedAttention:
    """The layer's attention in the training-time test, which no batch of sequences has: a query of the last step sees
    the first step's entries up to the newest known token, and of each later step the one entry on its own path."""

    def __init__(self, attention: Attention, sequences: int, places: Tensor) -> None:
        """`places`: of each sequence's tokens."""
        self.attention, self.states, self.rope = attention, attention.states, attention.rope
        self._sequences = sequences
        self._ahead = places[None, :] - places[:, None]
        """(query, key) the distance of the key's token."""
        self._keys, self._values = list[Tensor](), list[Tensor]()

    def plan(self, *unused: object) -> None:
        return None

    def run(self, x: Tensor, states: object, meta: object, angles: Angles | None) -> Tensor:
        heads = self.attention.heads
        q, k, v = (part.unflatten(0, (self._sequences, -1)) for part in self.attention.projected(x, angles))
        self._keys.append(k.repeat_interleave(heads.count // heads.kv, 2))
        self._values.append(v.repeat_interleave(heads.count // heads.kv, 2))
        return self.attention.result(x, self._mixed(q * heads.scale).flatten(0, 1).flatten(1))

    def _mixed(self, q: Tensor) -> Tensor:
        keys, values, last = self._keys, self._values, len(self._keys) - 1
        scores = torch.einsum("bqhd,bkhd->bhqk", q, keys[0]).float().masked_fill(self._ahead > -last, -torch.inf)
        on_path = [(_later(keys[step], last - step), _later(values[step], last - step)) for step in range(1, last + 1)]
        beside = [(q * key).sum(-1).float().transpose(1, 2)[..., None] for key, _ in on_path]
        weights = torch.cat((scores, *beside), -1).softmax(-1).to(q.dtype)
        longest = q.shape[1]
        mixed = torch.einsum("bhqk,bkhd->bqhd", weights[..., :longest], values[0])
        for i, (_, value) in enumerate(on_path):
            mixed = mixed + weights[..., longest + i].transpose(1, 2)[..., None] * value
        return mixed


class EagleTrainer:
    name = "eagle"

    def __init__(
        self, loaded: Assembled, depth: int, inner: int, vocabulary: list[int], about: Mapping[str, Any]
    ) -> None:
        """`depth`: steps of the training-time test. `inner`: the width of the feed-forward layer; 0: 8/3 of the hidden
        size. `about`: the recipe, for config.json."""
        model, self._device = loaded.model, loaded.device
        device, size = self._device.torch, model.hidden
        self.depth, self._model, self._about, self._size = depth, model, about, size
        self.taps = usual_taps(len(model.blocks))
        mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, Attention)]
        heads = mixers[-1].heads if mixers else None
        self._count, self._kv, self._of_head = (
            (heads.count, heads.kv, heads.size)
            if heads is not None
            else (max(1, size // USUAL_SIZE),) * 2 + (USUAL_SIZE,)
        )
        self._inner = inner or -(-size * 8 // 3 // BLOCKS.block) * BLOCKS.block
        self._ids = torch.tensor(vocabulary, device=device)
        self._reduced = torch.full((model.vocab,), -1, device=device)
        """The place of each token id in the reduced vocabulary; -1 for the others."""
        self._reduced[self._ids] = torch.arange(len(vocabulary), device=device)
        self._autocast = device.type == "cuda"
        stored = model.head.stored().rows(self._ids)
        self._rows = stored.dequantize(torch.bfloat16 if self._autocast else torch.float32).clone()
        self._row_bytes = stored.nbytes
        self._parameters = {name: value.to(device).requires_grad_() for name, value in self._initial().items()}

    def _initial(self) -> dict[str, Tensor]:
        """Matrices at random; `fc` begins as the mean of the taps."""
        generator, size = torch.Generator().manual_seed(0), self._size
        query, kv = self._count * self._of_head, self._kv * self._of_head

        def drawn(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

        taps = len(self.taps)
        tensors = {
            "fc.weight": torch.eye(size).repeat(1, taps) / taps + drawn(size, size * taps, 0.1),
            "layer.self_attn.q_proj.weight": drawn(query, 2 * size),
            "layer.self_attn.k_proj.weight": drawn(kv, 2 * size),
            "layer.self_attn.v_proj.weight": drawn(kv, 2 * size),
            "layer.self_attn.o_proj.weight": drawn(size, query, 0.5),
            "layer.mlp.gate_proj.weight": drawn(self._inner, size),
            "layer.mlp.up_proj.weight": drawn(self._inner, size),
            "layer.mlp.down_proj.weight": drawn(size, self._inner, 0.5),
        }
        norms = ("layer.hidden_norm", "layer.input_layernorm", "layer.post_attention_layernorm", "norm")
        tensors |= {f"{name}.weight": torch.ones(size) for name in norms}
        norm = self._model.norm
        if isinstance(norm, RMSNorm):  # the rows of the model's head are made for the scale of its last norm
            tensors["norm.weight"] = (norm.weight.detach().float() + norm.offset).cpu()
        return tensors

    def parameters(self) -> dict[str, Tensor]:
        return self._parameters

    def loss(self, examples: Examples) -> Tensor:
        batch = self._padded(examples)
        total, weight = batch.states.new_zeros((), dtype=torch.float32), 0.0
        with torch.autocast(self._device.kind, torch.bfloat16, enabled=self._autocast):
            with torch.no_grad():
                answers = self._places(batch, 0, 0)
                wanted = linear(batch.states.flatten(0, 1)[answers, : self._size].to(self._rows.dtype), self._rows)
                wanted = wanted.float().softmax(-1)
                line = answers.new_zeros(batch.tokens.numel())
                line[answers] = torch.arange(len(answers), device=line.device)
            for step, features in enumerate(self._steps(batch)):
                at = self._places(batch, step, 0)
                scores = self._scores(features.flatten(0, 1)[at]).float()
                entropy = -(wanted[line[at]] * scores.log_softmax(-1)).sum(-1).mean()
                total, weight = total + LOSS_DECAY**step * entropy, weight + LOSS_DECAY**step
        return total / weight

    @torch.no_grad()
    def ranks(self, examples: Examples) -> Tensor:
        batch = self._padded(examples)
        newest = self._places(batch, 0, self.depth)
        written, ranks = batch.tokens.flatten(), []
        with torch.autocast(self._device.kind, torch.bfloat16, enabled=self._autocast):
            for step, predicted in enumerate(self._steps(batch)):
                at = newest + step
                scores = self._scores(predicted.flatten(0, 1)[at]).float()
                place = self._reduced[written[at + 1]]
                written_score = scores.gather(1, place.clamp_min(0)[:, None])
                rank = (scores > written_score).sum(-1).clamp_max(RANKS)
                ranks.append(torch.where(place < 0, RANKS, rank))
        return torch.stack(ranks, 1)

    def draft_cost(self, depth: int) -> Cost:
        """`depth` passes, and one with the true features of a step."""
        weights = [value for name, value in self._parameters.items() if value.dim() == 2 and name != "fc.weight"]
        layer = sum(value.numel() for value in weights)
        flops = 2.0 * ((depth + 1) * layer + depth * self._rows.numel())
        read = (depth + 1) * layer * BLOCKS.block_bytes / BLOCKS.block + depth * self._row_bytes
        return Cost(flops, read, 4.0 * depth * len(self._ids))

    def save(self, folder: Path, acceptance: Acceptance) -> list[Path]:
        tensors = {name: _stored(value.detach()) for name, value in self._parameters.items()}
        files = EagleFiles(self._config(), tensors, self.taps, self._ids, acceptance.by_rank, folder.name)
        return write_eagle(files, folder, self._about)

    def _config(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "hidden_size": self._size,
            "intermediate_size": self._inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self._count,
            "num_key_value_heads": self._kv,
            "head_dim": self._of_head,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "hidden_act": "silu",
            "vocab_size": self._model.vocab,
            "draft_vocab_size": len(self._ids),
            "max_position_embeddings": self._model.max_positions,
        }

    # -- the layer

    def _steps(self, batch: Padded) -> list[Tensor]:
        """(sequences, longest, hidden) the predicted features of each step."""
        build, features = training_build(self._parameters), list[Tensor]()
        fields = eagle_fields(self._config(), self._model.max_positions)
        block = fused_block(fields, build, self._size)
        assert isinstance(block.mixer, Attention)
        shape = tuple(batch.tokens.shape)
        places = torch.arange(shape[1], device=batch.tokens.device)
        angles = rope_of(fields, build, block.mixer.heads)(places.repeat(shape[0]))
        block = replace(block, mixer=UnfoldedAttention(block.mixer, shape[0], places))
        fuse = Linear(build.at("fc"), self._size * len(self.taps), self._size)
        feature = fuse(batch.states[..., self._size :])
        for _ in range(self.depth):
            entering = torch.cat((batch.embedded, _later(feature, 1)), -1).flatten(0, 1)
            x, branch = block.run((entering, None), (), None, angles)
            assert branch is not None
            feature = (x + branch).unflatten(0, shape)
            features.append(feature)
        return features

    def _scores(self, x: Tensor) -> Tensor:
        normed: Tensor = rms_norm(x, self._parameters["norm.weight"], EPS)
        return linear(normed.to(self._rows.dtype), self._rows)

    # -- examples

    def _padded(self, examples: Examples) -> Padded:
        counts = [len(one) for one in examples.sequences]
        longest, total = max(counts), sum(counts)
        there = np.full((len(counts), longest), total, np.int64)
        for line, (count, first) in enumerate(zip(counts, np.cumsum([0, *counts[:-1]]), strict=True)):
            there[line, :count] = first + np.arange(count)
        tokens = np.concatenate([(*one.prompt, *one.answer) for one in examples.sequences])
        places = np.concatenate([np.arange(count) for count in counts])
        sent = self._ship(np.concatenate((tokens, places, there.reshape(-1))))
        flat, index = sent[:total], sent[2 * total :].view(there.shape)
        with torch.no_grad():
            embedded = self._model.embed(bare_batch(flat, sent[total : 2 * total]))
            parts = [pad(part, (0, 0, 0, 1))[index] for part in (embedded, examples.states)]
        dtype = torch.bfloat16 if self._autocast else torch.float32
        starts = [len(one.prompt) for one in examples.sequences]
        return Padded(parts[0].to(dtype), parts[1].to(dtype), pad(flat, (0, 1))[index], starts, counts)

    def _places(self, batch: Padded, step: int, ahead: int) -> Tensor:
        """Flat places of the tokens that an entry of this step can have, if the newest known token is in the answer and
        `ahead` tokens of the sequence follow it."""
        longest = batch.tokens.shape[1]
        parts = [
            line * longest + np.arange(start + step, end - ahead)
            for line, (start, end) in enumerate(zip(batch.starts, batch.ends, strict=True))
        ]
        return self._ship(np.concatenate(parts))

    def _ship(self, numbers: np.ndarray) -> Tensor:
        ship = self._device.ship
        numbers = numbers.astype(np.int64)
        return torch.from_numpy(numbers) if ship is None else ship(numbers)


def _stored(value: Tensor) -> QTensor:
    """Matrices in 8 bits where their columns allow it."""
    if value.dim() == 2 and value.shape[1] % BLOCKS.block == 0:
        return quantize(value, BLOCKS.name)
    return QTensor.dense(value.to(torch.bfloat16))


def _later(x: Tensor, by: int) -> Tensor:
    """The second dimension moved by some places; zeros come first."""
    if not by:
        return x
    moved = x.new_zeros(x.shape[0], by, *x.shape[2:])
    return torch.cat((moved, x[:, : x.shape[1] - by]), 1)
