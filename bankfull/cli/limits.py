"""`bankfull limits`: the measured peak bandwidth and arithmetic of this machine, or the catalogue's for another."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Json, Threads

if TYPE_CHECKING:
    from bankfull.charts import Chart
    from bankfull.limits.machine.ceilings import Ceilings
    from bankfull.limits.machine.levels import Levels

CatalogueFile = Annotated[
    Path | None,
    typer.Option("--catalogue", help="A file with more devices for the catalogue.", show_default=False),
]
"""An option shared with other commands."""


def limits(
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N: measured. Any other name: looked up in the catalogue.")
    ] = "cpu",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if results are stored.")] = False,
    threads: Threads = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write the roofline chart to this SVG file.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            help="Write the roofline chart to this PNG file; needs pip install 'bankfull[charts]'.", show_default=False
        ),
    ] = None,
    catalogue: CatalogueFile = None,
    devices: Annotated[bool, typer.Option("--list", help="List the devices of the catalogue and exit.")] = False,
    json: Json = False,
) -> None:
    """Measure the peak bandwidth and arithmetic of this machine or its GPU, and draw its roofline.

    Caches, memory, disk and matrix products are measured once, and the results are stored. The limits of other machines
    come from the catalogue.
    """
    measured = is_here(device) and not devices
    _refuse(refresh and not measured, "--refresh", "measures this machine again; leave it out for the catalogue.")
    _refuse(threads is not None and not measured, "--threads", "is for measuring; leave it out for the catalogue.")
    _refuse(catalogue is not None and measured, "--catalogue", "is for --list and for --device NAME; give one of them.")
    _refuse(devices and device != "cpu", "--device", "chooses one of the devices; leave it out with --list.")
    _refuse(devices and (svg or png) is not None, "--svg and --png", "draw one device; leave them out with --list.")
    check_pictures(svg, png)
    if threads is not None:
        from bankfull.ops.native import set_threads

        set_threads(threads)
    if devices:
        list_devices(catalogue, json)
        return
    from bankfull.cli.terminal import print_table, say
    from bankfull.limits.machine.catalogue import load
    from bankfull.limits.machine.charts import chart_of, curve_chart
    from bankfull.limits.machine.tables import ceilings_table, device_table

    if is_here(device):
        ceilings, levels = measure(device, refresh)
        answer, table = {**ceilings.as_json(), **as_json(levels)}, ceilings_table(ceilings, levels)
        charts = [chart_of(ceilings, levels), *([curve_chart(levels)] if levels.curve else [])]
        for dtype, why in ceilings.unmeasured.items():
            say(f"bankfull: arithmetic in {dtype} is not measured: {why}.")
    else:
        entry = load(catalogue).find(device)
        for caveat in entry.caveats:
            say(f"bankfull: {caveat}")
        answer, table, charts = entry.as_json(), device_table(entry), [chart_of(entry.ceilings())]
    write_pictures(charts[0], svg, png)
    if json:
        print(json_text.dumps(answer))
        return
    print_table(table)
    show_charts(*charts)


def _refuse(given: bool, option: str, why: str) -> None:
    if given:
        from bankfull.errors import ConfigError

        raise ConfigError(f"{option} {why}")


def is_here(device: str) -> bool:
    """Whether the name means a device of this machine."""
    return device in ("auto", "cpu", "cuda") or device.startswith("cuda:")


def measure(device: str, refresh: bool) -> tuple[Ceilings, Levels]:
    from bankfull.cli.terminal import progress
    from bankfull.errors import ConfigError
    from bankfull.limits.machine import levels
    from bankfull.limits.machine.ceilings import forget, keep_for, of_device
    from bankfull.runtime.device import open_device

    opened = open_device(device)
    if refresh:
        forget(opened)
    with progress("measuring", levels.PARTS + 1) as advance:
        advance(0, "reading and multiplying")
        ceilings = of_device(opened, refresh)
        if ceilings is None:
            raise ConfigError(f"{device} has too little free memory for the measurement; stop other programs on it.")
        around = levels.measure(opened, ceilings, refresh, lambda done, note: advance(done + 1, note))
    best, around = levels.joined(ceilings, around)
    if best != ceilings:
        keep_for(opened, best)
    return best, around


def list_devices(catalogue: Path | None, json: bool) -> None:
    from bankfull.cli.terminal import print_table
    from bankfull.limits.machine.catalogue import load
    from bankfull.limits.machine.tables import catalogue_table

    known = load(catalogue)
    if json:
        print(json_text.dumps([device.as_json() for device in known]))
    else:
        print_table(catalogue_table(known))


def as_json(levels: Levels) -> dict[str, Any]:
    import msgspec

    answer: dict[str, Any] = msgspec.to_builtins(levels)
    del answer["when"]
    return answer


def check_pictures(svg: Path | None, png: Path | None) -> None:
    """Check the file names before anything is measured."""
    if svg is None and png is None:
        return
    from bankfull.charts import check_path
    from bankfull.errors import ConfigError

    for path, suffix in ((svg, ".svg"), (png, ".png")):
        if path is not None:
            if path.suffix.lower() != suffix:
                raise ConfigError(f"--{suffix[1:]} {path} must end in {suffix}.")
            check_path(path)


def write_pictures(chart: Chart, *paths: Path | None) -> None:
    from bankfull.charts import save

    for path in paths:
        if path is not None:
            save(chart, path)


def show_charts(*charts: Chart) -> None:
    from bankfull.charts import print_chart

    for chart in charts:
        print()
        print_chart(chart)
