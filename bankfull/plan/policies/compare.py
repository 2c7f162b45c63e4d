"""Policies side by side: the figures of each, as a table, a chart and JSON, and which of them mean nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from bankfull.charts import Axis, Chart, Series
from bankfull.config import SchedConfig
from bankfull.errors import ConfigError
from bankfull.limits.statistics import quantile
from bankfull.limits.units import duration, scaled
from bankfull.plan.policies.jobs import JobTraffic
from bankfull.plan.policies.simulator import JobRun, saturation, state_of
from bankfull.plan.policies.step_model import StepModel
from bankfull.scheduling import POLICIES

BATCHES = {"static": "static", "dynamic": "dynamic"}
"""Request-level batching, as contenders beside the policies: name -> `SchedConfig.batching`."""
CONTENDERS = (*POLICIES, *BATCHES)


def contenders(base: SchedConfig, names: Sequence[str]) -> dict[str, SchedConfig]:
    """The schedulers to compare, by name. `base`: everything but the policy and the gate."""
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise ConfigError(f"--with {unknown[0][:40]!r} is unknown; use some of {', '.join(CONTENDERS)}.")
    schedulers = {}
    for name in dict.fromkeys(names or CONTENDERS):
        if name in BATCHES:
            size = min(base.batch_size, base.rows)
            schedulers[name] = replace(base, policy="fcfs", batching=BATCHES[name], batch_size=size)
        else:
            schedulers[name] = replace(base, policy=name, batching="continuous")
    return schedulers


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One policy on one traffic; times in seconds."""

    policy: str
    jct_mean: float
    """Job completion time: from arrival to the last token."""
    jct_p99: float
    jct_longest: float
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    blocked_mean: float
    """Head-of-line blocking (`sched.blocked`)."""
    blocked_p99: float
    goodput: float
    """Jobs per second that took at most `stretch` times as long as on an idle engine."""
    good: float
    """Share of all jobs that took at most `stretch` times as long as on an idle engine."""
    preemptions: int
    swapped_bytes: int
    seconds: float
    overloaded: bool = False
    """Whether more jobs arrive than the policy can serve: its queue, and all times that include waiting, grow with the
    number of jobs."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def figures(policy: str, run: JobRun, model: StepModel, stretch: float) -> PolicyFigures:
    done = [one for one in run.times if one.done]
    assert len(done) == len(run.times), "every job ends"
    jct, ttft, blocked = (
        sorted(values)
        for values in ([one.e2e for one in done], [one.ttft for one in done], [one.blocked for one in done])
    )
    tpot = [one.tpot for one in done if one.tokens > 1]
    good = sum(one.e2e <= stretch * model.alone(one.prompt, one.output) for one in done)
    return PolicyFigures(
        policy,
        sum(jct) / len(jct),
        quantile(jct, 0.99),
        jct[-1],
        sum(ttft) / len(ttft),
        quantile(ttft, 0.99),
        sum(tpot) / max(1, len(tpot)),
        sum(blocked) / len(blocked),
        quantile(blocked, 0.99),
        good / run.seconds,
        good / len(done),
        run.preemptions,
        run.swapped,
        run.seconds,
    )


def mark_overloaded(
    found: Sequence[PolicyFigures],
    compared: Mapping[str, SchedConfig],
    model: StepModel,
    traffic: JobTraffic,
    rate: float,
    load: float,
) -> tuple[list[PolicyFigures], list[str]]:
    """The figures, marked where the policy cannot serve `rate` jobs per second, and a sentence for each of these. With
    continuous batching every policy serves as many as fcfs, of whose saturation `load` is a fraction."""
    marked, notes = [], []
    for one in found:
        sched = compared[one.policy]
        served = rate / load if sched.batching == "continuous" else min(rate / load, saturation(sched, model, traffic))
        marked.append(replace(one, overloaded=rate >= served))
        if rate >= served:
            notes.append(
                f"{one.policy} is overloaded: it serves {served:.3g} of the {rate:.3g} jobs per second, and its queue "
                f"grows without bound; --load {0.9 * served / rate * load:.2g} bounds it."
            )
    return marked, notes


def equal_policies(
    found: Sequence[PolicyFigures], compared: Mapping[str, SchedConfig], traffic: JobTraffic, memory_tokens: int
) -> list[str]:
    """A sentence if Orca's reservation cannot make a job wait. `memory_tokens`: as for the simulated engine."""
    if not {"fcfs", "orca"} <= {one.policy for one in found}:
        return []
    sched = compared["orca"]
    state = state_of(sched, traffic, memory_tokens)
    needed = sched.rows * state.frames_for(traffic.most_tokens, sched.step_tokens)
    if state.pages.size < needed:
        return []
    return [
        "orca equals fcfs here: it only reserves memory for the largest lengths, which the memory holds for all rows; "
        f"--memory-tokens {needed * state.layout.block_tokens // 4} shows the difference."
    ]


