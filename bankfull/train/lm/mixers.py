"""The mixer of each kind over whole sequences: projections, and the mathematics of `ops`, which has gradients.

It computes what the served mixer of the same kind and shape computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bankfull.layers.based import BasedShape, ShortConvShape
from bankfull.layers.delta import DeltaShape
from bankfull.layers.latent import LatentShape
from bankfull.layers.lightning import LightningShape, lightning_slopes
from bankfull.layers.s4 import S4Shape, discretized
from bankfull.layers.ssd import Mamba2Shape
from bankfull.layers.ssm import MambaShape
from bankfull.models.kinds import AttentionShape, RopeShape
from bankfull.ops import activate, activate_mul, gated_rms_norm, rms_norm, rope_angles, rotate, taylor_features
from bankfull.ops.attention.body import dense_attention, out_of_sight
from bankfull.ops.recurrence.delta import gated_delta
from bankfull.ops.recurrence.linear_attention import decayed_attention, normalized, with_ones
from bankfull.ops.recurrence.s4 import diagonal_convolution
from bankfull.ops.recurrence.ssd import state_space, time_steps
from bankfull.ops.recurrence.ssm import convolved, selective
from bankfull.state.mask import Sight
from bankfull.train.lm.weights import Weights


@dataclass(slots=True)
class SequencePass:
    """One pass over sequences of the same length: what layers share."""

    places: Tensor
    """(tokens) the position of each token."""
    eps: float
    theta: float
    """The configuration's base of RoPE."""
    layers: int
    seen: Tensor | None = None
    """(tokens, tokens) which token sees which, where that does not follow from their positions."""
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values by the layer that owns them."""
    _angles: dict[RopeShape, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotated(self, x: Tensor, rope: RopeShape) -> Tensor:
        if rope not in self._angles:
            half = rope.size // 2
            steps = rope.theta ** (-torch.arange(half, dtype=torch.float64, device=self.places.device) / half)
            self._angles[rope] = rope_angles(self.places, steps, 1.0, torch.float32)
        turned: Tensor = rotate(x, *self._angles[rope])
        return turned

    def hidden(self, sight: Sight) -> Tensor:
        if self.seen is not None:
            return ~self.seen
        at, key = self.places[:, None], self.places
        beyond = out_of_sight(at, key, sight)
        return key > at if beyond is None else (key > at) | beyond


TrainedMixer = Callable[[Weights, Tensor, Any, SequencePass, int], Tensor]
"""Computes the branch of normed rows (sequences, tokens, hidden) from weights, rows, shape of the kind, pass, layer."""


def attention(w: Weights, x: Tensor, shape: AttentionShape, run: SequencePass, layer: int) -> Tensor:
    heads = shape.heads

    def turned(name: str) -> Tensor:
        """Queries or keys, normed and rotated."""
        y = _heads(w.linear(f"{name}_proj", x), heads.size)
        if shape.qk_norm:
            y = rms_norm(y, w[f"{name}_norm.weight"], run.eps)
        return y if shape.rope is None else run.rotated(y, shape.rope)

    if shape.owner is None:
        run.kv[layer] = turned("k"), _heads(w.linear("v_proj", x), heads.size)
    k, v = run.kv[layer if shape.owner is None else shape.owner]
    return w.linear("o_proj", dense_attention(turned("q"), k, v, heads.scale, run.hidden(heads.sight)).flatten(2))


def latent_attention(w: Weights, x: Tensor, shape: LatentShape, run: SequencePass, layer: int) -> Tensor:
    """Keys and values are expanded from the latents; the key with RoPE is the same for all heads."""
    low, name = x, "q_proj"
    if shape.q_rank is not None:
        low, name = rms_norm(w.linear("q_a_proj", x), w["q_a_layernorm.weight"], run.eps), "q_b_proj"
    rope = RopeShape(shape.rope, run.theta)
    q_nope, q_rope = w.linear(name, low).unflatten(-1, (shape.heads, -1)).split((shape.nope, shape.rope), -1)
    latent, k_rope = w.linear("kv_a_proj_with_mqa", x).split((shape.rank, shape.rope), -1)
    latent = rms_norm(latent, w["kv_a_layernorm.weight"], run.eps)
    expanded = w.linear("kv_b_proj", latent).unflatten(-1, (shape.heads, -1))
    k_nope, v = expanded.split((shape.nope, shape.value), -1)
    shared = run.rotated(k_rope[:, :, None], rope).expand(-1, -1, shape.heads, -1)
    q = torch.cat((q_nope, run.rotated(q_rope, rope)), -1)
    mixed = dense_attention(q, torch.cat((k_nope, shared), -1), v, shape.scale, run.hidden(shape.window))
    return w.linear("o_proj", mixed.flatten(2))


def short_convolution(w: Weights, x: Tensor, shape: ShortConvShape, run: SequencePass, layer: int) -> Tensor:
    near = _convolved(w, w.linear("in_proj", x))
    return w.linear("out_proj", activate_mul(w.linear("gate_proj", x), near, "silu"))


def based(w: Weights, x: Tensor, shape: BasedShape, run: SequencePass, layer: int) -> Tensor:
    q, k, v = (w.linear(f"proj_{name}", x).unflatten(-1, (shape.heads, -1)).transpose(1, 2) for name in "qkv")
    y, _ = decayed_attention(taylor_features(q), taylor_features(k), with_ones(v), v.new_zeros(v.shape[:-1]))
    return w.linear("out_proj", normalized(y).transpose(1, 2).flatten(2))


def lightning(w: Weights, x: Tensor, shape: LightningShape, run: SequencePass, layer: int) -> Tensor:
    """The matrix has the rows of query, key and value side by side for each head."""
    qkv = activate(w.linear("qkv_proj", x), "silu").unflatten(-1, (shape.heads, -1))
    q, k, v = qkv.transpose(1, 2).chunk(3, -1)
    slopes = lightning_slopes(shape.heads, layer, run.layers).to(x)
    log_keep = -slopes[:, None].expand(shape.heads, x.shape[1])
    y, _ = decayed_attention(q, k, v, log_keep)
    normed = rms_norm(y.transpose(1, 2).flatten(2), w["norm.weight"], shape.eps)
    return w.linear("out_proj", activate_mul(w.linear("output_gate", x), normed, "sigmoid"))


def delta(w: Weights, x: Tensor, shape: DeltaShape, run: SequencePass, layer: int) -> Tensor:
    """The matrices have their rows side by side for each key head: query, key, values, gate; then b, a."""
    share = shape.heads // shape.key_heads
    sizes = (shape.key, shape.key, share * shape.value, share * shape.value)
    *qkv, z = w.linear("in_proj_qkvz", x).unflatten(-1, (shape.key_heads, -1)).split(sizes, -1)
    b, a = (part.flatten(2) for part in w.linear("in_proj_ba", x).unflatten(-1, (shape.key_heads, -1)).chunk(2, -1))
    near = activate(_convolved(w, torch.cat([part.flatten(2) for part in qkv], -1)), "silu")
    queries = shape.key_heads * shape.key
    q, k, v = near.split((queries, queries, shape.heads * shape.value), -1)
    operands = _heads(q, shape.key), _heads(k, shape.key), _heads(v, shape.value), a, b
    y, _ = gated_delta(*operands, -torch.exp(w["A_log"]), w["dt_bias"])
    norm = w["norm.weight"].repeat(shape.heads)
    return w.linear("out_proj", gated_rms_norm(y.flatten(2), z.flatten(2), norm, shape.eps, shape.heads, True))


def mamba(w: Weights, x: Tensor, shape: MambaShape, run: SequencePass, layer: int) -> Tensor:
    into, gate = w.linear("in_proj", x).chunk(2, -1)
    u = activate(_convolved(w, into), "silu")
    low, b, c = w.linear("x_proj", u).split((shape.rank, shape.state, shape.state), -1)
    steps = activate(w.linear("dt_proj", low), "softplus")
    us, steps, b, c = (part.transpose(0, 1) for part in (u, steps, b, c))
    y, _ = selective(us, steps, -torch.exp(w["A_log"]), b, c, w["D"])
    return w.linear("out_proj", activate_mul(gate, y.transpose(0, 1), "silu"))


def mamba2(w: Weights, x: Tensor, shape: Mamba2Shape, run: SequencePass, layer: int) -> Tensor:
    gate, line, dt = w.linear("in_proj", x).split((shape.inner, shape.channels, shape.heads), -1)
    near = activate(_convolved(w, line), "silu")
    u, b, c = near.split((shape.inner, shape.groups * shape.state, shape.groups * shape.state), -1)
    steps = time_steps(dt, w["dt_bias"], (0.0, inf))
    b, c = (_heads(part, shape.state) for part in (b, c))
    y, _ = state_space(_heads(u, shape.size), steps, -torch.exp(w["A_log"]), b, c, w["D"])
    return w.linear("out_proj", gated_rms_norm(y.flatten(2), gate, w["norm.weight"], run.eps, 1, False))


def s4(w: Weights, x: Tensor, shape: S4Shape, run: SequencePass, layer: int) -> Tensor:
    a = torch.complex(-torch.exp(w["log_A_real"]), w["A_imag"])
    decay, enter = discretized(a, torch.ones_like(a), torch.exp(w["log_dt"])[:, None], shape.rule)
    y = diagonal_convolution(x, decay, 2.0 * torch.view_as_complex(w["C"]) * enter, w["D"])
    return w.linear("out_proj", activate(y, "gelu"))


def _heads(x: Tensor, size: int) -> Tensor:
    """(sequences, tokens, heads, size)"""
    return x.unflatten(-1, (-1, size))


def _convolved(w: Weights, x: Tensor) -> Tensor:
    kernel = w["conv1d.weight"][:, 0]
    return convolved(pad(x.mT, (kernel.shape[-1] - 1, 0)), kernel, w.get("conv1d.bias")).mT


MIXERS: dict[str, TrainedMixer] = {
    "attention": attention,
    "based": based,
    "conv": short_convolution,
    "delta": delta,
    "lightning": lightning,
    "mamba": mamba,
    "mamba2": mamba2,
    "mla": latent_attention,
    "s4": s4,
}
