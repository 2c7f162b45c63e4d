"""Accuracy of the planner's step times on this machine: python -m benchmarks.plan_accuracy --help

Calibrates on a few shapes, then times a whole grid of batch sizes and context lengths, decode and prefill, and compares
it with the predictions. The shortest time at the ceilings must not exceed any measured time. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from time import monotonic, process_time

from bankfull.bench.compare import process_usage
from bankfull.config import RunConfig
from bankfull.errors import BankfullError
from bankfull.limits.machine import ceilings
from bankfull.limits.machine.ceilings import better
from bankfull.limits.model.recipe import open_model_or_config, recipe_of
from bankfull.limits.statistics import quantile
from bankfull.plan.calibrate import calibration, engine_for, shown, step_times, timed_steps
from bankfull.runtime.device import open_device
from bankfull.weights.source import ModelFiles

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
CHUNK = 512
"""Tokens of a prefill step."""
MEDIAN, P90 = 0.25, 0.40
"""Highest accepted relative errors."""
QUIET = 0.05
"""Cores used by other programs above which the figures are called approximate."""


@dataclass(frozen=True)
class Cell:
    phase: str
    batch: int
    context: int
    tokens: int
    """Tokens computed per sequence."""
    measured: float
    predicted: float
    least: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


@dataclass(frozen=True)
class Grid:
    cells: list[Cell]
    missing: dict[str, str]
    """Cells that could not be timed, with the reasons."""
    others: float
    """Cores used by other programs during the measurement: the noise in the figures."""


def cells(model: str, device_name: str, run: RunConfig, refresh: bool, most_batch: int, most_context: int) -> Grid:
    subject = open_model_or_config(model)
    if not isinstance(subject, ModelFiles):
        raise SystemExit(f"{model} has no weights, so nothing can be timed; give a model with weights.")
    device = open_device(device_name)
    recipe = recipe_of(subject, device.kind, run)
    begun, busy, own = monotonic(), process_usage.busy_seconds(), process_time()
    found = calibration(recipe, device_name, refresh=refresh, advance=_say)
    decodes = tuple((b, c) for b in BATCHES for c in CONTEXTS if b <= most_batch and c <= most_context)
    prefills = tuple((b, min(c, CHUNK // b), c - min(c, CHUNK // b)) for b, c in decodes)
    made = engine_for(recipe, device, max(BATCHES), max(b * c for b, c in decodes))
    measured = timed_steps(made, _say, decodes, prefills)
    after = ceilings.of_device(device, refresh=True)
    best = found.ceilings if after is None else better(found.ceilings, after)
    times = step_times(recipe, device.kind, found.fitted(recipe, device.kind, best), best)
    others = (process_usage.busy_seconds() - busy - (process_time() - own)) / (monotonic() - begun)
    timed_cells = [
        Cell(
            "decode" if len(shape) == 2 else "prefill",
            shape[0],
            max(timed.step.lengths),
            max(timed.step.counts),
            timed.seconds,
            times.likely(timed.step),
            times.least(timed.step),
        )
        for shape, timed in measured.timed.items()
    ]
    missing = {shown(shape): reason for shape, reason in measured.missing.items()}
    return Grid(timed_cells, missing, max(0.0, others))


def _say(done: int, note: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{done:4d} {note:50s}", end="", file=sys.stderr, flush=True)


def summary(found: list[Cell]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for phase in ("decode", "prefill", "all"):
        errors = sorted(cell.error for cell in found if phase in (cell.phase, "all"))
        if errors:
            figures |= {f"{phase}_median": quantile(errors, 0.5), f"{phase}_p90": quantile(errors, 0.9)}
    figures["least_above_measured"] = sum(cell.least > cell.measured for cell in found)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantize")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--most-batch", type=int, default=max(BATCHES))
    parser.add_argument("--most-context", type=int, default=max(CONTEXTS))
    parser.add_argument("--refresh", action="store_true", help="calibrate again, ignoring the cache")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    run = RunConfig(quantize=asked.quantize, kv_dtype=asked.kv_dtype, speculative="off")
    try:
        grid = cells(asked.model, asked.device, run, asked.refresh, asked.most_batch, asked.most_context)
    except BankfullError as error:
        raise SystemExit(str(error)) from None
    found, missing = grid.cells, grid.missing
    if not found:
        raise SystemExit(f"No cell could be timed. {' '.join(sorted(set(missing.values())))}")
    figures = summary(found)
    if asked.json:
        print(json.dumps(asdict(grid) | figures))
    else:
        print(
            f"{'phase':8s}{'batch':>6s}{'context':>9s}{'tokens':>8s}{'measured':>12s}{'predicted':>12s}{'error':>8s}"
            f"{'least':>12s}"
        )
        for c in found:
            error = c.predicted / c.measured - 1
            print(
                f"{c.phase:8s}{c.batch:6d}{c.context:9d}{c.tokens:8d}{c.measured * 1e3:9.2f} ms"
                f"{c.predicted * 1e3:9.2f} ms{error:+8.0%}{c.least * 1e3:9.2f} ms"
            )
        for shape, reason in missing.items():
            print(f"not timed: {shape}. {reason}")
        if grid.others > QUIET:
            print(f"other programs used {grid.others:.2g} cores: these figures are approximate")
        for name, value in figures.items():
            print(f"{name}: {value:.0f}" if name == "least_above_measured" else f"{name}: {value:.1%}")
    good = figures["all_median"] <= MEDIAN and figures["all_p90"] <= P90 and not figures["least_above_measured"]
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
