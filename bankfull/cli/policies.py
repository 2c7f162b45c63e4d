"""`bankfull bench policies` and `bench tradeoff`: scheduling policies and budgets on one traffic."""

from __future__ import annotations

import json as json_text
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import EngineOptions, Json, refuse_unread
from bankfull.cli.scheduling import USUAL_SCHEDULING
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from bankfull.config import SchedConfig
    from bankfull.plan.policies.compare import PolicyFigures
    from bankfull.plan.policies.jobs import JobTraffic, TrafficJob
    from bankfull.plan.policies.step_model import StepModel

ROWS, STEP_TOKENS = 8, 512
"""Defaults of the compared schedulers: few rows, so that jobs wait."""
CALIBRATION_JOBS, SATURATION_JOBS = 16, 4000
TOKEN_BYTES = 131072
SIMULATED = ("rows", "step_tokens", "scheduling")
"""Options of the engine that the simulator reads."""


@dataclass(frozen=True, slots=True)
class TrafficOptions:
    """The jobs: outputs with a heavy tail, arrivals in bursts."""

    jobs: Annotated[
        int | None, typer.Option(help="Number of jobs.", show_default="10000 simulated, 64 on the engine")
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and lengths.")] = 0
    load: Annotated[float, typer.Option(help="Arrival rate, as a fraction of what fcfs can serve at most.")] = 0.9
    tail: Annotated[float, typer.Option(help="Exponent of the Pareto distribution of output lengths.")] = 1.5
    shortest: Annotated[int, typer.Option(help="Fewest tokens of an output.")] = 16
    longest: Annotated[int, typer.Option(help="Most tokens of an output.")] = 2048
    prompt_len: Annotated[str, typer.Option(metavar="LOW-HIGH", help="Tokens of prompts.")] = "48-256"
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distribution of gaps: below 1 is bursty, 1 is Poisson.")
    ] = 0.5
    keys: Annotated[int, typer.Option(help="API keys; the first one sends half of the jobs.")] = 1

    def traffic(self, usual: int) -> JobTraffic:
        from bankfull.plan.policies.jobs import JobTraffic

        low, _, high = self.prompt_len.partition("-")
        if not (low.isdecimal() and (high or low).isdecimal()):
            raise ConfigError(f"--prompt-len {self.prompt_len[:40]!r} is no range of tokens; use for example 48-256.")
        if not 0 < self.load < float("inf"):
            raise ConfigError(f"--load {self.load} must be a fraction above 0, for example 0.9.")
        return JobTraffic(
            self.jobs if self.jobs is not None else usual,
            self.seed,
            self.tail,
            self.shortest,
            self.longest,
            (int(low), int(high or low)),
            keys=self.keys,
            burstiness=self.burstiness,
        )


StepTimesText = Annotated[
    str | None,
    typer.Option(
        metavar="TERM=TIME[,TERM=TIME]",
        help="Time of a simulated step: step + row x decoding sequences + context x their tokens + prompt x prompt "
        "tokens.",
        show_default="step=8ms,row=20us,context=10ns,prompt=30us",
    ),
]
ChartPath = Annotated[Path | None, typer.Option(help="Draw the figures to this .svg or .png file.")]
Stretch = Annotated[
    float, typer.Option(help="A job is good if it takes at most this many times as long as on an idle engine.")
]


