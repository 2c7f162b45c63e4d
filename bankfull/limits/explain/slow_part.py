"""Which kernels hold a step back: where they run far below the machine's limit, nothing but faster kernels helps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bankfull.limits.explain.kernel_profile import KernelCosts
from bankfull.limits.meter.metered import HEAD

if TYPE_CHECKING:
    from bankfull.limits.explain.recorder import Part
    from bankfull.limits.meter.yardstick import Yardstick

FAR_BELOW = 0.5
"""Of the limit: kernels that reach less are themselves what is slow."""
_SHAPE = re.compile(r"(\d+) -> (\d+)$")
_TORCH = " (torch)"


@dataclass(frozen=True, slots=True)
class SlowPart:
    """The kernels of one kind that lose the most time, in one part of a request."""

    name: str
    seconds: float
    least: float
    """Seconds at the machine's limit."""
    share: float
    """Of the part's time."""
    by_torch: bool

    @property
    def reached(self) -> float:
        """Of the limit."""
        return self.least / self.seconds

    def sentence(self, part: str, kernels: str) -> str:
        """`part`: what of the request it belongs to; `kernels`: which ones run."""
        take, their = ("take", "their") if "layers" in self.name else ("takes", "its")
        found = f"{self.name} {take} {self.share:.0%} of {part} at {100 * self.reached:.0f}% of {their} limit"
        if self.by_torch:
            return f"{found}, because torch computes it: there is no kernel for it here"
        return f"{found}; these kernels ({kernels}) are what is slow, not the number of streams"


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """What the kernels of one tape could take at least, and what to call them."""

    costs: KernelCosts
    config: Mapping[str, Any]
    """Of the model."""
    kernels: str
    """Which ones run: those of an instruction set."""

    def slowest(self, part: Part, yardstick: Yardstick) -> SlowPart | None:
        """None where kernels are near the limit, or most of the time goes elsewhere, or none was timed."""
        if part.features is None or part.limit is None or not part.kernels or part.inside < part.seconds / 2:
            return None
        if part.limit > FAR_BELOW * part.inside:
            return None
        reach = yardstick.ceilings.read_at(yardstick.form.cost_of(part.features / part.steps).read)
        spent: dict[tuple[str, bool], tuple[float, float]] = {}
        for label, seconds in part.kernels.items():
            least = self.costs.summed(label, part.features).seconds(yardstick.peak, reach)
            kind = self.name_of(label), label.endswith(_TORCH)
            before = spent.get(kind, (0.0, 0.0))
            spent[kind] = before[0] + seconds, before[1] + least
        (name, by_torch), (seconds, least) = max(spent.items(), key=lambda item: item[1][0] - item[1][1])
        if least > FAR_BELOW * seconds:
            return None  # all lose a little, and none stands out
        return SlowPart(name, seconds, least, seconds / part.seconds, by_torch)

    def name_of(self, label: str) -> str:
        """Of a kernel, as someone calls it who knows the model and not the tape."""
        if label == HEAD:
            return "the head"
        shape = _SHAPE.search(label)
        if shape is None:
            return label.removesuffix(_TORCH)
        inner, outputs = int(shape[1]), int(shape[2])
        mlp = self.config.get("intermediate_size")
        if isinstance(mlp, int) and (inner == mlp or outputs in (mlp, 2 * mlp)):
            return "the linear layers of the MLP"
        return "the linear layers around attention" if self.config.get("num_attention_heads") else "the linear layers"
