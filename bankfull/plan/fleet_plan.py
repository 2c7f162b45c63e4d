"""`bankfull plan --simulate`: the configuration of one replica, and a day of the whole fleet with it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.fleet.routing import POLICIES, routing_policy
from bankfull.models.registry import Config
from bankfull.plan.configurations import Configuration
from bankfull.plan.day import MOST_REQUESTS, Day, RecordedDay, SyntheticDay
from bankfull.plan.fleet import FleetSimulation
from bankfull.plan.fleet_options import FleetOptions
from bankfull.plan.fleet_report import FleetOutcome
from bankfull.plan.planner import Planner, PlanRequest
from bankfull.plan.sites import Site
from bankfull.weights.source import ModelFiles

ALL = "all"
LONGEST_CONVERSATION = 4
"""Context of a replica's conversations, as a multiple of the longest single request."""
SHARE_REQUESTS = 60
"""Requests in the simulations that choose the configuration of one replica."""

Advance = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The simulated days, one for each routing policy, and the configuration of every replica."""

    model: str
    configuration: Configuration
    replicas: ReplicaRange
    outcomes: Sequence[FleetOutcome]
    traffic: str

    @property
    def title(self) -> str:
        configuration = self.configuration
        ways = "" if configuration.layout is None else f"{configuration.ways} "
        layout = "" if configuration.layout is None else f" as {configuration.layout.mesh}"
        devices = f"{self.replicas} x {ways}{configuration.site.name}{layout}"
        return f"{self.model}: {devices}, {configuration.prepared.name}, {configuration.rows} rows; {self.traffic}"

    @property
    def command(self) -> str:
        [alone] = replace(self.configuration, replicas=1).commands(self.model)
        words = [*shlex.split(alone), "--replicas", str(self.replicas), "--routing", self.outcomes[0].routing]
        if self.configuration.site.here:
            words[words.index("--device") + 1] = self.configuration.site.kind
        return shlex.join(words)

    def sentences(self) -> list[str]:
        first = self.outcomes[0].ledger
        minutes = first.seconds / 60
        hours = "" if minutes > 1400 else ": its curve and failures are compressed, pauses, steps and restarts are not"
        sentences = [
            f"The day takes {minutes:.4g} simulated minutes{hours}.",
            "Goodput and cost are those of the day; conversations that are open at its end go on afterwards.",
            f"{first.failed} replicas failed, {first.updated} were updated; requests that lost their replica continued "
            f"elsewhere ({first.resumed}), {first.lost} were lost.",
            "It runs with one command, on a Ray cluster with these devices (--ray HOST:PORT, docs/cluster.md):",
            f"  {self.command}",
        ]
        if self.configuration.site.depth:
            sentences.append("Steps are simulated at loop depth 0: on a GPU an arrival waits for one step more.")
        return sentences

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "traffic": self.traffic,
            "configuration": replace(self.configuration, replicas=1).as_json(self.model),
            "command": self.command,
            "simulated": [outcome.as_json() for outcome in self.outcomes],
        }


def policies_of(routing: str) -> list[str]:
    """The policies to compare: one by its name, or all."""
    if routing == ALL:
        return list(POLICIES)
    routing_policy(routing)
    return [routing]


def check_options(options: FleetOptions) -> None:
    """Raises ConfigError for figures that no fleet has."""
    for name, value, least in (
        ("--start-seconds", options.start_seconds, 0.0),
        ("--mtbf", options.mtbf_hours, 0.1),
        ("--grace", options.grace, 0.0),
    ):
        if value is not None and not least <= value < float("inf"):
            raise ConfigError(f"{name} {value:g} is out of range; give at least {least:g}.")
    if options.update_at is not None and not 0 <= options.update_at < 1:
        raise ConfigError(f"--update {24 * options.update_at:g} is no hour of the day; give 0 to 23.9.")
    if not 1 <= options.node_size <= 1024:
        raise ConfigError(f"--node-size {options.node_size} is out of range; give 1 to 1024 replicas per machine.")


def check_day(requests: int, trace: str | None) -> None:
    """Raises ConfigError for a day that cannot be simulated, as far as that is known without a replica."""
    if not 1 <= requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests {requests} is out of range; give 1 to {MOST_REQUESTS} with --simulate.")
    if trace is not None and not Path(trace).is_file():
        raise ConfigError(f"The trace {trace} is no file; give a recorded day, or leave out --trace.")


def configuration_for(
    subject: ModelFiles | Config, sites: Sequence[Site], request: PlanRequest, replicas: ReplicaRange, advance: Advance
) -> Configuration:
    """What `plan` recommends for one replica with its share of the traffic."""
    if request.separate is not None:
        raise ConfigError("--simulate runs replicas that prefill and decode; leave out --separate, or plan without it.")
    share = request.traffic.at(request.traffic.rate / replicas.most)
    one = replace(request, traffic=share, most=1, requests=min(request.requests, SHARE_REQUESTS))
    recommended = Planner(subject, sites, one, advance).plan().recommended
    if recommended is None:
        raise ConfigError("No device holds the model and its requests; choose others with --devices.")
    return replace(recommended.configuration, replicas=1)


def simulate_fleet(
    request: PlanRequest,
    configuration: Configuration,
    options: FleetOptions,
    requests: int,
    routing: str,
    trace: str | None,
    advance: Advance,
) -> FleetPlan:
    check_options(options)
    longest = request.traffic.longest
    if configuration.prepared.canvas is not None:
        raise ConfigError(
            "A fleet's day is simulated for models that predict the next token only; plan a diffusion model without "
            "--simulate."
        )
    if configuration.scheduling.batching != "continuous":
        raise ConfigError("--simulate runs replicas with continuous batching; leave out --batching.")
    spec = configuration.replica(longest)
    context = min(spec.sizes.max_len, max(LONGEST_CONVERSATION * longest, 4096))
    day: Day
    if trace is None:
        day = SyntheticDay(request.traffic, requests, context, request.seed)
    else:
        day = RecordedDay(Path(trace), requests, spec.sizes.max_len, request.seed)
    outcomes = []
    options = replace(options, slo=request.objectives.slo)
    for number, policy in enumerate(policies_of(routing)):
        simulation = FleetSimulation(
            spec, day, replace(options, routing=policy), _after(number * day.requests, advance)
        )
        outcomes.append(
            FleetOutcome(
                policy,
                str(options.replicas),
                simulation.run(),
                request.objectives.slo,
                replace(configuration, replicas=1).dollars_per_hour,
            )
        )
    shown = f"{request.traffic}" if trace is None else f"{Path(trace).name}"
    return FleetPlan(request.model, configuration, options.replicas, outcomes, shown)


def _after(before: int, advance: Advance) -> Advance:
    """Progress of a day after others."""
    return lambda done, note: advance(before + done, note)
