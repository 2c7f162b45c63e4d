"""Configurations that come with the package: models as data, without weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "preset_models"


@cache
def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.json")))


def preset(name: str) -> Path | None:
    """The directory of a preset; None for another name."""
    return FOLDER / name if name in preset_names() else None
