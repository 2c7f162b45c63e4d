"""python -m benchmarks.cpu_peers --peers llamacpp,vllm --work decode,prefill512 --pairs 7"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from statistics import median

from bankfull.cli.terminal import print_table
from bankfull.limits.ceilings import better, measure
from bankfull.limits.load.rows_table import notes, problems, ratio_table
from bankfull.paths import cache_dir
from bankfull.weights.locate import DEFAULT_MODEL, locate
from benchmarks.cpu_peers.compare import Measuring, compare
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.peers import PEERS, Peer, Place
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.reach import bandwidth_now
from benchmarks.cpu_peers.shapes import SHAPES, shape_file
from benchmarks.cpu_peers.startup import seconds_to_first_token
from benchmarks.cpu_peers.works import FOR_MODELS, FOR_SHAPES, WORKS, chosen

STARTS = 3
PEERS_FOR_SHAPES = "llamacpp"
"""The one peer that reads the files as they are."""


def main(arguments: Sequence[str] | None = None, peers: Mapping[str, Peer] = PEERS) -> int:
    asked = _arguments(arguments, peers)
    names = (asked.peers or (",".join(peers) if asked.shape is None else PEERS_FOR_SHAPES)).split(",")
    try:
        works = list(chosen(asked.work or (FOR_MODELS if asked.shape is None else FOR_SHAPES)))
        for name in names:
            if name not in peers:
                raise ValueError(f"there is no peer {name!r}; choose from {', '.join(peers)}")
        if asked.pairs < 1 or asked.threads < 1:
            raise ValueError(f"--pairs {asked.pairs} and --threads {asked.threads} must be at least 1")
        folder = asked.folder.resolve()
        places = [Place(model, folder, asked.threads) for model in _models(asked, folder)]
    except (ValueError, CannotInstall, OSError) as error:
        print(f"cpu_peers: {error}", file=sys.stderr)
        return 2
    _measure_with(asked.threads)
    before = None if asked.no_ceilings else measure(refresh=True)
    how = Measuring(works, asked.pairs, cache(_our_start), None if asked.no_ceilings else bandwidth_now, say)
    comparisons = [compare(name, peers[name], place, how) for place in places for name in names]
    ceilings = None if before is None else better(before, measure(refresh=True))
    for comparison in comparisons:
        print_table(ratio_table(comparison, asked.threads))
        for line in problems(comparison):
            print(line)
    rows = [row for comparison in comparisons for row in comparison.rows]
    for line in notes(rows, ceilings):
        print(line)
    if asked.json is not None:
        raw = {
            "threads": asked.threads,
            "comparisons": [comparison.as_json() for comparison in comparisons],
            "ceilings": None if ceilings is None else asdict(ceilings),
        }
        asked.json.write_text(json.dumps(raw, indent=1))
    return 1 if all(row.problem for row in rows) else 0


def say(line: str) -> None:
    print(f"cpu_peers: {line}", file=sys.stderr, flush=True)


def _models(asked: argparse.Namespace, folder: Path) -> Iterator[Path]:
    if asked.shape is None:
        yield locate(asked.model).resolve()
        return
    names = asked.shape.split(",")
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"there is no shape {name!r}; choose from {', '.join(SHAPES)}")
    for name in names:
        say(f"{name}: random weights of this shape, made once")
        yield shape_file(name, folder)


def _measure_with(threads: int) -> None:
    """Ceilings are those of as many threads as the engines get."""
    import torch

    torch.set_num_threads(threads)


def _our_start(model: Path) -> float | str:
    """Seconds, or why there are none."""
    try:
        say(f"bankfull run: starting with {model.name}")
        return median(seconds_to_first_token(str(model), STARTS))
    except EngineFailed as error:
        return str(error)


def _arguments(arguments: Sequence[str] | None, peers: Mapping[str, Peer]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description=__doc__)
    parser.add_argument(
        "--peers", help=f"of {', '.join(peers)}; all of them, or {PEERS_FOR_SHAPES} for shapes, unless told"
    )
    parser.add_argument("--work", help=f"of {', '.join(WORKS)}; {FOR_MODELS}, or {FOR_SHAPES} for shapes, unless told")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of each work")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default=DEFAULT_MODEL, help="as for bankfull run")
    what.add_argument("--shape", help=f"random weights instead of a model: of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument(
        "--folder", type=Path, default=cache_dir() / "cpu_peers", help="for environments, models made here, and logs"
    )
    parser.add_argument("--json", type=Path, help="a file for all pairs and whatever else was measured")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the machine beside the engines")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