def policies(
    *,
    engine: EngineOptions,
    traffic: TrafficOptions,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="POLICY",
            help="A policy (see --policy), or static or dynamic batches; may be given several times.",
            show_default="all",
        ),
    ] = None,
    on_engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Run the jobs on the model, too, and compare with the simulator fed with its step times."
        ),
    ] = False,
    step_times: StepTimesText = None,
    memory_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache of the simulated device in tokens.", show_default="8 sequences per row"),
    ] = None,
    host_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a simulated host tier, for the state of preempted sequences.")
    ] = 0,
    token_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of a token's state, for the bytes swapped.")
    ] = TOKEN_BYTES,
    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Simulate so many engines behind the router, which places jobs by their predicted completion, on the "
            "least loaded one, or on one of two drawn at random.",
        ),
    ] = 1,
    stretch: Stretch = 3.0,
    chart: ChartPath = None,
    json: Json = False,
) -> None:
    """Compare scheduling policies on one traffic: completion times, first tokens, blocking, goodput, preemptions.

    The simulator runs the engine's own scheduler and memory manager on a device that only models time. With --engine
    the same jobs run on the model, in real time. The recorded step times are fitted, and simulated on a machine that is
    always equally fast; and simulated at the speed that the machine had under each policy, to compare both.
    """
    from bankfull.charts import save
    from bankfull.charts.output import check_path
    from bankfull.cli.terminal import print_table, progress
    from bankfull.plan.policies.compare import (
        agreement,
        contenders,
        equal_policies,
        figures,
        mark_overloaded,
        policy_chart,
        policy_table,
        unsteady,
    )
    from bankfull.plan.policies.simulator import JobEngine, saturation
    from bankfull.plan.policies.step_model import StepModel

    if chart is not None:
        check_path(chart)
    if on_engine and (step_times is not None or memory_tokens is not None or host_tokens):
        raise ConfigError("--engine measures step times and has its own memory; leave out the simulator's options.")
    if not on_engine:
        refuse_unread(engine, SIMULATED, "the model, which only --engine runs; add --engine, or leave it out.")
    if token_bytes != TOKEN_BYTES and not host_tokens:
        raise ConfigError("--token-bytes counts what moves to a host tier; give --host-tokens, too, or leave it out.")
    if not stretch >= 1:
        raise ConfigError(f"--stretch {stretch} must be at least 1.")
    if replicas > 1 and (on_engine or memory_tokens is not None or host_tokens):
        raise ConfigError("--replicas simulates engines with the usual memory; leave out the options for one engine.")
    base = compared_base(engine)
    asked = traffic.traffic(64 if on_engine else 10_000)
    compared = contenders(base, names or [])
    model = StepModel() if step_times is None else StepModel.parse(step_times)
    measured: EngineRuns | None = None
    if on_engine:
        measured = _on_engine(engine, base, compared, asked, traffic.load, stretch)
        rate, model, compared, memory_tokens = measured.rate, measured.model, measured.compared, measured.memory_tokens
        base = replace(base, rows=measured.rows)
    else:
        few = replace(asked, jobs=min(asked.jobs, SATURATION_JOBS))
        rate = traffic.load * saturation(replace(base, policy="fcfs"), model, few)
    rate *= replicas
    jobs, simulated = asked.draw(rate), []
    if replicas > 1:
        simulated, compared = _placed(jobs, replicas, compared if names else {}, base, model, asked, stretch), {}
    with progress("jobs", asked.jobs * max(1, len(compared))) as advance:
        for number, (name, sched) in enumerate(compared.items()):
            simulator = JobEngine(
                sched,
                model,
                asked,
                memory_tokens=memory_tokens or 0,
                host_tokens=host_tokens,
                token_bytes=token_bytes,
            )
            before = number * asked.jobs
            run = simulator.run(
                jobs,
                lambda done, _, name=name, before=before: advance(before + done, name),  # type: ignore[misc]
            )
            simulated.append(figures(name, run, model, stretch))
    notes: list[str] = []
    if compared:
        few = replace(asked, jobs=min(asked.jobs, SATURATION_JOBS))
        simulated, overloads = mark_overloaded(simulated, compared, model, few, rate, traffic.load)
        if measured is not None:
            marked = {one.policy: one.overloaded for one in simulated}
            measured.figures[:] = [replace(one, overloaded=marked[one.policy]) for one in measured.figures]
        notes += overloads + equal_policies(simulated, compared, asked, memory_tokens or 0)
    engines = f"{replicas} x {base.rows} rows" if replicas > 1 else f"{base.rows} rows"
    title = f"{asked}, {traffic.load:g} of fcfs's saturation ({rate:.3g}/s), {engines}"
    if chart is not None:
        save(policy_chart(measured.figures if measured else simulated, title), chart)
    agreed = agreement(measured.figures, measured.replayed) if measured else None
    if json:
        said: dict[str, Any] = {
            "traffic": str(asked),
            "load": traffic.load,
            "rate": rate,
            "rows": base.rows,
            "replicas": replicas,
            "step_model": {name: getattr(model, name) for name in ("step", "row", "context", "prompt")},
            "simulated": [one.as_json() for one in simulated],
            "notes": notes,
        }
        if measured is not None and agreed is not None:
            said["measured"] = [one.as_json() for one in measured.figures]
            said["replayed"] = [one.as_json() for one in measured.replayed]
            said["slowdowns"] = measured.slowdowns
            said["same_order"], said["largest_error"] = agreed.same_order, agreed.largest_error
        print(json_text.dumps(said))
        return
    if measured is not None:
        print_table(policy_table(measured.figures, f"on {engine.model}: {title}"))
    print_table(policy_table(simulated, f"simulated: {title}"))
    print(f"steps: {model}. good: within {stretch:g}x of the time on an idle engine.")
    for note in notes:
        print(note)
    if measured is not None:
        if (warning := unsteady(measured.slowdowns)) is not None:
            print(warning)
        print(agreed)


