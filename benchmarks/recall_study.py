"""The recall study where the command line's packages are missing, as on a bare GPU machine:
`python -m benchmarks.recall_study -o study`. Elsewhere `bankfull train recall-study` does the same."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bankfull.errors import BankfullError
from bankfull.runtime.device import open_device
from bankfull.train.lm.run import LmTraining
from bankfull.train.lm.study import StudyPoint, configs, kinds, run_study


@contextmanager
def silent(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    yield lambda count, note: None


def note(point: StudyPoint) -> None:
    print(
        f"{point.layers:50} {point.state_bytes:8} B  accuracy {point.accuracy:.3f}  {point.seconds:.1f} s", flush=True
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(kinds()))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--minutes", type=float)
    given = parser.parse_args()
    deadline = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    device = open_device(given.device).torch
    how = LmTraining(given.steps, given.batch, given.rate, 0, given.steps, device, deadline, silent)
    try:
        study = run_study(given.output, given.only.split(","), given.length, given.pairs, how, note)
    except BankfullError as error:
        print(error, file=sys.stderr)
        return 2
    missing = len(list(configs(given.only.split(",")))) - len(study.points)
    if missing:
        print(f"{missing} models are not trained yet; the same command continues.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
