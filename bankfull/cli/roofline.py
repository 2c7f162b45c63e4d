"""`bankfull roofline`: what bounds a model on this machine or on one of the catalogue, from its configuration."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from bankfull.cli.options import Activations, Dtype, ForecastAcceptance, ForecastSpeculative, Json, KvDtype

if TYPE_CHECKING:
    from bankfull.charts import Chart
    from bankfull.limits.meter.step import StepShape
    from bankfull.limits.model.bounds import ModelRoofline
    from bankfull.plan.layout_forecast import LayoutForecast

PICTURES = ("svg", "png")
DEFAULT_MODEL = "smollm2"


def roofline(
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory, a config.json, a .gguf file, a hub id (org/name; only its configuration is "
            "read), a shape of make-model --list, or a short name (smollm2)."
        ),
    ] = DEFAULT_MODEL,
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
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Also predict a layout over several of the device: tp=2,pp=2 (also cp, ep, sp=on, ffn, hot).",
            show_default=False,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Link between the devices of --parallel, from the catalogue: nvlink-4, pcie-5, ...",
            show_default="the device's own",
        ),
    ] = None,
    architectures: Annotated[
        bool,
        typer.Option(
            "--architectures",
            help="Instead of a model: state and decode time of attention, state-space and hybrid architectures against "
            "context, at equal parameter count.",
        ),
    ] = False,
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
    from bankfull.plan.layout_forecast import LayoutForecast, links_of
    from bankfull.ranks.mesh import MeshSpec

    if picture not in PICTURES:
        raise ConfigError(f"--picture {picture[:40]!r} is not a known format; use svg or png.")
    if architectures:
        if (model, dtype, quantize, kv_dtype, activations, speculative, prompt, parallel) != (
            DEFAULT_MODEL,
            *("auto", None, "auto", "auto", "off", None, None),
        ):
            raise ConfigError(
                "--architectures compares bfloat16 models of its own; leave the model and its options out."
            )
        if link is not None or acceptance is not None:
            raise ConfigError("--architectures has no layout and no drafter; leave out --link and --acceptance.")
        _compare(device, catalogue, batch, context, draw, charts, picture, json)
        return
    drafter = parse_drafter(speculative, acceptance)
    mesh = None if parallel is None else MeshSpec.parse(parallel)
    if mesh is None and link is not None:
        raise ConfigError("--link is the link of a layout; give --parallel, too.")
    subject = open_model_or_config(model)
    machine = machine_of(device, catalogue)
    recipe = recipe_of(
        subject, machine.kind, RunConfig(dtype=dtype, quantize=quantize, kv_dtype=kv_dtype, activations=activations)
    )
    longest = recipe.metered().model.max_positions
    usual = min(1024, longest)
    contexts = (usual,) if context is None else numbers(context, "context")
    query = RooflineQuery(numbers(batch, "batch"), contexts, usual if prompt is None else prompt)
    bounds = ModelRoofline(recipe, machine, query, drafter)
    forecast = None if mesh is None else LayoutForecast(recipe, machine, mesh, links_of(device, link, catalogue))
    steps = [(one.title, one.step) for one in bounds.phases]
    if json:
        more = {} if forecast is None else {"parallel": forecast.as_json(steps, query.context)}
        print(json_text.dumps(bounds.as_json() | more))
    else:
        _show(bounds)
        if forecast is not None:
            _show_layout(forecast, steps, query.context)
    if charts is not None or (draw and not json):
        from bankfull.limits.model.charts import charts_of

        _draw(charts_of(bounds), draw and not json, charts, picture)


def _compare(
    device: str,
    catalogue: str | None,
    batch: str,
    context: str | None,
    draw: bool,
    charts: str | None,
    picture: str,
    json: bool,
) -> None:
    from bankfull.cli.terminal import print_table
    from bankfull.errors import ConfigError
    from bankfull.limits.machine.targets import machine_of
    from bankfull.limits.model.architectures import CONTEXTS, ArchitectureComparison
    from bankfull.limits.model.bounds import numbers

    batches = numbers(batch, "batch")
    if len(batches) > 1:
        raise ConfigError(f"--architectures takes one batch size, not --batch {batch[:40]}.")
    contexts = CONTEXTS if context is None else numbers(context, "context")
    comparison = ArchitectureComparison(machine_of(device, catalogue), batches[0], contexts)
    if json:
        print(json_text.dumps(comparison.as_json()))
    else:
        print_table(comparison.table())
    _draw(comparison.charts(), draw and not json, charts, picture)


def _draw(made: dict[str, Chart], draw: bool, folder: str | None, picture: str) -> None:
    """Draw charts in the terminal, in files, or both."""
    if draw:
        from bankfull.charts import print_chart

        for chart in made.values():
            print_chart(chart)
    if folder is not None:
        _keep(made, folder, picture)


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


def _show_layout(forecast: LayoutForecast, steps: list[tuple[str, StepShape]], context: int) -> None:
    from bankfull.cli.terminal import print_table

    for table in forecast.tables(steps, context):
        print_table(table)
    for line in forecast.sentences(context):
        print(line)


def _keep(made: dict[str, Chart], folder: str, picture: str) -> None:
    from pathlib import Path

    from bankfull.charts import save
    from bankfull.cli.terminal import say
    from bankfull.errors import ConfigError

    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made a directory: {error.strerror or error}; choose another one."
        ) from None
    for name, chart in made.items():
        save(chart, place / f"{name}.{picture}")
        say(f"bankfull: {place / f'{name}.{picture}'} written")
