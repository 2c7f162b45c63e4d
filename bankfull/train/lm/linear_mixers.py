"""Differentiable linear attention: BASED, lightning attention, the gated delta net, and the short convolution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, sigmoid, silu, softplus

from bankfull.layers.based import BasedShape, ShortConvShape
from bankfull.layers.delta import DeltaShape
from bankfull.layers.lightning import LightningShape, lightning_slopes
from bankfull.ops.recurrence.delta import UNIT_EPS
from bankfull.train.lm.attention import SequencePass
from bankfull.train.lm.recurrence import causal_convolution, decayed_attention, delta_attention
from bankfull.train.lm.weights import Weights


def short_convolution(w: Weights, x: Tensor, shape: ShortConvShape, run: SequencePass, layer: int) -> Tensor:
    near = causal_convolution(w.linear("in_proj", x), w["conv1d.weight"], w.get("conv1d.bias"))
    return w.linear("out_proj", silu(w.linear("gate_proj", x)) * near)


def based(w: Weights, x: Tensor, shape: BasedShape, run: SequencePass, layer: int) -> Tensor:
    """All pairs at once: the product of two feature vectors is 1 + s + s^2 / 2 of the scaled score s."""
    q, k, v = (_heads(w.linear(f"proj_{name}", x), shape.heads) for name in "qkv")
    scores = q @ k.transpose(-1, -2) * shape.features**-0.5
    weights = (1 + scores + scores.square() / 2) * run.visible(None)
    return w.linear("out_proj", _joined(weights @ v / weights.sum(-1, keepdim=True)))


def lightning(w: Weights, x: Tensor, shape: LightningShape, run: SequencePass, layer: int) -> Tensor:
    """The matrix has the rows of query, key and value side by side for each head."""
    q, k, v = silu(w.linear("qkv_proj", x)).unflatten(-1, (shape.heads, -1)).transpose(1, 2).chunk(3, -1)
    slopes = lightning_slopes(shape.heads, layer, run.layers).to(x)
    log_keep = -slopes[:, None].expand(shape.heads, run.tokens)
    y = _joined(decayed_attention(q, k, v, log_keep))
    normed = rms_norm(y, (y.shape[-1],), w["norm.weight"], shape.eps)
    return w.linear("out_proj", sigmoid(w.linear("output_gate", x)) * normed)


def delta(w: Weights, x: Tensor, shape: DeltaShape, run: SequencePass, layer: int) -> Tensor:
    """The matrices have their rows side by side for each key head: query, key, values, gate; then b, a."""
    share = shape.heads // shape.key_heads
    sizes = (shape.key, shape.key, share * shape.value, share * shape.value)
    q, k, v, z = w.linear("in_proj_qkvz", x).unflatten(-1, (shape.key_heads, -1)).split(sizes, -1)
    b, a = (part.flatten(2) for part in w.linear("in_proj_ba", x).unflatten(-1, (shape.key_heads, -1)).chunk(2, -1))
    line = torch.cat([part.flatten(2) for part in (q, k, v)], -1)
    near = silu(causal_convolution(line, w["conv1d.weight"]))
    queries = shape.key_heads * shape.key
    q, k, v = near.split((queries, queries, shape.heads * shape.value), -1)
    q, k = (_unit(_heads(part, shape.key_heads)).repeat_interleave(share, 1) for part in (q, k))
    log_keep = -torch.exp(w["A_log"]) * softplus(a + w["dt_bias"])
    y = delta_attention(
        q * shape.key**-0.5, k, _heads(v, shape.heads), log_keep.transpose(1, 2), sigmoid(b).transpose(1, 2)
    )
    normed = rms_norm(y.transpose(1, 2), (shape.value,), w["norm.weight"], shape.eps).flatten(2)
    return w.linear("out_proj", silu(z.flatten(2)) * normed)


def _heads(x: Tensor, count: int) -> Tensor:
    """(sequences, heads, tokens, size)"""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