def _placed(
    jobs: list[TrafficJob],
    replicas: int,
    compared: dict[str, SchedConfig],
    base: SchedConfig,
    model: StepModel,
    asked: JobTraffic,
    stretch: float,
) -> list[PolicyFigures]:
    """Policies, skip-join-mlfq if none is chosen, under each way to place jobs on replicas."""
    from bankfull.cli.terminal import progress
    from bankfull.plan.policies.compare import figures
    from bankfull.plan.policies.placing import ROUTINGS, place

    compared = compared or {"skip-join-mlfq": replace(base, policy="skip-join-mlfq")}
    if batched := [name for name, sched in compared.items() if sched.batching != "continuous"]:
        raise ConfigError(f"--replicas runs engines with continuous batching; leave out --with {batched[0]}.")
    simulated: list[PolicyFigures] = []
    with progress("jobs", len(jobs) * len(compared) * len(ROUTINGS)) as advance:
        for name, sched in compared.items():
            for routing in ROUTINGS:
                before = len(simulated) * len(jobs)
                run = place(
                    jobs,
                    replicas,
                    routing,
                    sched,
                    model,
                    asked,
                    asked.seed,
                    lambda done, note, before=before: advance(before + done, note),  # type: ignore[misc]
                )
                simulated.append(figures(f"{name}, {routing}", run, model, stretch))
    return simulated


