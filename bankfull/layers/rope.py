"""Rotary frequencies: the base, and the ways in which checkpoints stretch them over longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.mixer import Angles
from bankfull.ops import rope_angles

KINDS = ("default", "linear", "llama3", "yarn", "longrope", "factors")


class Rope:
    """Angles for all tokens of a step, computed once and shared by every layer that turns alike."""

    def __init__(
        self, build: Build, size: int, theta: float, scaling: Mapping[str, Any] | None = None, max_positions: int = 0
    ) -> None:
        """`size` is the number of dimensions that turn; `max_positions` the context that the model was made for."""
        # As wide as the activations, at least float32: the oracle's angles are float32, those of exactness tests wider.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        device = "cpu" if build.device.type == "meta" else build.device
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device=device).to(precise) / size
        frequencies = 1.0 / theta**exponents
        scaling = dict(scaling or {"rope_type": "default"})
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KINDS:
            raise ModelError(f"RoPE scaling {kind!r} is not supported; supported are {', '.join(KINDS)}.")
        length = build.max_len or max_positions
        try:
            frequencies, self.scale = _SCALINGS[kind](frequencies, theta, scaling, max_positions, length)
        except KeyError as missing:
            raise ModelError(f"RoPE scaling {kind!r} needs {missing.args[0]!r}, which the model's configuration lacks.") from None
        self.frequencies = frequencies.to(build.device)
        self._dtype = build.dtype
        self._angles = build.bind(rope_angles)

    def __call__(self, positions: Tensor) -> Angles:
        return self._angles(positions, self.frequencies, self.scale, self._dtype)  # type: ignore[no-any-return]


Scaled = tuple[Tensor, float]


def _default(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    return freq, 1.0


def _linear(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    return freq / how["factor"], 1.0


def _factors(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    """Divisors per frequency, as GGUF files bake them in."""
    return freq / torch.tensor(how["factors"], dtype=freq.dtype, device=freq.device), 1.0


def _llama3(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    """Long wavelengths are divided, short ones kept, those between blended."""
    old = how["original_max_position_embeddings"]
    low, high = how["low_freq_factor"], how["high_freq_factor"]
    wavelength = 2 * math.pi / freq
    blend = ((old / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freq / how["factor"] + blend * freq, 1.0


def _yarn(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    """Interpolate slow dimensions, keep fast ones, ramp between; scores are sharpened through the angles' scale."""
    factor = how["factor"]
    old = how.get("original_max_position_embeddings") or made_for
    pairs = len(freq)

    def dimension(rotations: float) -> float:
        return pairs * math.log(old / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(how.get("beta_fast") or 32), dimension(how.get("beta_slow") or 1)
    if how.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=freq.dtype, device=freq.device) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return stretched * freq / factor + (1 - stretched) * freq, _yarn_scale(how, factor)


def _yarn_scale(how: Mapping[str, Any], factor: float) -> float:
    given = how.get("attention_factor")
    if given is not None:
        return float(given)

    def sharpen(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = how.get("mscale"), how.get("mscale_all_dim")
    if mscale and mscale_all:
        return sharpen(mscale) / sharpen(mscale_all)
    return sharpen(1.0)


def _longrope(freq: Tensor, theta: float, how: Mapping[str, Any], made_for: int, length: int) -> Scaled:
    """Two sets of divisors. Which one holds is fixed for the engine's life by the longest sequence that it will run: a
    choice per sequence would change the meaning of keys that are already cached."""
    old = how["original_max_position_embeddings"]
    divisors = how["long_factor"] if length > old else how["short_factor"]
    stretch = how.get("factor") or made_for / old
    scale = how.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(old)) if stretch > 1 else 1.0
    return freq / torch.tensor(divisors, dtype=freq.dtype, device=freq.device), float(scale)


_SCALINGS = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope,
    "factors": _factors,
}  # fmt: skip
