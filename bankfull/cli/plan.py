"""`bankfull plan`: predict which configuration serves a given traffic, before anything is bought or started."""

from __future__ import annotations

import json as json_text
import re
from typing import Annotated

import typer

from bankfull.cli.options import ForecastAcceptance, ForecastSpeculative, Json
from bankfull.cli.scheduling import SchedulingOptions

DEFAULT_REQUESTS, MOST_REPLICAS = 200, 8
ROUTING, NODE_SIZE, START_SECONDS = "prefix", 8, 60.0
"""Usual values of --simulate."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a config.json, a .gguf file, a hub id (org/name), a shape of make-model --list, "
            "or a short name (smollm2)."
        ),
    ] = "smollm2",
    *,
    traffic: Annotated[
        str,
        typer.Option(
            help='Expected traffic: "rate=5/s, in=1000, out=200". Lengths may be ranges (in=200-2000); also shared=150 '
            "(tokens of a common prefix), arrivals=poisson|gamma|constant, burstiness=0.5."
        ),
    ],
    slo: Annotated[
        str | None,
        typer.Option(
            help='Latency objectives: "ttft=500ms, tpot=50ms" (ttft, tpot, itl, e2e). Without them, the '
            "time per token decides.",
            show_default="none",
        ),
    ] = None,
    attainment: Annotated[str, typer.Option(help="Fraction of the requests that must meet the objectives.")] = "90%",
    devices: Annotated[
        str, typer.Option(help="auto, cpu or cuda (this machine), or devices of the catalogue: h100,l4,cpu.")
    ] = "auto",
    goal: Annotated[
        str | None,
        typer.Option(
            help="Goal of the recommendation: goodput, cost (dollars per output token), efficiency (device time per "
            "output token) or latency.",
            show_default="goodput; without --slo cost, or efficiency where prices are unknown",
        ),
    ] = None,
    most: Annotated[int, typer.Option(help="Most replicas, on devices of the catalogue.")] = MOST_REPLICAS,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Layout of each replica over several devices: tp=2,pp=2 (also cp, ep, sp=on, ffn, hot), or auto to "
            "try several.",
            show_default="one device, and more only where one is too small",
        ),
    ] = None,
    per_replica: Annotated[int, typer.Option(help="Most devices of one replica that are tried.")] = 8,
    separate: Annotated[
        str | None,
        typer.Option(
            help="Prefill and decode on engines of their own: prefill=1,decode=2, or auto to try several ratios beside "
            "common engines.",
            show_default="together",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Link between the devices of a replica, from the catalogue: nvlink-4, pcie-5, infiniband-400, ...",
            show_default="the device's own",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of this machine in dollars per hour.", show_default="unknown")
    ] = None,
    catalogue: Annotated[
        str | None, typer.Option(help="A file with more devices, in the catalogue's format.", show_default=False)
    ] = None,
    lossless: Annotated[
        bool, typer.Option("--lossless", help="Leave out configurations that quantize weights or the KV cache.")
    ] = False,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Leave out configurations whose loss is larger: KL divergence from the unrounded model in nats per "
            "token, measured on the model. Those whose loss is unknown are kept: without weights here, without enough "
            "memory to measure it, or with --no-calibrate.",
            show_default="no bound",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests in the longest simulation, in --verify, and in the day of --simulate.")
    ] = DEFAULT_REQUESTS,
    seed: Annotated[int, typer.Option(help="Random seed of arrivals and lengths.")] = 0,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="Measure nothing on this machine; use typical efficiency factors.")
    ] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Calibrate again, even if results are stored.")] = False,
    scheduling: SchedulingOptions,
    speculative: ForecastSpeculative = "off",
    acceptance: ForecastAcceptance = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Run the recommendation on this machine, and compare it with the prediction."),
    ] = False,
    chart: Annotated[
        str | None,
        typer.Option(
            help="Draw the configurations, or the simulated day, to this .svg or .png file.", show_default=False
        ),
    ] = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            help="Simulate a day of this many replicas (1000), or of a range that is scaled (100..1000), with the "
            "server's router and the engine's scheduler. --requests is then the number of requests of the day.",
            show_default=False,
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help="Routing of --simulate: prefix, completion, least-loaded, random-two, round-robin, or all."),
    ] = ROUTING,
    trace: Annotated[
        str | None,
        typer.Option(help="A recorded day for --simulate: the formats of `bankfull bench serve`.", show_default=False),
    ] = None,
    mtbf: Annotated[
        float | None,
        typer.Option(help="Mean hours between two failures of a replica in --simulate.", show_default="no failures"),
    ] = None,
    node_size: Annotated[int, typer.Option(help="Replicas that fail with one machine in --simulate.")] = NODE_SIZE,
    start_seconds: Annotated[
        float, typer.Option(help="Seconds until a started replica is ready in --simulate.")
    ] = START_SECONDS,
    update: Annotated[
        float | None,
        typer.Option(help="Hour of the day at which --simulate begins a rolling update.", show_default="no update"),
    ] = None,
    json: Json = False,
) -> None:
    """Predict how a model would serve a traffic on this machine or on others, and recommend a configuration.

    Step times come from the model's roofline, scaled by an efficiency factor for each kind of operation; short runs
    calibrate the factors of this machine once. The engine's own scheduler simulates queueing.
    """
    from bankfull.cli.terminal import print_table, progress
    from bankfull.errors import ConfigError
    from bankfull.familiar import configure
    from bankfull.limits.model.drafters import parse_drafter
    from bankfull.limits.model.recipe import open_model_or_config
    from bankfull.limits.model.speculation import BATCHES
    from bankfull.plan.outcome import Objectives
    from bankfull.plan.pareto import usual_goal
    from bankfull.plan.planner import Planner, PlanRequest
    from bankfull.plan.sites import sites_of
    from bankfull.plan.traffic import parse_traffic
    from bankfull.traffic.slo import Slo, parse_slo

    if simulate is None:
        given = {
            "--routing": routing != ROUTING,
            "--trace": trace is not None,
            "--mtbf": mtbf is not None,
            "--node-size": node_size != NODE_SIZE,
            "--start-seconds": start_seconds != START_SECONDS,
            "--update": update is not None,
        }
        for option, is_given in given.items():
            if is_given:
                raise ConfigError(f"{option} describes the day of --simulate; give --simulate 100, or leave it out.")
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {price} must be dollars per hour, above 0.")
    drafter = parse_drafter(speculative, acceptance)
    objectives = Objectives(Slo() if slo is None else parse_slo(slo), _share(attainment))
    sites = sites_of(devices, catalogue, price, link)
    if goal is None:
        goal = usual_goal(objectives.stated, all(site.dollars_per_hour is not None for site in sites))
    planned = requests if simulate is None else DEFAULT_REQUESTS
    request = PlanRequest(
        model,
        parse_traffic(traffic),
        objectives,
        goal,
        most,
        planned,
        seed,
        lossless,
        not no_calibrate,
        refresh,
        max_kl,
        configure(scheduling.served())[1],
        parallel,
        per_replica,
        separate,
    )
    if simulate is not None:
        from bankfull.cli.fleet import simulate_day
        from bankfull.fleet.replica_range import ReplicaRange
        from bankfull.plan.fleet_options import FleetOptions

        if verify:
            raise ConfigError("--verify runs one machine, --simulate a fleet; give one of them.")
        if most != MOST_REPLICAS:
            raise ConfigError("--simulate gives the number of replicas; leave out --most.")
        if drafter is not None:
            raise ConfigError("--speculative predicts one replica, --simulate a fleet; give one of them.")
        options = FleetOptions(
            ReplicaRange.parse(simulate),
            start_seconds=start_seconds,
            mtbf_hours=mtbf,
            node_size=node_size,
            update_at=None if update is None else update / 24,
            seed=seed,
        )
        simulate_day(request, sites, options, requests, routing, trace, chart, json)
        return
    subject = open_model_or_config(model)
    with progress("simulations", None) as advance:
        deployment = Planner(subject, sites, request, advance).plan()
    if chart is not None and deployment.pareto:
        from bankfull.charts import save
        from bankfull.plan.report import plan_chart

        save(plan_chart(deployment), chart)
    compared = []
    if verify:
        from bankfull.plan.verify import verify as run_here

        if deployment.recommended is None:
            raise ConfigError("There is nothing to verify: no configuration fits; change --traffic or --slo.")
        with progress("requests", requests) as advance:
            compared = run_here(deployment.recommended, request.traffic, objectives, requests, seed, advance)
    forecast = None
    if drafter is not None and deployment.recommended is not None:
        from bankfull.plan.speculation import planned_gain

        forecast = planned_gain(deployment.recommended.configuration, drafter, request.traffic)
    if json:
        extra: dict[str, object] = {"verified": [one.as_json() for one in compared]} if verify else {}
        if forecast is not None:
            extra["speculation"] = forecast.as_json(BATCHES)
        print(json_text.dumps(_finite(deployment.as_json() | extra)))
        return
    from bankfull.plan.report import later_table, pareto_table, sentences, verified_table

    if deployment.pareto:
        print_table(pareto_table(deployment))
    for line in sentences(deployment):
        print(line)
    later = later_table(deployment)
    if later is not None:
        print_table(later)
    if compared:
        print_table(verified_table(compared))
    if forecast is not None:
        from bankfull.limits.model.tables import gain_notes, gain_table

        print_table(gain_table(forecast, BATCHES, "with the recommendation's likely times"))
        print(gain_notes(forecast))


def _share(text: str) -> float:
    from bankfull.errors import ConfigError

    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)", text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise ConfigError(f"--attainment {text[:40]!r} is not a fraction of the requests; use for example 99% or 0.99.")
    return value


def _finite(value: object) -> object:
    """JSON has no infinity, so an event that never happens is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
