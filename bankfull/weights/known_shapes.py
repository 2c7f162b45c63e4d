"""Configurations of published models by name: real shapes, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bankfull.weights.hf_config import normalize_config


@cache
def _shapes() -> Mapping[str, dict[str, Any]]:
    shapes: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return shapes


def shape_names() -> list[str]:
    return list(_shapes())


def known_shape(name: str) -> dict[str, Any] | None:
    """The normalized configuration; None for another name."""
    return normalize_config(_shapes()[name]) if name in _shapes() else None
