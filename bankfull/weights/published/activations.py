"""Which activations a published checkpoint was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rounds_per_token(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's products round activations to 8 bits per token: so say compressed-tensors files with
    dynamic 8-bit inputs, and fp8 files with a dynamic activation scheme."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping):
        return False
    if said.get("activation_scheme") == "dynamic":
        return True
    groups = said.get("config_groups")
    inputs = [group.get("input_activations") for group in _mappings(groups)]
    return bool(inputs) and all(
        isinstance(given, Mapping) and given.get("num_bits") == 8 and given.get("dynamic") is True for given in inputs
    )


def _mappings(groups: Any) -> list[Mapping[str, Any]]:
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
