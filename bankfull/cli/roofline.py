"""`bankfull roofline`: what bounds a model on this machine or on one of the catalogue, from its configuration."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.cli.options import Activations, Dtype, ForecastAcceptance, ForecastSpeculative, Json, KvDtype

if TYPE_CHECKING:
    from bankfull.limits.model.bounds import ModelRoofline

PICTURES = ("svg", "png")


def roofline(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a config.json, a .gguf file, a hub id (org/name; only its configuration is "
            "read), or a short name (smollm2)."
        ),
    ] = "smollm2",
    *,
    device: Annotated[
        str,
        typer.Option(help="auto, cpu or cuda (measured on this machine), or a device of the catalogue: h200, l4, ..."),
    ] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences in the batch; several values separated by commas.")] = "1",
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens in the context of each sequence; several values separated by commas.", show_default="1024"
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of a prompt computed in one step.", show_default="1024")
    ] = None,
    catalogue: Annotated[
        str | None, typer.Option(help="A file with more devices, in the catalogue's format.", show_default=False)
    ] = None,
    dtype: Dtype = "auto",
    quantize: Annotated[
        str | None, typer.Option(help="Weight format, as for `run`: int8, int4, ...", show_default=False)
    ] = None,
    kv_dtype: KvDtype = "auto",
    activations: Activations = "auto",
    speculative: ForecastSpeculative = "off",
    acceptance: ForecastAcceptance = None,
    draw: Annotated[bool, typer.Option("--draw", help="Draw the charts in the terminal, too.")] = False,
    charts: Annotated[str | None, typer.Option(help="Directory for the charts.", show_default=False)] = None,
    picture: Annotated[str, typer.Option(help="File format of the charts: svg or png.")] = "svg",
    json: Json = False,
) -> None:
    """Show what bounds each operation of a model, and what batching, quantization and architecture would change.

    No weights are needed: a config.json is enough, even for models that this machine cannot hold.
    """
    from bankfull.config import RunConfig
    from bankfull.errors import ConfigError
    from bankfull.limits.machine.targets import machine_of
    from bankfull.limits.model.bounds import ModelRoofline, RooflineQuery, numbers
    from bankfull.limits.model.drafters import parse_drafter
    from bankfull.limits.model.recipe import open_model_or_config, recipe_of

    if picture not in PICTURES:
        raise ConfigError(f"--picture {picture[:40]!r} is not a known format; use svg or png.")
    drafter = parse_drafter(speculative, acceptance)
    subject = open_model_or_config(model)
    machine = machine_of(device, catalogue)
    recipe = recipe_of(
        subject, machine.kind, RunConfig(dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, activations=activations)
    )
    longest = recipe.metered().model.max_positions
    usual = min(1024, longest)
    contexts = (usual,) if context is None else numbers(context, "context")
    query = RooflineQuery(numbers(batch, "batch"), contexts, usual if prompt is None else prompt)
    found = ModelRoofline(recipe, machine, query, drafter)
    if json:
        print(json_text.dumps(found.as_json()))
    else:
        _show(found)
    if draw and not json:
        from bankfull.limits.charts import print_chart
        from bankfull.limits.model.charts import charts_of

        for chart in charts_of(found).values():
            print_chart(chart)
    if charts is not None:
        _keep(found, charts, picture)


def _show(found: ModelRoofline) -> None:
    from bankfull.cli.terminal import print_table, say
    from bankfull.limits.model.tables import (
        changes_table,
        curve_table,
        gain_notes,
        gain_table,
        phase_tables,
        summary_table,
    )

    for table in (summary_table(found), *phase_tables(found), curve_table(found), changes_table(found)):
        print_table(table)
    if (forecast := found.speculation) is not None:
        print_table(gain_table(forecast, found.speculation_batches, "at best"))
        print(gain_notes(forecast))
    for caveat in found.arithmetic.caveats:
        say(f"bankfull: {caveat}")


def _keep(found: ModelRoofline, folder: str, picture: str) -> None:
    from pathlib import Path

    from bankfull.cli.terminal import say
    from bankfull.errors import ConfigError
    from bankfull.limits.charts import save
    from bankfull.limits.model.charts import charts_of

    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made a directory: {error.strerror or error}; choose another one."
        ) from None
    for name, chart in charts_of(found).items():
        save(chart, place / f"{name}.{picture}")
        say(f"bankfull: {place / f'{name}.{picture}'} written")
