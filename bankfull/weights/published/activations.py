"""Which activations a published checkpoint was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rounds_per_token(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's products with 8-bit rows round activations to 8 bits per token: so say compressed-tensors
    files with dynamic 8-bit inputs, and fp8 files with a dynamic activation scheme. Groups of layers with other weights
    (4 bits, or a scale per group of columns) do not matter: their products round nothing."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return False
    if said.get("activation_scheme") == "dynamic":
        return True
    inputs = [group.get("input_activations") for group in _mappings(said.get("config_groups")) if _by_row(group)]
    return bool(inputs) and all(
        isinstance(given, Mapping) and given.get("num_bits") == 8 and given.get("dynamic") is True for given in inputs
    )


def is_published(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint was quantized before it was published."""
    return isinstance(config.get("quantization_config"), Mapping)


def _by_row(group: Mapping[str, Any]) -> bool:
    """Whether its weights may have 8 bits and one scale per row."""
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        return True
    return weights.get("num_bits") == 8 and weights.get("strategy") not in ("group", "block")


def _mappings(groups: Any) -> list[Mapping[str, Any]]:
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
