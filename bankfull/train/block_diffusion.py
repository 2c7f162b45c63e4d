"""Training of tiny block-diffusion models (SDAR's layout), for tests and for figures of tokens per forward pass.

The objective of block diffusion: a block, with each token masked with probability t, is predicted from itself and from
the clean blocks before it; each masked token counts 1 / t. One pass trains all blocks of a text: the sequence holds the
noisy text and the clean text, and the attention mask keeps a noisy block from its own clean tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bankfull.layers.attention import Heads
from bankfull.models.kinds import AttentionShape, FeedShape, RopeShape
from bankfull.ops import rms_norm
from bankfull.train.lm.mixers import SequencePass, attention
from bankfull.train.lm.model import gated_feed
from bankfull.train.lm.weights import Weights

Texts = Callable[[int], Tensor]
"""A number of texts -> token ids (texts, length); the length is a multiple of the block."""
LEAST_MASKED = 0.1
"""Smallest probability of a mask: weights 1 / t stay bounded."""


@dataclass(frozen=True, slots=True)
class BlockDiffusionShape:
    vocab_size: int
    mask_token_id: int
    block_size: int = 8
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


class TrainableBlockDiffusion:
    """Parameters have the names of the published checkpoints."""

    def __init__(self, shape: BlockDiffusionShape) -> None:
        self.shape, size = shape, shape.hidden_size
        heads = Heads(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.head_dim**-0.5)
        self._attention = AttentionShape(heads, RopeShape(shape.head_dim, shape.rope_theta), qk_norm=True, bias=False)
        self.parameters = {"model.embed_tokens.weight": nn.Embedding(shape.vocab_size, size).weight}
        for layer in range(shape.num_hidden_layers):
            matrices = {
                "self_attn.q_proj": (size, heads.count * heads.size),
                "self_attn.k_proj": (size, heads.kv * heads.size),
                "self_attn.v_proj": (size, heads.kv * heads.size),
                "self_attn.o_proj": (heads.count * heads.size, size),
                "mlp.gate_proj": (size, shape.intermediate_size),
                "mlp.up_proj": (size, shape.intermediate_size),
                "mlp.down_proj": (shape.intermediate_size, size),
            }
            norms = {"input_layernorm": size, "post_attention_layernorm": size}
            norms |= {"self_attn.q_norm": heads.size, "self_attn.k_norm": heads.size}
            drawn = {name: nn.Linear(*sizes, bias=False).weight for name, sizes in matrices.items()}
            drawn |= {name: nn.Parameter(torch.ones(count)) for name, count in norms.items()}
            self.parameters |= {f"model.layers.{layer}.{name}.weight": value for name, value in drawn.items()}
        self.parameters["model.norm.weight"] = nn.Parameter(torch.ones(size))
        self.parameters["lm_head.weight"] = nn.Linear(size, shape.vocab_size, bias=False).weight

    def __call__(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """(texts, tokens, vocabulary) logits. seen (tokens, tokens): which token sees which."""
        shape, w = self.shape, Weights(self.parameters)
        run = SequencePass(positions, shape.rms_norm_eps, shape.rope_theta, shape.num_hidden_layers, seen)
        x, feed = w["model.embed_tokens.weight"][tokens], FeedShape("gated", shape.intermediate_size)
        for number in range(shape.num_hidden_layers):
            layer = w.at("model").at("layers").at(number)
            inner = rms_norm(x, layer["input_layernorm.weight"], shape.rms_norm_eps)
            x = x + attention(layer.at("self_attn"), inner, self._attention, run, number)
            inner = rms_norm(x, layer["post_attention_layernorm.weight"], shape.rms_norm_eps)
            x = x + gated_feed(layer.at("mlp"), inner, feed)
        return w.linear("lm_head", rms_norm(x, w["model.norm.weight"], shape.rms_norm_eps))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": "sdar", "dtype": "float32", **asdict(self.shape)}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file({name: weight.detach() for name, weight in self.parameters.items()}, folder / "model.safetensors")


def training_mask(length: int, block: int) -> Tensor:
    """(2 length, 2 length) which keys a query sees; the noisy text comes first, the clean text after it."""
    at = torch.arange(length) // block
    same, before = at[:, None] == at, at[:, None] > at
    return torch.cat((torch.cat((same, before), 1), torch.cat((torch.zeros_like(same), same | before), 1)), 0)


def denoising_loss(model: TrainableBlockDiffusion, texts: Tensor, random: torch.Generator) -> Tensor:
    shape, (count, length) = model.shape, texts.shape
    blocks = length // shape.block_size
    rate = LEAST_MASKED + (1 - LEAST_MASKED) * torch.rand(count, blocks, generator=random)
    rate = rate.repeat_interleave(shape.block_size, 1)
    masked = torch.rand(count, length, generator=random) < rate
    noisy = texts.masked_fill(masked, shape.mask_token_id)
    positions = torch.arange(length).repeat(2)
    logits = model(torch.cat((noisy, texts), 1), positions, training_mask(length, shape.block_size))[:, :length]
    each = F.cross_entropy(logits.flatten(0, 1), texts.flatten(), reduction="none").view_as(texts)
    return (each * masked / rate).sum() / texts.numel()


def train_block_diffusion(
    shape: BlockDiffusionShape, texts: Texts, *, steps: int, batch: int = 32, rate: float = 3e-3, seed: int = 0
) -> tuple[TrainableBlockDiffusion, list[float]]:
    """A trained model, and the loss of every step."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model = TrainableBlockDiffusion(shape)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        loss = denoising_loss(model, texts(batch), random)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters.values(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return model, losses
