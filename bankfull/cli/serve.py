"""`bankfull serve`: a model behind OpenAI's API."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bankfull.cli.options import EngineOptions
from bankfull.cli.protection import ProtectionOptions


def serve(
    served: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="What to serve, as for --model.", show_default="smollm2")
    ] = None,
    *,
    engine: EngineOptions,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients call the model; may be given several times.", show_default="the name given here"
        ),
    ] = None,
    no_generation_config: Annotated[
        bool, typer.Option("--no-generation-config", help="Ignore the sampling that the model recommends.")
    ] = False,
    queue_requests: Annotated[
        int | None, typer.Option(help="Samples that may wait beyond those that run.", show_default="as many again")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Larger calls are refused.")] = 4 << 20,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where files and batches survive the server; one server at a time.",
            show_default="by port, in the user's data directory; with port 0 a temporary one",
        ),
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that running answers get when the server is stopped.")] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option(help="An engine with work that makes no progress for so long is started again; 0: never.")
    ] = 60.0,
    step_ms: Annotated[
        float,
        typer.Option(
            help="While others decode, prompts are cut so that a step takes about so many milliseconds here; "
            "alone, four times as many; 0: only --step-tokens cuts them."
        ),
    ] = 250.0,
    give_up_after: Annotated[
        float,
        typer.Option(
            help="An engine that has died and is not loaded again for so many seconds ends the server with an error: "
            "give it more than a load takes. 0: it is tried for ever."
        ),
    ] = 0.0,
    protection: ProtectionOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients expect it.

    The engine runs in a process of its own and is started again if it dies. /ready tells when the model is loaded,
    /openapi.json what there is. Ctrl-C or SIGTERM lets running answers finish. SIGHUP reads keys and certificates
    again, without an end.
    """
    from bankfull import paths
    from bankfull.errors import ConfigError

    try:
        from bankfull.serve.run import run_server
    except ImportError as error:
        raise ConfigError(
            f"Serving needs the package {error.name!r}, which is not installed: pip install 'bankfull[serve]'."
        ) from None
    from bankfull.serve.settings import Settings

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
    )
    run_server(
        engine.model,
        {**engine.options(), "policy": "priority", "step_ms": step_ms},
        settings,
        protection=protection.protection(host),
        data=data_dir,
        queue_requests=queue_requests,
        grace=grace,
        stall_seconds=stall_seconds,
        give_up_after=give_up_after,
    )
