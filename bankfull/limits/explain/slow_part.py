"""The kernels that slow a step down: where they run far below the machine's limit, only faster kernels help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bankfull.limits.explain.kernel_profile import KernelCosts
from bankfull.limits.meter.metered import HEAD

if TYPE_CHECKING:
    from bankfull.limits.explain.recorder import StoryPart
    from bankfull.limits.meter.step_limit import StepLimit

FAR_BELOW = 0.5
"""Fraction of the limit below which the kernels themselves are the problem."""
_SHAPE = re.compile(r"(\d+) -> (\d+)$")
_TORCH = " (torch)"


@dataclass(frozen=True, slots=True)
class SlowPart:
    """The kind of kernel that loses the most time in one part of a request."""

    name: str
    seconds: float
    least: float
    """Seconds at the machine's limit."""
    share: float
    """Fraction of the part's time."""
    by_torch: bool

    @property
    def reached(self) -> float:
        """Fraction of the limit."""
        return self.least / self.seconds

    def sentence(self, part: str, kernels: str) -> str:
        """`part`: the part of the request; `kernels`: the instruction set and threads."""
        take, their = ("take", "their") if "layers" in self.name else ("takes", "its")
        lead = f"{self.name} {take} {self.share:.0%} of {part} at {100 * self.reached:.0f}% of {their} limit"
        if self.by_torch:
            return f"{lead}, because torch computes it: there is no kernel for it here"
        return f"{lead}; these kernels ({kernels}) are what is slow, not the number of streams"


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """Shortest times of the kernels of one tape, and names for them."""

    costs: KernelCosts
    config: Mapping[str, Any]
    """The model's configuration."""
    kernels: str
    """The instruction set and threads that run."""

    def slowest(self, part: StoryPart, step_limit: StepLimit) -> SlowPart | None:
        """None if kernels are near the limit, most of the time is outside of kernels, or none was timed."""
        if part.features is None or part.limit is None or not part.kernels or part.inside < part.seconds / 2:
            return None
        if part.limit > FAR_BELOW * part.inside:
            return None
        reach = step_limit.ceilings.read_at(step_limit.form.cost_of(part.features / part.steps).read)
        spent: dict[tuple[str, bool], tuple[float, float]] = {}
        for label, seconds in part.kernels.items():
            least = self.costs.summed(label, part.features).seconds(step_limit.rates, reach)
            kind = self.name_of(label), label.endswith(_TORCH)
            before = spent.get(kind, (0.0, 0.0))
            spent[kind] = before[0] + seconds, before[1] + least
        (name, by_torch), (seconds, least) = max(spent.items(), key=lambda item: item[1][0] - item[1][1])
        if least > FAR_BELOW * seconds:
            return None  # no kernel stands out
        return SlowPart(name, seconds, least, seconds / part.seconds, by_torch)

    def name_of(self, label: str) -> str:
        """A kernel's name in terms of the model instead of the tape."""
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