def compared_base(engine: EngineOptions) -> SchedConfig:
    """The part of scheduling that all compared policies have alike."""
    from bankfull.config import SchedConfig

    if engine.scheduling.policy is not None or engine.scheduling.batching is not None:
        raise ConfigError("All policies are compared; leave out --policy and --batching, or choose some with --with.")
    given = engine.scheduling.given()
    if "weights" in given:
        given["weights"] = tuple(given["weights"].items())
    for name in ("rows", "step_tokens"):
        if (value := getattr(engine, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
    return SchedConfig(rows=engine.rows or ROWS, step_tokens=engine.step_tokens or STEP_TOKENS, **given)


@dataclass(frozen=True, slots=True)
class EngineRuns:
    """The policies on the model, and what the simulator takes from there."""

    rate: float
    """Jobs per second that arrived."""
    model: StepModel
    rows: int
    """Rows asked for, or as many as the engine has."""
    compared: dict[str, SchedConfig]
    memory_tokens: int
    """Tokens whose state fits into the engine's memory; 0 if it has no pages."""
    figures: list[PolicyFigures]
    replayed: list[PolicyFigures]
    """The same runs in the simulator, at the speed that the machine had in each."""
    slowdowns: dict[str, float]
    """Recorded step times of each policy over modelled ones."""


def _on_engine(
    engine: EngineOptions,
    base: SchedConfig,
    compared: dict[str, SchedConfig],
    asked: JobTraffic,
    load: float,
    stretch: float,
) -> EngineRuns:
    from bankfull.cli.terminal import progress
    from bankfull.plan.policies.compare import contenders, figures
    from bankfull.plan.policies.machine_speed import MachineSpeed, slowdown
    from bankfull.plan.policies.measure import measure, memory_tokens, scheduled
    from bankfull.plan.policies.simulator import JobEngine, saturation
    from bankfull.plan.policies.step_model import fit

    options = replace(engine, scheduling=USUAL_SCHEDULING, rows=base.rows, step_tokens=base.step_tokens)
    llm = replace(options, speculative=engine.speculative or "off").load()
    running, vocab = llm.loaded.engine, llm.loaded.frontend.vocab
    if running.drafting is not None or not running.strategy.idle:
        raise ConfigError("Step times with drafts are not simulated; leave out --speculative.")
    if asked.most_tokens > llm.max_model_len:
        raise ConfigError(
            f"Jobs of up to {asked.most_tokens} tokens do not fit into the context of {llm.max_model_len}; lower "
            "--longest or --prompt-len."
        )
    base = replace(base, rows=min(base.rows, running.scheduler.config.rows))
    compared = contenders(base, list(compared))  # the batches of fewer rows are smaller
    few, fcfs = replace(asked, jobs=min(asked.jobs, CALIBRATION_JOBS)), replace(base, policy="fcfs")
    running = scheduled(running, fcfs)
    _, records = measure(running, few.draw(float("inf")), few, vocab)
    rate = load * saturation(fcfs, fit(records), replace(asked, jobs=SATURATION_JOBS))
    jobs, runs = asked.draw(rate), {}
    with progress("jobs", asked.jobs * len(compared)) as advance:
        for number, (name, sched) in enumerate(compared.items()):
            running, before = scheduled(running, sched), number * asked.jobs
            runs[name] = measure(
                running,
                jobs,
                asked,
                vocab,
                lambda done, _, name=name, before=before: advance(before + done, name),  # type: ignore[misc]
            )
    model = fit([one for _, records in runs.values() for one in records])
    measured = EngineRuns(rate, model, base.rows, compared, memory_tokens(running.scheduler.state, asked), [], [], {})
    for name, (run, records) in runs.items():
        speed = MachineSpeed(model, records)
        simulator = JobEngine(compared[name], model, asked, memory_tokens=measured.memory_tokens, speed=speed)
        measured.figures.append(figures(name, run, model, stretch))
        measured.replayed.append(figures(name, simulator.run(jobs), model, stretch))
        measured.slowdowns[name] = slowdown(model, records)
    return measured


def tradeoff(
    *,
    traffic: TrafficOptions,
    rows: Annotated[int, typer.Option(min=1, help="Most sequences in the batch.")] = 32,
    step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens computed in one step.")] = 2048,
    policy: Annotated[str, typer.Option(help="The scheduling policy (see `bankfull serve`).")] = "fcfs",
    prefill_tokens: Annotated[
        str, typer.Option(metavar="N[,N]", help="Most prompt tokens of a step.")
    ] = "16,32,64,128,256,512,1024",
    decode_rows: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N]", help="Most sequences that decode in a step.", show_default="1/4, 1/2 and all rows"
        ),
    ] = None,
    step_times: StepTimesText = None,
    chart: ChartPath = None,
    json: Json = False,
) -> None:
    """Draw TTFT against TPOT over the two budgets of a step: prompt tokens, and sequences that decode.

    Each point is one simulated run of the same traffic. Few prompt tokens per step keep decode steps short and let
    prompts wait; few decode rows do the opposite.
    """
    from bankfull.charts import print_chart, save
    from bankfull.charts.output import check_path
    from bankfull.cli.terminal import print_table, progress
    from bankfull.config import SchedConfig
    from bankfull.plan.policies.compare import TradeoffPoint, figures, tradeoff_chart, tradeoff_table
    from bankfull.plan.policies.simulator import JobEngine, saturation
    from bankfull.plan.policies.step_model import StepModel

    if chart is not None:
        check_path(chart)
    asked = traffic.traffic(1000)
    model = StepModel() if step_times is None else StepModel.parse(step_times)
    base = SchedConfig(rows=rows, step_tokens=step_tokens, policy=policy)
    pairs = [
        (tokens, count)
        for count in _numbers("--decode-rows", decode_rows or f"{max(1, rows // 4)},{max(1, rows // 2)},{rows}")
        for tokens in _numbers("--prefill-tokens", prefill_tokens)
    ]
    few = replace(asked, jobs=min(asked.jobs, SATURATION_JOBS))
    rate = traffic.load * saturation(replace(base, policy="fcfs"), model, few)
    jobs, points = asked.draw(rate), []
    with progress("runs", len(pairs)) as advance:
        for number, (tokens, count) in enumerate(pairs):
            sched = replace(base, prefill_tokens=tokens, decode_rows=count)
            one = figures(policy, JobEngine(sched, model, asked).run(jobs), model, 10.0)
            points.append(TradeoffPoint(tokens, count, one.ttft_mean, one.tpot_mean, one.jct_mean))
            advance(number + 1, f"{tokens} prompt tokens, {count} rows")
    title = f"{asked}, {rate:.3g}/s, {rows} rows, {policy}"
    drawn = tradeoff_chart(points, title)
    if chart is not None:
        save(drawn, chart)
    if json:
        print(json_text.dumps({"traffic": str(asked), "rate": rate, "points": [one.as_json() for one in points]}))
        return
    print_table(tradeoff_table(points, title))
    print_chart(drawn)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option} {text[:40]!r} is no list of numbers above 0; use for example 64,256.")
    return list(dict.fromkeys(map(int, parts)))
