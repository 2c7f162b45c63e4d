"""The weights of a model by name, from its files, without reading one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bankfull.axes import WeightAxis
from bankfull.limits.meter.metered import MeteredModel
from bankfull.weights.source import ModelFiles


@dataclass(frozen=True, slots=True)
class ListedWeight:
    name: str
    axes: tuple[WeightAxis, ...]
    """What each dimension counts; a fused tensor has the axes of its parts one after another in one dimension."""
    shape: tuple[int, ...]
    scheme: str
    home: str
    """How an engine on one device holds it (`layers.placement.Mode`)."""
    bytes: int
    """As stored."""
    generation: int = 0
    """How often it was replaced since it was read."""

    def to_dict(self) -> dict[str, Any]:
        axes = [
            [{"kind": str(part.kind), "count": part.count, "each": part.each} for part in axis.parts]
            for axis in self.axes
        ]
        return asdict(self) | {"axes": axes}


def weights_of(files: ModelFiles, *, dtype: str | None = None) -> list[ListedWeight]:
    """The weights that the model reads, in the order in which it asks for them."""
    metered = MeteredModel(files, dtype=dtype)
    stored = metered.shapes.read
    return [
        ListedWeight(
            name,
            placed.axes,
            stored[name].shape,
            stored[name].scheme.name,
            str(placed.home.mode),
            stored[name].nbytes,
        )
        for name, placed in metered.build.weights.items()
        if name in stored
    ]
