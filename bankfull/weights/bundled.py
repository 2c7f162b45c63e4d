"""Trained drafters for the default model: heads in a package of their own (`heads` in the sources), made by the recipe
in their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError

PACKAGE, MODULE = "bankfull-smollm2-heads", "bankfull_smollm2_heads"
SHAPE = {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152}
"""Shape of the model that the heads were trained for, in any quantization: SmolLM2-135M-Instruct."""


def bundled(kind: str, config: Mapping[str, Any], name: str) -> Path:
    """The directory of the heads for a model with this configuration. `name`: of the model, for the refusal."""
    if any(config.get(key) != value for key, value in SHAPE.items()):
        raise ConfigError(
            f"speculative={kind!r} has trained heads for SmolLM2-135M-Instruct only, and {name!r} is another model; "
            f"train some with `bankfull train {kind} MODEL -o DIR`, and use {kind}:DIR."
        )
    package = find_spec(MODULE)  # found without running it
    if package is None or package.origin is None:
        raise ConfigError(
            f"speculative={kind!r} needs the package {PACKAGE}, which is not installed; install it from bankfull's "
            f"sources with `pip install ./heads`, or give heads of your own: {kind}:DIR."
        )
    return Path(package.origin).parent / kind
