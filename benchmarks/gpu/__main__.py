"""python -m benchmarks.gpu --work decode,batch32 --timeline"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bankfull.errors import BankfullError, ConfigError
from bankfull.limits.machine.ceilings import of_device
from bankfull.runtime.device import open_device
from benchmarks.gpu.engine import Session
from benchmarks.gpu.works import TINY_WORKS, WORKS, Figure, Work, chosen

COLUMNS = ("work", "weights", "figure", "median", "lowest .. highest", "limit", "% of limit", "also")


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _arguments(arguments)
    if asked.list:
        for name, work in (WORKS | TINY_WORKS).items():
            print(f"{name:14} {work.title}, {work.setup.weights}")
        return 0
    try:
        return _measure(asked, chosen(asked.work or ",".join(WORKS)))
    except BankfullError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2


def _measure(asked: argparse.Namespace, works: dict[str, Work]) -> int:
    device = open_device(asked.device)
    ceilings = of_device(device, refresh=True)
    if ceilings is None:
        raise ConfigError("The device has too little free memory to measure its ceilings; stop other programs on it.")
    _say(
        f"{ceilings.cpu}: read {ceilings.read_bytes_per_s / 1e12:.3f} TB/s; TFLOP/s "
        + ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in ceilings.flops.items())
    )
    report: dict[str, Any] = {"device": ceilings.cpu, "ceilings": asdict(ceilings), "starts": [], "works": {}}
    rows: list[tuple[str, ...]] = []
    session: Session | None = None
    try:
        for name, work in works.items():
            if session is None or session.setup != work.setup:
                session = None  # frees its memory for the next one
                _free()
                session = _start(work, asked.device, report)
            begun = perf_counter()
            figure = work.measure(session, ceilings)
            rows.append(_row(work, figure))
            report["works"][name] = _as_json(work, figure)
            _say(f"{name} ({perf_counter() - begun:.0f} s): " + " | ".join(cell for cell in rows[-1] if cell))
            if asked.timeline:
                found = work.trace(session)
                report["works"][name]["timeline"] = asdict(found)
                _say("\n".join(found.lines()))
    finally:
        if asked.json:
            asked.json.write_text(json.dumps(report, indent=1))
        _say("\n" + _table(rows))
    return 0


def _start(work: Work, device: str, report: dict[str, Any]) -> Session:
    session = Session(work.setup, device)
    label = f"{work.setup.shape} {work.setup.weights}"
    report["starts"].append({"engine": label, "seconds": session.phases})
    _say(f"start of {label}: " + ", ".join(f"{phase} {taken:.1f} s" for phase, taken in session.phases.items()))
    return session


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _row(work: Work, figure: Figure) -> tuple[str, ...]:
    values = figure.values
    return (
        work.title,
        work.setup.weights,
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
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--list", action="store_true", help="list the works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