def policy_table(found: Sequence[PolicyFigures], title: str) -> Table:
    table = Table(title=Text(title))
    table.add_column("policy", no_wrap=True)
    headings = (
        "JCT",
        "p99",
        "longest",
        "TTFT",
        "p99",
        "TPOT",
        "blocked",
        "p99",
        "good/s",
        "good",
        "preempted",
        "swapped",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        waits = one.jct_mean, one.jct_p99, one.jct_longest, one.ttft_mean, one.ttft_p99
        blocked = one.blocked_mean, one.blocked_p99
        done = str(one.preemptions), scaled(one.swapped_bytes, "B")
        if one.overloaded:
            table.add_row(one.policy, "overloaded", *"-" * 4, duration(one.tpot_mean), *"-" * 4, *done)
        else:
            good = f"{one.goodput:.3g}", f"{one.good:.0%}"
            times = *map(duration, waits), duration(one.tpot_mean), *map(duration, blocked)
            table.add_row(one.policy, *times, *good, *done)
    return table


def policy_chart(found: Sequence[PolicyFigures], title: str) -> Chart:
    """Bars of the mean times, one group for each policy, the shortest first; without those that are overloaded."""
    ranked = sorted((one for one in found if not one.overloaded), key=lambda one: one.jct_mean)
    parts = (("job completion", "jct_mean"), ("blocked", "blocked_mean"), ("first token", "ttft_mean"))
    series = [
        Series(name, [(place, getattr(one, field)) for place, one in enumerate(ranked)], kind="bars")
        for name, field in parts
    ]
    return Chart(
        title, Axis("policy", names=[one.policy for one in ranked]), Axis("mean time", low=0, unit="s"), series
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine and the simulator that was fed with its recorded step times."""

    same_order: bool
    """Whether the policies have the same order by mean job completion time; those that differ by less than `TIE` on
    the engine may come in any order."""
    largest_error: float
    """Largest relative difference of a mean job completion time."""

    def __str__(self) -> str:
        order = "the same order" if self.same_order else "another order"
        return (
            f"Fed with the recorded step times, the simulator gives {order} by mean job completion time, which differs "
            f"by at most {self.largest_error:.1%}."
        )


TIE = 0.05
STEADY = 1.1
"""A machine is steady if its mean speeds under all policies are within this factor."""


def unsteady(slowdowns: Mapping[str, float]) -> str | None:
    """A sentence if the machine was slower under one policy than under another; None if it was steady."""
    slowest, fastest = (choose(slowdowns, key=slowdowns.__getitem__) for choose in (max, min))
    factor = slowdowns[slowest] / slowdowns[fastest]
    if factor <= STEADY:
        return None
    return (
        f"The same steps took {factor:.2g} times as long under {slowest} as under {fastest}, because the machine did "
        "other work, too: compare the policies in the simulated table, or on an idle machine."
    )


def agreement(measured: Sequence[PolicyFigures], simulated: Sequence[PolicyFigures]) -> Agreement:
    both = list(zip(measured, simulated, strict=True))
    errors = [abs(one.jct_mean / other.jct_mean - 1) for other, one in both]
    swapped = any(
        first.jct_mean * (1 + TIE) < second.jct_mean and first_too.jct_mean > second_too.jct_mean
        for first, first_too in both
        for second, second_too in both
    )
    return Agreement(not swapped, max(errors))


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """One pair of budgets of a step."""

    prefill_tokens: int
    decode_rows: int
    ttft: float
    tpot: float
    jct: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def tradeoff_table(found: Sequence[TradeoffPoint], title: str) -> Table:
    table = Table(title=Text(title))
    for heading in ("decode rows", "prefill tokens", "TTFT", "TPOT", "JCT"):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            str(one.decode_rows), str(one.prefill_tokens), duration(one.ttft), duration(one.tpot), duration(one.jct)
        )
    return table


def tradeoff_chart(found: Sequence[TradeoffPoint], title: str) -> Chart:
    """One line for each number of decode rows, over prompt tokens per step."""
    rows = list(dict.fromkeys(one.decode_rows for one in found))
    series = [
        Series(f"{count} rows decode", [(one.tpot, one.ttft) for one in found if one.decode_rows == count])
        for count in rows
    ]
    x, y = Axis("mean time per output token", unit="s", low=0), Axis("mean time to first token", log=True, unit="s")
    return Chart(title, x, y, series)
