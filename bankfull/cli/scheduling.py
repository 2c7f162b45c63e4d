"""Options of scheduling, shared by all commands that run or predict an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from bankfull.declared import meanings
from bankfull.errors import ConfigError
from bankfull.scheduling import BATCHING, POLICIES, readers

_READ = {option: ", ".join(reading) for option, _, reading in readers()}


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """Which request runs first, and what a step may hold. None: not given."""

    policy: Annotated[
        str | None,
        typer.Option(
            help=f"Which request runs first. {meanings(POLICIES)}.",
            show_default="priority in serve and plan; fcfs elsewhere and with --batching",
        ),
    ] = None
    batching: Annotated[
        str | None,
        typer.Option(
            help=f"When a request may join the batch. {meanings(BATCHING)}.",
            show_default="continuous",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a static or dynamic batch.", show_default="8")
    ] = None
    batch_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Dynamic batching: an incomplete batch starts when its first request has waited so long.",
            show_default="0.05",
        ),
    ] = None
    prefill_tokens: Annotated[
        int | None,
        typer.Option(help="Most prompt tokens in one step.", show_default="what --step-tokens leaves beside decodes"),
    ] = None
    prefill_rows: Annotated[
        int | None, typer.Option(help="Most sequences whose prompts are computed in one step.", show_default="--rows")
    ] = None
    decode_rows: Annotated[
        int | None, typer.Option(help="Most sequences that decode in one step, in turns.", show_default="--rows")
    ] = None
    quantum_ms: Annotated[
        float | None,
        typer.Option(
            help=f"{_READ['quantum_ms']}: quantum of the first queue in milliseconds; each next one is twice as long.",
            show_default="10",
        ),
    ] = None
    starvation: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"{_READ['starvation']}: a request that has waited so long moves to the front.",
            show_default="3",
        ),
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=WEIGHT[,KEY=WEIGHT]",
            help=f"{_READ['weights']}: API keys by name and their shares of the service, relative to others (1).",
            show_default="all 1",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The given options, under the names of `LLM`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("prefill_tokens", "prefill_rows", "decode_rows"):
            if name in given and given[name] < 1:  # 0 means no limit in a configuration, but would be a strange limit
                raise ConfigError(f"--{name.replace('_', '-')} {given[name]} must be at least 1; leave it out for all.")
        if self.weights is not None:
            given["weights"] = parse_weights(self.weights)
        return given

    def served(self) -> dict[str, Any]:
        """The given options with the policy of a service, where batch work yields to online requests."""
        given = self.given()
        if self.batching in (None, "continuous"):
            given.setdefault("policy", "priority")
        return given


USUAL_SCHEDULING = SchedulingOptions()


def parse_weights(text: str) -> dict[str, float]:
    """The weights from `alice=2,bob=0.5`."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (side.strip() for side in part.rpartition("="))
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not equals or not name or name in weights or not 0 < weight < float("inf"):
            raise ConfigError(
                f"--weights {text[:80]!r} cannot be read at {part.strip()[:40]!r}; give each key once with a number "
                "above 0, such as alice=2,bob=0.5."
            )
        weights[name] = weight
    return weights
