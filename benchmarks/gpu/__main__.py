"""python -m benchmarks.gpu --work decode,batch32 --timeline"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bankfull.errors import BankfullError, ConfigError
from bankfull.limits.machine.ceilings import Ceilings, of_device
from bankfull.runtime.device import open_device
from benchmarks.gpu.architectures import ARCHITECTURES
from benchmarks.gpu.engine import Session, Setup
from benchmarks.gpu.peer import TransformersPeer
from benchmarks.gpu.quantization import QUANTIZATION
from benchmarks.gpu.works import TINY_WORKS, TOKENS, WORKS, Figure, Work

COLUMNS = ("work", "weights", "figure", "median", "lowest .. highest", "limit", "% of limit", "also")
KNOWN = WORKS | ARCHITECTURES | QUANTIZATION | TINY_WORKS


Rows = list[tuple[str, ...]]
Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    if asked.list:
        for name, work in KNOWN.items():
            print(f"{name:16} {work.title}, {work.setup.weights}")
        return 0
    try:
        return _measure(asked, chosen(asked.work or ",".join(WORKS)))
    except BankfullError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2


def _measure(asked: argparse.Namespace, works: dict[str, Work]) -> int:
    device = open_device(asked.device)
    ceilings = of_device(device, refresh=not asked.kept_ceilings)
    if ceilings is None:
        raise ConfigError("The device has too little free memory to measure its ceilings; stop other programs on it.")
    _say(
        f"{ceilings.cpu}: read {ceilings.read_bytes_per_s / 1e12:.3f} TB/s; TFLOP/s "
        + ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in ceilings.flops.items())
    )
    report: Report = {"device": ceilings.cpu, "ceilings": asdict(ceilings), "starts": [], "works": {}}
    rows: Rows = []
    try:
        for setup, group in groupby(works.items(), key=lambda item: item[1].setup):
            together = dict(group)
            # Each engine's memory is free before the next one starts.
            _measure_ours(setup, together, asked, ceilings, rows, report)
            _free()
            if asked.peer:
                _measure_peer(setup, together, device.torch, rows, report)
                _free()
    finally:
        if asked.json:
            asked.json.write_text(json.dumps(report, indent=1))
        _say("\n" + _table(rows))
    return 0


def _measure_ours(
    setup: Setup, works: dict[str, Work], asked: argparse.Namespace, ceilings: Ceilings, rows: Rows, report: Report
) -> None:
    session = _start(setup, asked.device, report)
    for name, work in works.items():
        begun = perf_counter()
        figure = work.measure(session, ceilings)
        report["works"][name] = _as_json(work, figure)
        _add(rows, name, _row(work, figure), begun)
        if asked.timeline:
            found = work.trace(session)
            report["works"][name]["timeline"] = asdict(found)
            _say("\n".join(found.lines()))


def _measure_peer(setup: Setup, works: dict[str, Work], device: torch.device, rows: Rows, report: Report) -> None:
    """The same loads with transformers. A failure is reported and ends nothing."""
    if setup.quantize is not None or setup.mxfp4 or all(work.peer is None for work in works.values()):
        return
    try:
        peer = TransformersPeer(setup.config, getattr(torch, setup.dtype), device)
        for name, work in works.items():
            if work.peer is None:
                continue
            begun = perf_counter()
            found = peer.measure(work.peer)
            limit = report["works"][name]["limit"]
            figure = Figure(found.values, TOKENS, limit if work.setup.quantize is None else None)
            report["works"][name]["peer"] = {"engine": peer.name, "mode": found.mode, **asdict(figure)}
            _add(rows, name, _row(work, figure, f"{peer.name}, {found.mode}"), begun)
            _free()
    except Exception as error:
        _say(f"{setup.label}: no figure of transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _add(rows: Rows, name: str, row: tuple[str, ...], begun: float) -> None:
    rows.append(row)
    _say(f"{name} ({perf_counter() - begun:.0f} s): " + " | ".join(cell for cell in row if cell))


def chosen(names: str) -> dict[str, Work]:
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in KNOWN:
            raise ConfigError(f"The work {name[:40]!r} is unknown; choose from {', '.join(KNOWN)}.")
    return {name: KNOWN[name] for name in wanted}


def _start(setup: Setup, device: str, report: Report) -> Session:
    session = Session(setup, device)
    label = f"{setup.label} {setup.weights}"
    report["starts"].append({"engine": label, "seconds": session.phases})
    _say(f"start of {label}: " + ", ".join(f"{phase} {taken:.1f} s" for phase, taken in session.phases.items()))
    return session


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _row(work: Work, figure: Figure, engine: str | None = None) -> tuple[str, ...]:
    """`engine`: another engine than this one."""
    values = figure.values
    return (
        work.title,
        engine or work.setup.weights,
        figure.unit,
        f"{values.median:.5g}",
        f"{values.low:.5g} .. {values.high:.5g}",
        "" if figure.limit is None else f"{figure.limit:.5g}",
        "" if figure.percent is None else f"{figure.percent:.1f}%",
        ", ".join(f"{value:.4g} {name}" for name, value in figure.more.items()),
    )


def _as_json(work: Work, figure: Figure) -> dict[str, Any]:
    return {"title": work.title, "setup": asdict(work.setup), **asdict(figure), "percent_of_limit": figure.percent}


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Markdown, for documents and plain terminals."""
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(COLUMNS), line(["-" * width for width in widths]), *map(line, rows)])


def _say(text: str) -> None:
    print(text, flush=True)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Speed of this engine on a GPU next to the device's limit."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=about)
    parser.add_argument("--work", help=f"comma-separated; all of {', '.join(WORKS)} by default")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (for tiny works)")
    parser.add_argument("--timeline", action="store_true", help="show what runs in a step, kernel by kernel")
    parser.add_argument("--peer", action="store_true", help="measure transformers on the same shapes, too")
    parser.add_argument(
        "--kept-ceilings", action="store_true", help="use the ceilings of an earlier run on this machine"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--list", action="store_true", help="list the works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
