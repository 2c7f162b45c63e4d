"""Architectures side by side: state and decode time against context, at equal parameter count.

Each architecture is a configuration as data (`models/composed.py`) that differs from the others only in its mixers. The
width of the feed-forward layers makes up for the mixers' parameters. The meter gives the costs; no weight exists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rich.table import Table

from bankfull.charts import Axis, Chart, Series
from bankfull.errors import ConfigError
from bankfull.limits.machine.targets import TargetMachine
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import roofline
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.memory import sequence_bytes
from bankfull.limits.units import duration, scaled
from bankfull.models.kinds import KINDS

SIZES: dict[str, Any] = {
    "model_type": "bankfull",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LAYERS = 24
"""Layers of every architecture."""
PARAMETERS = 1_300_000_000
WIDTH_STEP = 64
"""The width of a feed-forward layer is a multiple of it."""
CONTEXTS = tuple(1 << power for power in range(7, 18))
"""128 to 131,072 tokens."""
SHOWN = 4
"""Contexts in the table; the charts have all."""


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    layers: str
    """The layers in the notation of composed models."""
    kinds: tuple[str, ...] = ("attention",)
    """The kinds of mixers that it needs."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields that differ from SIZES."""

    def config(self, width: int) -> dict[str, Any]:
        return {**SIZES, **self.settings, "layers": self.layers, "intermediate_size": width}


def _every(block: str) -> str:
    return f"{LAYERS} x {block}"


_SHARED = {name: {"mixer": "attention", "share_every": 2} for name in ("local", "global")}
"""Two successive layers of a kind have the same keys and values."""
ARCHITECTURES = (
    Architecture("attention, 16 KV heads (MHA)", _every("global")),
    Architecture("attention, 4 KV heads (GQA)", _every("global"), settings={"num_key_value_heads": 4}),
    Architecture("attention, 1 KV head (MQA)", _every("global"), settings={"num_key_value_heads": 1}),
    Architecture("window of 1,024", _every("local(1024)")),
    Architecture("5 windows of 1,024 to 1 full", "4 x [5 x local(1024), global]"),
    Architecture("latent attention (MLA)", _every("mla"), ("mla",)),
    Architecture("K/V shared by 2 layers (CLA)", _every("global"), settings={"blocks": _SHARED}),
    Architecture(
        "Character.AI: MQA, windows, CLA",
        "4 x [5 x local(1024), global]",
        settings={"num_key_value_heads": 1, "blocks": _SHARED},
    ),
    Architecture("S4", _every("s4"), ("s4",)),
    Architecture("Mamba", _every("mamba"), ("mamba",)),
    Architecture("Mamba-2", _every("mamba2"), ("mamba2",)),
    Architecture("lightning attention", _every("lightning"), ("lightning",)),
    Architecture("gated delta net", _every("delta"), ("delta",)),
    Architecture(
        "BASED: convolution, Taylor, window of 64", "8 x [conv, based, local(64)]", ("conv", "based", "attention")
    ),
    Architecture("7 Mamba-2 to 1 attention", "3 x [4 x mamba2, global, 3 x mamba2]", ("mamba2", "attention")),
    Architecture("3 delta to 1 attention", "6 x [3 x delta, global]", ("delta", "attention")),
    Architecture("7 lightning to 1 attention", "3 x [7 x lightning, global]", ("lightning", "attention")),
)


def architectures() -> list[Architecture]:
    """The architectures whose mixers a composed model can have."""
    return [one for one in ARCHITECTURES if set(one.kinds) <= set(KINDS)]


def sized(one: Architecture, parameters: int = PARAMETERS) -> MeteredModel:
    """The model with the feed-forward width that comes closest to `parameters`, which are linear in it."""
    first, second = (MeteredModel(one.config(width)).parameters for width in (WIDTH_STEP, 2 * WIDTH_STEP))
    steps = round((parameters - first) / (second - first))
    if steps < 0:
        raise ConfigError(f"{one.name}: the mixers alone have more than {scaled(parameters)} parameters.")
    return MeteredModel(one.config(WIDTH_STEP * (1 + steps)))


@dataclass(frozen=True, slots=True)
class ContextPoint:
    context: int
    state_bytes: int
    """Bytes of one sequence: whole KV pages, and two recurrent slots, one read and one written."""
    seconds: float
    """Shortest time of a decode step."""


class ArchitectureCurve:
    """One architecture on a machine."""

    def __init__(self, one: Architecture, machine: TargetMachine, batch: int, contexts: Sequence[int]) -> None:
        self.architecture, self._machine, self._batch, self._contexts = one, machine, batch, contexts
        self.metered = sized(one)

    @cached_property
    def points(self) -> list[ContextPoint]:
        dtype = str(self.metered.dtype).removeprefix("torch.")
        points = []
        for context in self._contexts:
            ledger = self.metered.cost(StepShape.decode(self._batch, context))
            bound = roofline(ledger, self._machine.ceilings, dtype)
            points.append(ContextPoint(context, sequence_bytes(self.metered.layout, context), bound.seconds))
        return points

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.architecture.name,
            "layers": self.architecture.layers,
            "parameters": self.metered.parameters,
            "points": [
                {"context": p.context, "state_bytes": p.state_bytes, "seconds_per_token": p.seconds}
                for p in self.points
            ],
        }


class ArchitectureComparison:
    def __init__(self, machine: TargetMachine, batch: int = 1, contexts: Sequence[int] = CONTEXTS) -> None:
        longest = SIZES["max_position_embeddings"]
        if not contexts or max(contexts) > longest:
            raise ConfigError(f"The architectures are compared at contexts up to {longest} tokens; give shorter ones.")
        self.machine, self.batch, self.contexts = machine, batch, sorted(set(contexts))
        self.curves = [ArchitectureCurve(one, machine, batch, self.contexts) for one in architectures()]

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "batch": self.batch,
            "architectures": [curve.as_json() for curve in self.curves],
        }

    def table(self) -> Table:
        step = max(1, (len(self.contexts) - 1) // (SHOWN - 1))
        shown = list(range(len(self.contexts) - 1, -1, -step))[:SHOWN][::-1]
        table = Table(
            title=f"architectures of {scaled(PARAMETERS)} parameters on {self.machine.name}, decode, batch {self.batch}"
        )
        table.add_column("architecture")
        table.add_column("parameters", justify="right")
        for place in shown:
            table.add_column(f"state at {self.contexts[place]}", justify="right")
        for place in shown:
            table.add_column(f"step at {self.contexts[place]}", justify="right")
        for curve in self.curves:
            points = [curve.points[place] for place in shown]
            table.add_row(
                curve.architecture.name,
                scaled(curve.metered.parameters),
                *(scaled(point.state_bytes, "B") for point in points),
                *(duration(point.seconds) for point in points),
            )
        return table

    def charts(self) -> dict[str, Chart]:
        """Charts by file name, without a suffix."""
        return {
            "architectures-state": self._chart(
                "State of one sequence", Axis("bytes", log=True, unit="B"), lambda point: float(point.state_bytes)
            ),
            "architectures-time": self._chart(
                f"Time of a decode step, batch {self.batch}, at best on {self.machine.name}",
                Axis("time", log=True, unit="s"),
                lambda point: point.seconds,
            ),
        }

    def _chart(self, title: str, axis: Axis, value: Any) -> Chart:
        series = [
            Series(curve.architecture.name, [(float(point.context), value(point)) for point in curve.points])
            for curve in self.curves
        ]
        about = f"{title}, {scaled(PARAMETERS)} parameters each"
        return Chart(about, Axis("tokens in the context", log=True), axis, series)
