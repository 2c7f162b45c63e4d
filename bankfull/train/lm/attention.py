"""Differentiable attention, and what mixers share in a pass over sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from bankfull.layers.latent import LatentShape
from bankfull.models.kinds import AttentionShape, RopeShape
from bankfull.state.mask import Mask, Sight
from bankfull.train.lm.weights import Weights


@dataclass(slots=True)
class SequencePass:
    """One pass over sequences of the same length: what layers share."""

    tokens: int
    device: torch.device
    eps: float
    theta: float
    """The configuration's base of RoPE."""
    layers: int
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by the layer that owns them."""
    _angles: dict[RopeShape, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def angles(self, rope: RopeShape) -> tuple[Tensor, Tensor]:
        if rope not in self._angles:
            half = rope.size // 2
            steps = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
            turns = torch.arange(self.tokens, dtype=torch.float64)[:, None] * steps
            self._angles[rope] = turns.cos().float().to(self.device), turns.sin().float().to(self.device)
        return self._angles[rope]

    def visible(self, sight: Sight) -> Tensor:
        """(tokens, tokens) which token sees which."""
        places = torch.arange(self.tokens, device=self.device)
        if isinstance(sight, Mask):
            seen: Tensor = sight.visible(places[:, None], places[None])
            return seen
        back = places[:, None] - places[None]
        return (back >= 0) if sight is None else (back >= 0) & (back < sight)


def attention(w: Weights, x: Tensor, shape: AttentionShape, run: SequencePass, layer: int) -> Tensor:
    heads = shape.heads
    q = _turned(w, "q", x, shape, run)
    if shape.owner is None:
        v = w.linear("v_proj", x).unflatten(-1, (-1, heads.size)).transpose(1, 2)
        run.kv[layer] = _turned(w, "k", x, shape, run), v
    k, v = run.kv[layer if shape.owner is None else shape.owner]
    with sdpa_kernel(SDPBackend.MATH):  # the others add gradients in any order, so that runs would differ
        mixed = scaled_dot_product_attention(
            q, k, v, attn_mask=run.visible(heads.sight), scale=heads.scale, enable_gqa=True
        )
    return w.linear("o_proj", mixed.transpose(1, 2).flatten(2))


def latent_attention(w: Weights, x: Tensor, shape: LatentShape, run: SequencePass, layer: int) -> Tensor:
    """Keys and values are expanded from the latents; the key with RoPE is the same for all heads."""
    low, name = x, "q_proj"
    if shape.q_rank is not None:
        low = rms_norm(w.linear("q_a_proj", x), (shape.q_rank,), w["q_a_layernorm.weight"], run.eps)
        name = "q_b_proj"
    rope = RopeShape(shape.rope, run.theta)
    q = w.linear(name, low).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
    q_nope, q_rope = q.split((shape.nope, shape.rope), -1)
    latent, k_rope = w.linear("kv_a_proj_with_mqa", x).split((shape.rank, shape.rope), -1)
    latent = rms_norm(latent, (shape.rank,), w["kv_a_layernorm.weight"], run.eps)
    expanded = w.linear("kv_b_proj", latent).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
    k_nope, v = expanded.split((shape.nope, shape.value), -1)
    shared = _rotated(k_rope[:, None], rope, run).expand(-1, shape.heads, -1, -1)
    with sdpa_kernel(SDPBackend.MATH):
        mixed = scaled_dot_product_attention(
            torch.cat((q_nope, _rotated(q_rope, rope, run)), -1),
            torch.cat((k_nope, shared), -1),
            v,
            attn_mask=run.visible(shape.window),
            scale=shape.scale,
        )
    return w.linear("o_proj", mixed.transpose(1, 2).flatten(2))


def _turned(w: Weights, name: str, x: Tensor, shape: AttentionShape, run: SequencePass) -> Tensor:
    """Queries or keys (sequences, heads, tokens, size), normed and rotated."""
    y = w.linear(f"{name}_proj", x).unflatten(-1, (-1, shape.heads.size)).transpose(1, 2)
    if shape.qk_norm:
        y = rms_norm(y, (shape.heads.size,), w[f"{name}_norm.weight"], run.eps)
    return y if shape.rope is None else _rotated(y, shape.rope, run)


def _rotated(x: Tensor, rope: RopeShape, run: SequencePass) -> Tensor:
    cos, sin = run.angles(rope)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
