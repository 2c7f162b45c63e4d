"""Differentiable state-space mixers: S4, Mamba and Mamba-2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm, silu, softplus

from bankfull.layers.s4 import S4Shape, discretized
from bankfull.layers.ssd import Mamba2Shape
from bankfull.layers.ssm import MambaShape
from bankfull.train.lm.attention import SequencePass
from bankfull.train.lm.recurrence import causal_convolution, decayed_attention, recurrence
from bankfull.train.lm.weights import Weights


def mamba(w: Weights, x: Tensor, shape: MambaShape, run: SequencePass, layer: int) -> Tensor:
    into, gate = w.linear("in_proj", x).chunk(2, -1)
    u = silu(causal_convolution(into, w["conv1d.weight"], w["conv1d.bias"]))
    low, b, c = w.linear("x_proj", u).split((shape.rank, shape.state, shape.state), -1)
    delta = softplus(w.linear("dt_proj", low)).transpose(0, 1)[..., None]
    keep = torch.exp(delta * -torch.exp(w["A_log"]))
    h = recurrence(keep, delta * u.transpose(0, 1)[..., None] * b.transpose(0, 1)[:, :, None])
    y = torch.einsum("tbcn,tbn->btc", h, c.transpose(0, 1)) + w["D"] * u
    return w.linear("out_proj", silu(gate) * y)


def mamba2(w: Weights, x: Tensor, shape: Mamba2Shape, run: SequencePass, layer: int) -> Tensor:
    """A head is linear attention from B to C over the channels, with a decay that depends on the token."""
    gate, line, dt = w.linear("in_proj", x).split((shape.inner, shape.channels, shape.heads), -1)
    line = silu(causal_convolution(line, w["conv1d.weight"], w["conv1d.bias"]))
    u, b, c = line.split((shape.inner, shape.groups * shape.state, shape.groups * shape.state), -1)
    u = u.unflatten(-1, (shape.heads, shape.size)).transpose(1, 2)
    b, c = (
        part.unflatten(-1, (shape.groups, -1)).transpose(1, 2).repeat_interleave(shape.heads // shape.groups, 1)
        for part in (b, c)
    )
    steps = softplus(dt + w["dt_bias"]).transpose(1, 2)
    y = decayed_attention(c, b, u * steps[..., None], steps * -torch.exp(w["A_log"])[:, None])
    y = (y + w["D"][:, None, None] * u).transpose(1, 2).flatten(2)
    return w.linear("out_proj", rms_norm(y * silu(gate), (shape.inner,), w["norm.weight"], run.eps))


def s4(w: Weights, x: Tensor, shape: S4Shape, run: SequencePass, layer: int) -> Tensor:
    """A convolution with the recurrence's response to one impulse, by FFT."""
    a = torch.complex(-torch.exp(w["log_A_real"]), w["A_imag"])
    decay, enter = discretized(a, torch.ones_like(a), torch.exp(w["log_dt"])[:, None], shape.rule)
    leave = 2.0 * torch.view_as_complex(w["C"]) * enter
    powers = torch.exp(torch.log(decay)[..., None] * torch.arange(run.tokens, device=x.device))
    response = torch.einsum("cp,cpt->ct", leave, powers).real
    size = 2 * run.tokens  # without wrapping around
    product = torch.fft.rfft(x.transpose(1, 2), size) * torch.fft.rfft(response, size)
    y = torch.fft.irfft(product, size)[..., : run.tokens].transpose(1, 2) + w["D"] * x
    return w.linear("out_proj", gelu(y))
