"""The predicted figures of a configuration under a traffic, from one simulated run, next to their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bankfull.limits.meter.step import StepShape
from bankfull.limits.statistics import quantile
from bankfull.plan.configurations import Configuration
from bankfull.plan.pareto import Axes
from bankfull.plan.simulate import RequestTimes, Run
from bankfull.plan.traffic import TrafficSpec
from bankfull.traffic.slo import Slo

WORTH_TELLING = 0.01
PILING = 0.2
"""Growth of the backlog, as a fraction of arrivals, above which the configuration does not keep up."""


@dataclass(frozen=True, slots=True)
class Objectives:
    slo: Slo
    attainment: float = 0.9
    """Required SLO attainment: fraction of the requests that meet every objective."""

    def met(self, served: RequestTimes) -> bool:
        return served.done and self.slo.met(figures_of(served))

    def __str__(self) -> str:
        return f"{self.slo}, met by {self.attainment:.0%} of requests" if self.stated else "no bound on latency"

    @property
    def stated(self) -> bool:
        return bool(self.slo.stated)


def figures_of(served: RequestTimes) -> dict[str, float | None]:
    """Figures by objective; a single token has no TPOT."""
    many = served.tokens > 1
    return {
        "ttft": served.ttft,
        "tpot": served.tpot if many else None,
        "itl": served.longest_gap if many else None,
        "e2e": served.e2e,
    }


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    configuration: Configuration
    attainment: float
    goodput: float
    """Requests per second that meet every objective."""
    met: bool
    """The required attainment is reached, and the backlog does not grow."""
    piling_up: float
    """Growth of the backlog; see `Run.piling_up`."""
    requests_per_s: float
    output_per_s: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    itl_p99: float
    e2e_p99: float
    ttft_least: float
    """Shortest TTFT: an average prompt alone, at the ceilings."""
    tpot_least: float
    """Shortest TPOT: a single stream at the ceilings, in the middle of an average output."""
    percent_of_limit: float
    """Shortest time of the simulated steps over their predicted time."""
    dollars_per_million: float | None
    """Dollars per million output tokens."""
    memory: float
    """Bytes on all devices: weights, peak state, and the largest step."""
    busy: float
    mean_batch: float
    refused: int
    preemptions: int
    full_rows: float
    most_rows: int
    most_tokens: int
    """Peak rows and tokens of one step."""
    shares: dict[str, float]
    """Shares of device time by term, largest first."""
    requests: int

    @property
    def lossy(self) -> bool:
        return self.configuration.lossy

    @property
    def kl(self) -> float | None:
        """The loss of the stored weights and KV cache; None: unknown."""
        return self.configuration.prepared.loss.kl

    @property
    def device_seconds(self) -> float:
        """Device seconds per output token, over all devices."""
        return self.busy * self.configuration.devices / self.output_per_s if self.output_per_s else float("inf")

    def same_with(self, rows: int, step_tokens: int) -> bool:
        """Whether the schedule would be the same with other bounds: neither these nor its own were reached."""
        configuration, busiest = self.configuration, (self.most_rows, self.most_tokens)
        bounds = ((configuration.rows, rows), (configuration.step_tokens, step_tokens))
        return all(min(pair) > most for pair, most in zip(bounds, busiest, strict=True))

    @property
    def axes(self) -> Axes:
        return (
            -max(self.goodput, 1e-9),
            self.ttft_p99,
            max(self.tpot_p99, 1e-9),
            self.dollars_per_million,
            self.memory,
            self.configuration.prepared.loss.order,
        )

    def as_json(self, model: str) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name != "configuration"}
        return {"configuration": self.configuration.as_json(model), **figures}


def outcome_of(
    configuration: Configuration, run: Run, traffic: TrafficSpec, objectives: Objectives
) -> SimulatedOutcome:
    done = run.finished
    attainment = sum(objectives.met(served) for served in run.requests) / len(run.requests)
    keeps_up = run.piling_up <= PILING
    # If it keeps up, throughput equals the offered load; the time of the last outputs of a trace does not matter.
    seconds = len(run.requests) / traffic.rate if keeps_up else run.seconds
    output_per_s = sum(served.tokens for served in done) / seconds
    price = configuration.dollars_per_hour
    first = [served.ttft for served in done]
    pace = [served.tpot for served in done if served.tokens > 1] or [0.0]
    times, prepared = configuration.times, configuration.prepared
    prompt, output = round(traffic.prompt.mean), round(traffic.output.mean)
    state = run.most_pages * prepared.layout.frame_bytes * configuration.state_share
    aside = prepared.step_bytes * configuration.step_tokens / configuration.ways
    return SimulatedOutcome(
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
        times.least(
            StepShape.decode(1, prompt + (output + 1) // 2)
            if prepared.canvas is None
            else prepared.denoising(1, prompt, output)
        ),
        100 * run.spent.least / run.spent.seconds if run.spent.seconds else 0.0,
        None if price is None or not output_per_s else price / (output_per_s * 3600) * 1e6,
        configuration.devices * (configuration.rank_weights + state + aside),
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


def bottlenecks_of(outcome: SimulatedOutcome, objectives: Objectives) -> list[str]:
    """What limits the configuration, in sentences."""
    sentences = []
    ratios = _objective_ratios(outcome, objectives)
    if ratios:
        name, share = max(ratios.items(), key=lambda item: item[1])
        sentences.append(f"{name} is the tightest objective: its p99 is {share:.0%} of the bound.")
    largest, share = next(iter(outcome.shares.items()))
    part, _, bound = largest.partition(": ")
    by = {"memory": ", bound by memory bandwidth", "arithmetic": ", bound by arithmetic"}.get(bound, "")
    sentences.append(
        f"{share:.0%} of the device time goes to {part}{by}; overall it runs at {outcome.percent_of_limit:.0f}% of its "
        "limit."
    )
    if outcome.piling_up > PILING:
        sentences.append(
            f"It does not keep up: of 100 arriving requests, {100 * outcome.piling_up:.0f} are added to the backlog."
        )
    if outcome.refused:
        sentences.append(
            f"{outcome.refused} of {outcome.requests} requests are rejected because the queue is full: "
            "it needs more replicas, more rows or a faster device."
        )
    if outcome.full_rows > WORTH_TELLING:
        sentences.append(
            f"In {outcome.full_rows:.0%} of the steps all rows are taken while requests wait: more --rows would admit "
            "them."
        )
    if outcome.preemptions:
        sentences.append(f"{outcome.preemptions} sequences are preempted: memory for the KV cache is short.")
    sentences.append(
        f"The devices are busy for {outcome.busy:.0%} of the time, with {outcome.mean_batch:.1f} sequences in a step."
    )
    return sentences


def _objective_ratios(outcome: SimulatedOutcome, objectives: Objectives) -> dict[str, float]:
    figures = {"ttft": outcome.ttft_p99, "tpot": outcome.tpot_p99, "itl": outcome.itl_p99, "e2e": outcome.e2e_p99}
    return {name: figures[name] / bound for name, bound in objectives.slo.stated.items()}
