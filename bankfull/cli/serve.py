"""`bankfull serve`: serve a model with an OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bankfull.cli.options import EngineOptions
from bankfull.cli.protection import ProtectionOptions
from bankfull.cli.replicas import ReplicaOptions


def serve(
    served: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The model to serve, as for --model.", show_default="smollm2"),
    ] = None,
    *,
    engine: EngineOptions,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in the API; may be given several times.", show_default="the name given as argument"
        ),
    ] = None,
    no_generation_config: Annotated[
        bool, typer.Option("--no-generation-config", help="Ignore the sampling parameters that the model recommends.")
    ] = False,
    queue_requests: Annotated[
        int | None, typer.Option(help="Most sequences waiting in the queue.", show_default="as many as --rows")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body; larger ones are refused.")] = 4 << 20,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for files and batches; one server at a time.",
            show_default="per port, in the user's data directory; temporary with port 0",
        ),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds to finish running requests when the server stops.")] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option(help="Seconds without progress after which a busy engine is restarted; 0: never.")
    ] = 60.0,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="GOALS",
            help='Latency objectives of each request, such as "ttft=500ms, tpot=50ms" (also itl, e2e): counted in the '
            "metrics, and with a range of --replicas a reason to add one.",
            show_default="none",
        ),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="PRICES",
            help='Prices per million tokens, for the cost in usage: "input=3, output=15", also cached, write-5m and '
            "write-1h (by default 0.1, 1.25 and 2 times the input's).",
            show_default="none",
        ),
    ] = None,
    pin_minimum: Annotated[int, typer.Option(help="Tokens that a prefix needs to be pinned by cache_control.")] = 1024,
    response_cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE[:PATH]",
            help="Answer exact repetitions of deterministic calls (temperature 0, or a seed) from a cache: 256MiB in "
            "memory, or 10GiB:/var/cache/answers.db in an SQLite file.",
            show_default="none",
        ),
    ] = None,
    step_ms: Annotated[
        float,
        typer.Option(
            help="Target milliseconds of a step that decodes: prompts are split into chunks to meet it. "
            "Steps without decodes may take four times as long. 0: only --step-tokens limits chunks."
        ),
    ] = 250.0,
    give_up_after: Annotated[
        float,
        typer.Option(
            help="Seconds to restart an engine that died, after which the server exits with an error. "
            "Must be longer than loading the model takes. 0: no time-out."
        ),
    ] = 0.0,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="Replace the server that this user runs on --port, without a refused connection: load the model, "
            "then take its listening socket. The old server finishes its requests and ends.",
        ),
    ] = False,
    replication: ReplicaOptions,
    protection: ProtectionOptions,
) -> None:
    """Serve a model over HTTP with an OpenAI-compatible API.

    The engine runs in a separate process and is restarted if it dies. With --replicas there are several, on one or more
    machines, and a stream continues on another one if its replica dies. /ready reports when the model is loaded, and
    /openapi.json describes the API. Ctrl-C or SIGTERM stops the server after running requests have finished. SIGHUP
    reloads keys and certificates.
    """
    from bankfull import paths
    from bankfull.errors import ConfigError
    from bankfull.familiar import configure

    try:
        from bankfull.serve.run import Deployment, run_server
    except ImportError as error:
        raise ConfigError(
            f"Serving needs the package {error.name!r}, which is not installed: pip install 'bankfull[serve]'."
        ) from None
    from bankfull.fleet.attainment import SloMeter
    from bankfull.serve.api.prices import parse_prices
    from bankfull.serve.settings import Settings
    from bankfull.traffic.slo import parse_slo

    if data_dir is None and port:
        data_dir = paths.data_dir() / "serve" / str(port)
    engine = engine if served is None else replace(engine, model=served)
    names = tuple(served_model_name or [engine.model])
    settings = Settings(
        names=names,
        host=host,
        port=port,
        max_body_bytes=max_body_bytes,
        use_generation_config=not no_generation_config,
        prices=None if prices is None else parse_prices(prices),
        pin_minimum=pin_minimum,
    )
    if take_over and not port:
        raise ConfigError("--take-over needs the --port of the server to replace.")
    # Ray places whole engines here, which are told where their ranks are.
    options = {**engine.options(), **engine.scheduling.served(), "step_ms": step_ms, "ray": None}
    run, _, state, _ = configure(options)  # a bad option is told before a process is started
    slo_meter = None if slo is None else SloMeter(parse_slo(slo))
    replicas = replication.factory(engine.model, run, state, engine.ray, grace, slo_meter, take_over)
    options["memory"] = replication.memory(options.get("memory"), run.device, engine.ray)
    run_server(
        Deployment(
            model=engine.model,
            options=options,
            settings=settings,
            protection=protection.protection(host),
            data=data_dir,
            queue_requests=queue_requests,
            grace=grace,
            stall_seconds=stall_seconds,
            give_up_after=give_up_after,
            replicas=replicas,
            slo=slo_meter,
            take_over=take_over,
            response_cache=response_cache,
        )
    )
