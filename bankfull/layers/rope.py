"""RoPE frequencies, and the scalings by which checkpoints extend them to longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.mixer import Angles
from bankfull.ops import rope_angles


class Rope:
    """Angles for all tokens of a step, computed once and shared by every layer with the same RoPE."""

    def __init__(
        self, build: Build, size: int, theta: float, scaling: Mapping[str, Any] | None = None, max_positions: int = 0
    ) -> None:
        """`size`: rotated dimensions of a head. `max_positions`: the model's context."""
        if size < 2 or size % 2:
            raise ModelError(f"RoPE rotates pairs of dimensions, but the model's configuration gives it {size}.")
        if theta <= 1:
            raise ModelError(f"RoPE needs a base over 1, but the model's configuration has {theta}.")
        # At least float32, as the reference implementation; float64 for the exactness tests.
        precise = torch.float64 if build.dtype == torch.float64 else torch.float32
        device = "cpu" if build.device.type == "meta" else build.device
        exponents = torch.arange(0, size, 2, dtype=torch.int64, device=device).to(precise) / size
        kind = (scaling or {}).get("rope_type", "default")
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise ModelError(f"RoPE scaling {repr(kind)[:80]} is not supported; supported are {', '.join(_SCALINGS)}.")
        how = Scaling(kind, scaling or {}, theta, max_positions, build.max_len or max_positions)
        frequencies, self.scale = _SCALINGS[kind](1.0 / theta**exponents, how)
        self.frequencies = frequencies.to(build.device)
        self.dtype = build.dtype
        self._angles = build.bind(rope_angles)

    def __call__(self, positions: Tensor) -> Angles:
        return self._angles(positions, self.frequencies, self.scale, self.dtype)


@dataclass(frozen=True, slots=True)
class Scaling:
    """A checkpoint's `rope_scaling` with checked values, and the model that it is applied to."""

    kind: str
    values: Mapping[str, Any]
    theta: float
    made_for: int
    """The model's context."""
    length: int
    """Tokens of the longest sequence that will be run."""

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"RoPE scaling {self.kind!r} needs {name!r}, which the model's configuration lacks.")
        if not _is_positive(value):
            raise self._wrong(name, "a positive number")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def divisors(self, name: str, freq: Tensor) -> Tensor:
        """A list with one divisor for each frequency."""
        values = self.values.get(name)
        if not isinstance(values, list) or len(values) != len(freq) or not all(_is_positive(v) for v in values):
            raise self._wrong(name, f"a list of {len(freq)} positive numbers")
        return torch.tensor(values, dtype=freq.dtype, device=freq.device)

    def original(self) -> float:
        """The context before it was extended."""
        return self.number("original_max_position_embeddings", self.made_for)

    def _wrong(self, name: str, needed: str) -> ModelError:
        value = repr(self.values.get(name))[:80]
        return ModelError(f"RoPE scaling {self.kind!r} has {name} = {value}, but it must be {needed}.")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


Scaled = tuple[Tensor, float]


def _default(freq: Tensor, how: Scaling) -> Scaled:
    return freq, 1.0


def _linear(freq: Tensor, how: Scaling) -> Scaled:
    return freq / how.number("factor"), 1.0


def _factors(freq: Tensor, how: Scaling) -> Scaled:
    """One divisor per frequency, as GGUF files store them."""
    return freq / how.divisors("factors", freq), 1.0


def _llama3(freq: Tensor, how: Scaling) -> Scaled:
    """Divide long wavelengths, keep short ones, blend those between."""
    low, high = how.number("low_freq_factor"), how.number("high_freq_factor")
    if high <= low:
        raise ModelError(f"RoPE scaling 'llama3' has high_freq_factor {high}, which is not over low_freq_factor {low}.")
    wavelength = 2 * math.pi / freq
    blend = ((how.original() / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * freq / how.number("factor") + blend * freq, 1.0


def _yarn(freq: Tensor, how: Scaling) -> Scaled:
    """Interpolate slow dimensions, keep fast ones, ramp between. The scale of the angles sharpens attention scores."""
    old, pairs = how.original(), len(freq)
    factor = how.number("factor", how.made_for / old)

    def dimension(rotations: float) -> float:
        return pairs * math.log(old / (rotations * 2 * math.pi)) / math.log(how.theta)

    low, high = dimension(how.number("beta_fast", 32)), dimension(how.number("beta_slow", 1))
    if how.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=freq.dtype, device=freq.device) - low) / (high - low or 0.001)
    stretched = ramp.clamp(0, 1)
    return stretched * freq / factor + (1 - stretched) * freq, _yarn_scale(how, factor)


def _yarn_scale(how: Scaling, factor: float) -> float:
    given = how.number_or_none("attention_factor")
    if given is not None:
        return given

    def sharpen(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = how.values.get("mscale"), how.values.get("mscale_all_dim")
    if mscale and mscale_all:
        return sharpen(how.number("mscale")) / sharpen(how.number("mscale_all_dim"))
    return sharpen(1.0)


def _longrope(freq: Tensor, how: Scaling) -> Scaled:
    """Two sets of divisors. The longest sequence that the engine will run selects one for the engine's life: a choice
    per sequence would invalidate keys that are already cached."""
    old = how.number("original_max_position_embeddings")
    long, short = how.divisors("long_factor", freq), how.divisors("short_factor", freq)
    stretch = how.number("factor", how.made_for / old)
    scale = how.number_or_none("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(stretch) / math.log(old)) if stretch > 1 and old > 1 else 1.0
    return freq / (long if how.length > old else short), scale


_SCALINGS: dict[str, Callable[[Tensor, Scaling], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
