"""The differentiable mixer of each kind. It computes what the served mixer of the same kind and shape computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bankfull.train.lm.attention import SequencePass, attention, latent_attention
from bankfull.train.lm.linear_mixers import based, delta, lightning, short_convolution
from bankfull.train.lm.state_space import mamba, mamba2, s4
from bankfull.train.lm.weights import Weights

TrainedMixer = Callable[[Weights, Tensor, Any, SequencePass, int], Tensor]
"""Computes the branch of normed rows (sequences, tokens, hidden) from weights, rows, shape of the kind, pass, layer."""
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
