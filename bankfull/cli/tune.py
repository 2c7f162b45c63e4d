"""`bankfull tune`: find the fastest GPU kernel for each linear layer of a model and each number of rows."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bankfull.cli.options import Dtype, Json, Model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bankfull.limits.tune import ShapeTiming

ROWS = "1,2,4,8,16,32,64,128,256,512"
MOST_ROWS = 1 << 16


def tune(
    model: Model = "smollm2",
    device: Annotated[str, typer.Option(help="The GPU: cuda or cuda:N.")] = "cuda",
    dtype: Dtype = "auto",
    rows: Annotated[str, typer.Option(help="Numbers of rows to measure, separated by commas.")] = ROWS,
    json: Json = False,
) -> None:
    """Time every kernel on every shape of the model's dense linear layers, and store the fastest.

    The results are used from then on, on this kind of device with these library versions. Without them, a heuristic
    chooses the kernels.
    """
    counts = parse_rows(rows)
    import torch

    from bankfull.errors import ConfigError
    from bankfull.runtime.device import open_device

    if not torch.cuda.is_available() or device == "cpu":
        raise ConfigError("`bankfull tune` measures the kernels of a GPU, and there is none here.")
    opened = open_device(device)
    from importlib import import_module

    from bankfull.cli.terminal import print_table, progress, say
    from bankfull.limits.tune import shapes_of, timed_in_a_graph, timings_of
    from bankfull.ops.products.triton import table
    from bankfull.precision import choose_dtype
    from bankfull.weights.locate import locate
    from bankfull.weights.source import open_model

    files = open_model(locate(model))
    chosen = choose_dtype(dtype, files, opened.kind)
    shapes = shapes_of(files, str(chosen).removeprefix("torch."))
    if not shapes:
        raise ConfigError(
            f"{model} has no dense linear layers, and quantized layers have only one kernel: there is nothing to tune."
        )
    linears: Any = import_module("bankfull.ops.products.triton.linear")
    cache = torch.cuda.get_device_properties(opened.torch).L2_cache_size
    timings = []
    all_of_them = timings_of(shapes, counts, chosen, opened.torch, linears, timed_in_a_graph, cache)
    with progress("shapes and rows", len(shapes) * len(counts)) as advance, torch.inference_mode():
        for done, timing in enumerate(all_of_them, 1):
            if timing is not None:
                timings.append(timing)
            advance(done, "" if timing is None else timing.entry.plan)
    try:
        path = table.store([timing.entry for timing in timings], opened.torch)
    except OSError as error:
        raise ConfigError(
            f"The table cannot be written: {error.strerror or error}; set BANKFULL_CACHE to another directory."
        ) from None
    if json:
        print(json_text.dumps({"table": str(path), "timings": [as_json(timing) for timing in timings]}))
        return
    print_table(timings_table(timings))
    say(f"bankfull: {len(timings)} plans are stored in {path}")


def parse_rows(text: str) -> list[int]:
    from bankfull.errors import ConfigError

    words = [word.strip() for word in text.split(",")]
    counts = {int(word) for word in words if len(word) < 9 and word.isascii() and word.isdecimal()}
    if len(counts) != len(words) or not all(1 <= count <= MOST_ROWS for count in counts):
        raise ConfigError(
            f"--rows {text[:40]!r} is not a list of distinct numbers from 1 to {MOST_ROWS}; use for example {ROWS}."
        )
    return sorted(counts)


def as_json(timing: ShapeTiming) -> dict[str, Any]:
    gain = timing.gain
    return {
        **asdict(timing.entry),
        "microseconds": timing.seconds * 1e6,
        "bytes_per_s": timing.bytes / timing.seconds,
        "usual_plan": timing.usual,
        "gain": None if gain == float("inf") else gain,
    }


def timings_table(timings: Sequence[ShapeTiming]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from bankfull.limits.units import duration, scaled

    shown = Table()
    for heading in ("rows", "outputs x columns", "fastest", "time", "moved", "without the table", "gain"):
        shown.add_column(heading, justify="left" if heading in ("fastest", "without the table") else "right")
    for timing in timings:
        entry = timing.entry
        shown.add_row(
            str(entry.rows),
            f"{entry.outer} x {entry.inner}",
            Text(entry.plan),
            duration(timing.seconds),
            scaled(timing.bytes / timing.seconds, "B/s"),
            Text(timing.usual),
            "-" if timing.gain == float("inf") else f"{timing.gain:.2f}x",
        )
    return shown
