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


class TrainableNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, shape: BlockDiffusionShape) -> None:
        super().__init__()
        heads, kv, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.size, self.groups = size, heads // kv
        self.q_proj = nn.Linear(shape.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv * size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv * size, bias=False)
        self.o_proj = nn.Linear(heads * size, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = TrainableNorm(size, shape.rms_norm_eps), TrainableNorm(size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotated(norm(y), cos, sin) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        k, v = (y.repeat_interleave(self.groups, dim=2) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class GatedFeed(nn.Module):
    def __init__(self, shape: BlockDiffusionShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TrainableLayer(nn.Module):
    def __init__(self, shape: BlockDiffusionShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = SelfAttention(shape), GatedFeed(shape)
        self.input_layernorm = TrainableNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = TrainableNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, shape: BlockDiffusionShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TrainableLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = TrainableNorm(shape.hidden_size, shape.rms_norm_eps)


class TrainableBlockDiffusion(nn.Module):
    """Parameters have the names of the published checkpoints."""

    def __init__(self, shape: BlockDiffusionShape) -> None:
        super().__init__()
        self.shape, self.model = shape, Inner(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        rates = self.shape.rope_theta ** -(torch.arange(half, device=tokens.device) / half)
        angles = positions[:, None] * rates
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, angles.cos()[:, None], angles.sin()[:, None], seen)
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"model_type": "sdar", "dtype": "float32", **asdict(self.shape)}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file(
            {name: weight.detach().cpu().contiguous() for name, weight in self.state_dict().items()},
            folder / "model.safetensors",
        )


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    losses = []
    for _ in range(steps):
        loss = denoising_loss(model, texts(batch), random)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return model.train(False), losses
