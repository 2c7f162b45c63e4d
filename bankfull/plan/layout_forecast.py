"""One layout of a model on devices of the catalogue: memory per rank, collectives, and times of single steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from bankfull.errors import ConfigError
from bankfull.limits.layout.measured import dims_of
from bankfull.limits.layout.memory import rank_weights
from bankfull.limits.layout.wire import WireExchange, exchanges, sent_bytes, summed
from bankfull.limits.machine import catalogue
from bankfull.limits.machine.links import BETWEEN_MACHINES, Interconnect
from bankfull.limits.machine.targets import TargetMachine, is_here
from bankfull.limits.meter.closed_form import forms_by_operation
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.memory import sequence_bytes
from bankfull.limits.model.recipe import Recipe
from bankfull.limits.units import duration, scaled
from bankfull.plan.calibrate import step_times
from bankfull.plan.efficiency import assumed
from bankfull.plan.layouts import REACHED, ParallelLayout
from bankfull.plan.step_times import StepTimes
from bankfull.ranks.mesh import MeshSpec


def links_of(device: str, link: str | None, extra: str | None = None) -> Interconnect:
    """The links between several of a device; `link` names another one."""
    known = catalogue.load(extra)
    if link is not None:
        return Interconnect(known.find_link(link), known.find_link(BETWEEN_MACHINES))
    if is_here(device):
        raise ConfigError("--parallel needs the link between several of this machine's devices; give --link.")
    interconnect = known.interconnect(known.find(device))
    if interconnect is None:
        raise ConfigError(f"The catalogue knows no link between several {device[:60]}; give --link.")
    return interconnect


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A step on one device and on the layout."""

    title: str
    alone_least: float
    alone_likely: float
    least: float
    likely: float
    exchange: float
    """Likely seconds of collectives."""
    sent: float
    """Bytes that the busiest rank sends."""


class LayoutForecast:
    def __init__(self, recipe: Recipe, machine: TargetMachine, mesh: MeshSpec, links: Interconnect) -> None:
        self.recipe, self.machine = recipe, machine
        self.layout = ParallelLayout(mesh, dims_of(recipe), links)
        self.layout.dims.check(mesh)

    @property
    def mesh(self) -> MeshSpec:
        return self.layout.mesh

    @cached_property
    def _times(self) -> tuple[StepTimes, StepTimes]:
        """Step times on one device, and on the layout."""
        forms, kind = forms_by_operation(self.recipe.metered()), self.machine.kind
        alone = step_times(self.recipe, kind, assumed(kind), self.machine.ceilings, forms)
        joined = StepTimes(forms, alone.ceilings, alone.rates, alone.efficiency, alone.overlaps, self.layout)
        return alone, joined

    def step(self, title: str, step: StepShape) -> StepForecast:
        alone, joined = self._times
        spent = joined.spent(step)
        sent = max(sent_bytes(self.layout.dims, self.mesh, step.tokens, step.logits, n) for n in range(self.mesh.pp))
        return StepForecast(
            title, alone.least(step), alone.likely(step), joined.least(step), spent.seconds, spent.exchange, sent
        )

    def state_per_sequence(self, context: int) -> float:
        """Bytes on the rank that has most."""
        return sequence_bytes(self.recipe.metered().layout, context) * self.layout.state_share

    def most_sequences(self, context: int) -> int | None:
        """Sequences whose state fits beside the weights; None if the memory is unknown, or without state."""
        each = self.state_per_sequence(context)
        if self.machine.memory is None or not each:
            return None
        return max(0, int((self.machine.memory - self.layout.weights) // each))

    def exchanges(self, step: StepShape) -> list[WireExchange]:
        return summed(exchanges(self.layout.dims, self.mesh, step.tokens, step.logits))

    def as_json(self, steps: Sequence[tuple[str, StepShape]], context: int) -> dict[str, Any]:
        return {
            "layout": str(self.mesh),
            "ranks": self.mesh.ranks,
            "link": self.layout.links.inside.name,
            "weight_bytes_per_rank": [rank_weights(self.layout.dims, self.mesh, n) for n in range(self.mesh.pp)],
            "state_bytes_per_sequence_and_rank": self.state_per_sequence(context),
            "most_sequences": self.most_sequences(context),
            "steps": [asdict(self.step(*one)) for one in steps],
            "exchanges": [
                {**asdict(one), "sent": one.sent, "step": title}
                for title, step in steps
                for one in self.exchanges(step)
            ],
        }

    def tables(self, steps: Sequence[tuple[str, StepShape]], context: int) -> Iterator[Table]:
        links = self.layout.links
        title = f"{self.mesh}: {self.mesh.ranks} x {self.machine.name}, {links.inside.title}"
        table = Table(title=title)
        for heading in ("step", "one device", "at best", "on all", "at best", "collectives", "sent per rank"):
            table.add_column(heading, justify="left" if heading == "step" else "right")
        for one in (self.step(*step) for step in steps):
            times = (one.alone_likely, one.alone_least, one.likely, one.least, one.exchange)
            table.add_row(one.title, *map(duration, times), scaled(one.sent, "B"))
        yield table
        for title, step in steps[-1:]:
            table = Table(title=f"collectives of {title}")
            for heading in ("axis", "what", "collective", "ranks", "count", "sent per rank", "time"):
                table.add_column(heading)
            for exchange in self.exchanges(step):
                seconds = exchange.seconds(self.mesh, links, REACHED)
                cells = (
                    exchange.axis,
                    exchange.what,
                    exchange.kind,
                    str(exchange.ranks),
                    f"{exchange.count:g}",
                    scaled(exchange.sent, "B"),
                )
                table.add_row(*cells, duration(seconds))
            yield table

    def sentences(self, context: int) -> Iterator[str]:
        most = self.most_sequences(context)
        fit = "" if most is None else f"; {most} sequences fit"
        if self.machine.memory is not None and self.layout.weights > self.machine.memory:
            fit = f"; its memory of {scaled(self.machine.memory, 'B')} is too small"
        yield (
            f"Each rank holds up to {scaled(self.layout.weights, 'B')} of weights and, of a sequence of {context} "
            f"tokens, {scaled(self.state_per_sequence(context), 'B')} of state{fit}."
        )
        yield "Times beside limits use assumed efficiency factors (docs/parallel.md)."
