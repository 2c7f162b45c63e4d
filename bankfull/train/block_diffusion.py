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
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bankfull.train.gradients import logits, model_with

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
        query, kv = (count * shape.head_dim for count in (shape.num_attention_heads, shape.num_key_value_heads))
        self.parameters = {"model.embed_tokens.weight": nn.Embedding(shape.vocab_size, size).weight}
        for layer in range(shape.num_hidden_layers):
            matrices = {
                "self_attn.q_proj": (size, query),
                "self_attn.k_proj": (size, kv),
                "self_attn.v_proj": (size, kv),
                "self_attn.o_proj": (query, size),
                "mlp.gate_proj": (size, shape.intermediate_size),
                "mlp.up_proj": (size, shape.intermediate_size),
                "mlp.down_proj": (shape.intermediate_size, size),
            }
            norms = {"input_layernorm": size, "post_attention_layernorm": size}
            norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
            drawn = {name: nn.Linear(*sizes, bias=False).weight for name, sizes in matrices.items()}
            drawn |= {name: nn.Parameter(torch.ones(count)) for name, count in norms.items()}
            self.parameters |= {f"model.layers.{layer}.{name}.weight": value for name, value in drawn.items()}
        self.parameters["model.norm.weight"] = nn.Parameter(torch.ones(size))
        self.parameters["lm_head.weight"] = nn.Linear(size, shape.vocab_size, bias=False).weight

    def __call__(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """(texts, tokens, vocabulary) logits. seen (tokens, tokens): which token sees which."""
        return logits(model_with(self.config, self.parameters), tokens, positions, seen)

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": "sdar", "dtype": "float32", **asdict(self.shape)}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
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
