"""A tensor of a model as it will be stored."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.weights.qtensor import Scheme


@dataclass(frozen=True, slots=True)
class TargetTensor:
    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    outliers: int | None = None
    """Columns that are stored beside it, as `published.outliers` describes; None: not in that form."""


def module_of(name: str) -> str:
    return name.removesuffix(".weight")
