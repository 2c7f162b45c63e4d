"""Trained drafters that come with the package: heads for the default model, made by the recipe in their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError

FOLDER = Path(__file__).parent / "smollm2"
SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
"""Shape of the model that the heads were trained for, in any quantization: SmolLM2-135M-Instruct."""


def bundled(kind: str, config: Mapping[str, Any], name: str) -> Path:
    """The directory of the heads for a model with this configuration. `name`: of the model, for the refusal."""
    if any(config.get(key) != value for key, value in SHAPE.items()):
        raise ConfigError(
            f"speculative={kind!r} has trained heads for SmolLM2-135M-Instruct only, and {name!r} is another model; "
            f"train some with `bankfull train {kind} MODEL -o DIR`, and use {kind}:DIR."
        )
    return FOLDER / kind
