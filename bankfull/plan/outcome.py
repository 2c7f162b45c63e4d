"""What a configuration comes to under a traffic: the figures of one simulated run, each beside its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bankfull.bench.load.slo import Slo
from bankfull.limits.meter.step import StepShape
from bankfull.limits.statistics import quantile
from bankfull.plan.configurations import Configuration
from bankfull.plan.pareto import Axes
from bankfull.plan.simulate import Run, Served
from bankfull.plan.traffic import Traffic

WORTH_TELLING = 0.01
PILING = 0.2
"""Of the requests: if more than so many are added to those under way, they come faster than they are served."""


@dataclass(frozen=True, slots=True)
class Objectives:
    slo: Slo
    attainment: float = 0.9
    """The part of the requests that must meet every objective."""

    def met(self, served: Served) -> bool:
        return served.done and self.slo.met(figures_of(served))

    def __str__(self) -> str:
        return f"{self.slo}, met by {self.attainment:.0%} of requests" if self.stated else "no bound on latency"

    @property
    def stated(self) -> bool:
        return bool(self.slo.stated)


def figures_of(served: Served) -> dict[str, float | None]:
    """A single token has no time per output token."""
    many = served.tokens > 1
    return {
        "ttft": served.ttft,
        "tpot": served.tpot if many else None,
        "itl": served.longest_gap if many else None,
        "e2e": served.e2e,
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    configuration: Configuration
    attainment: float
    goodput: float
    """Requests per second that meet every objective."""
    met: bool
    """Enough of them do, and the requests do not pile up."""
    piling_up: float
    """See Run."""
    requests_per_s: float
    output_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p99: float
    e2e_p99: float
    ttft_least: float
    """An average prompt alone, at the ceilings."""
    tpot_least: float
    """A single stream at the ceilings, in the middle of an average answer."""
    percent_of_limit: float
    """The least time of the very steps that ran, over the time that is predicted for them."""
    dollars_per_million: float | None
    """Of output tokens."""
    memory: float
    """Bytes on all devices: weights, the state that was held at most, and the largest step."""
    busy: float
    mean_batch: float
    refused: int
    preemptions: int
    full_rows: float
    most_rows: int
    most_tokens: int
    """Of one step."""
    shares: dict[str, float]
    """Where the devices' time goes, largest first."""
    requests: int

    @property
    def lossy(self) -> bool:
        return self.configuration.lossy

    @property
    def device_seconds(self) -> float:
        """Of all devices together, for one output token."""
        return self.busy * self.configuration.devices / self.output_per_s if self.output_per_s else float("inf")

    def same_with(self, rows: int, step_tokens: int) -> bool:
        """Would the schedule be the same with other bounds, because neither these nor its own were ever reached?"""
        own, busiest = self.configuration, (self.most_rows, self.most_tokens)
        bounds = ((own.rows, rows), (own.step_tokens, step_tokens))
        return all(min(pair) > most for pair, most in zip(bounds, busiest, strict=True))

    @property
    def axes(self) -> Axes:
        return (
            -max(self.goodput, 1e-9),
            self.ttft_p99,
            max(self.tpot_p99, 1e-9),
            self.dollars_per_million,
            self.memory,
        )

    def as_json(self, model: str) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name != "configuration"}
        return {"configuration": self.configuration.as_json(model), **figures}


def outcome_of(configuration: Configuration, run: Run, traffic: Traffic, objectives: Objectives) -> Outcome:
    done = run.finished
    attainment = sum(objectives.met(served) for served in run.requests) / len(run.requests)
    keeps_up = run.piling_up <= PILING
    # Whoever keeps up serves what comes; how long the last answers of a trace take says nothing about that.
    seconds = len(run.requests) / traffic.rate if keeps_up else run.seconds
    output_per_s = sum(served.tokens for served in done) / seconds
    price = configuration.dollars_per_hour
    first = [served.ttft for served in done]
    pace = [served.tpot for served in done if served.tokens > 1] or [0.0]
    times, prepared = configuration.times, configuration.prepared
    prompt, output = round(traffic.prompt.mean), round(traffic.output.mean)
    state = run.most_pages * prepared.metered.layout.frame_bytes
    aside = prepared.step_bytes * configuration.step_tokens
    return Outcome(
        configuration,
        attainment,
        attainment * traffic.rate,
        attainment >= objectives.attainment and keeps_up,
        run.piling_up,
        len(done) / seconds,
        output_per_s,
        _quantile(first, 0.5),
        _quantile(first, 0.99),
        _quantile(pace, 0.5),
        _quantile(pace, 0.99),
        _quantile([served.longest_gap for served in done], 0.99),
        _quantile([served.e2e for served in done], 0.99),
        times.least(StepShape.prefill(prompt)),
        times.least(StepShape.decode(1, prompt + (output + 1) // 2)),
        100 * run.spent.least / run.spent.seconds if run.spent.seconds else 0.0,
        None if price is None or not output_per_s else price / (output_per_s * 3600) * 1e6,
        configuration.replicas * (prepared.weights + state + aside),
        run.busy,
        run.mean_batch,
        sum(served.refused for served in run.requests),
        run.preemptions,
        run.full_rows,
        run.most_rows,
        run.most_tokens,
        run.spent.shares(),
        len(run.requests),
    )


def _quantile(values: list[float], share: float) -> float:
    return quantile(sorted(values), share) if values else float("inf")


def what_limits(outcome: Outcome, objectives: Objectives) -> list[str]:
    """Sentences that follow from the figures."""
    found = []
    strain = _strains(outcome, objectives)
    if strain:
        name, share = max(strain.items(), key=lambda item: item[1])
        found.append(f"Of the objectives {name} is the tightest: its p99 is {share:.0%} of what is allowed.")
    largest, share = next(iter(outcome.shares.items()))
    part, _, bound = largest.partition(": ")
    by = {"memory": ", bound by memory bandwidth", "arithmetic": ", bound by arithmetic"}.get(bound, "")
    found.append(
        f"{share:.0%} of the device's time goes to {part}{by}; in all it runs at "
        f"{outcome.percent_of_limit:.0f}% of its limit."
    )
    if outcome.piling_up > PILING:
        found.append(
            f"It cannot keep up: of 100 requests that come, {100 * outcome.piling_up:.0f} are added to those "
            "that wait or run."
        )
    if outcome.refused:
        found.append(
            f"{outcome.refused} of {outcome.requests} requests are refused because the queue is full: "
            "more replicas, rows or a faster device are needed."
        )
    if outcome.full_rows > WORTH_TELLING:
        found.append(
            f"In {outcome.full_rows:.0%} of the steps every row is taken while requests wait: more --rows "
            "would let them in."
        )
    if outcome.preemptions:
        found.append(f"{outcome.preemptions} sequences lose their pages to others: memory for state is short.")
    found.append(
        f"The devices are busy for {outcome.busy:.0%} of the time, with {outcome.mean_batch:.1f} sequences in a step."
    )
    return found


def _strains(outcome: Outcome, objectives: Objectives) -> dict[str, float]:
    figures = {"ttft": outcome.ttft_p99, "tpot": outcome.tpot_p99, "itl": outcome.itl_p99, "e2e": outcome.e2e_p99}
    return {name: figures[name] / bound for name, bound in objectives.slo.stated.items()}
