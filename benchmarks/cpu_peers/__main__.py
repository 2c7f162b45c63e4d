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
from typing import Any

from bankfull.bench.compare.tables import notes, problems, ratio_table
from bankfull.cli.terminal import print_table
from bankfull.limits.machine.ceilings import better, measure
from bankfull.ops import native
from bankfull.paths import cache_dir
from bankfull.weights.locate import DEFAULT_MODEL, locate
from benchmarks.cpu_peers.compare import Compared, Measuring, compare
from benchmarks.cpu_peers.fairness import Fairness, check, fairness_table
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.llamacpp_build import Asked
from benchmarks.cpu_peers.peers import PEERS, Peer, Place
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.reach import bandwidth_now
from benchmarks.cpu_peers.shapes import SHAPES, shape_file
from benchmarks.cpu_peers.startup import seconds_to_first_token
from benchmarks.cpu_peers.works import FOR_MODELS, FOR_SHAPES, WORKS, chosen

STARTS = 3
PEERS_FOR_SHAPES = "llamacpp"
"""The peer that reads the shape files unchanged."""

Todo = Sequence[tuple[str, Peer, Place]]


def main(arguments: Sequence[str] | None = None, peers: Mapping[str, Peer] = PEERS) -> int:
    asked = _arguments(arguments, peers)
    names = (asked.peers or (",".join(peers) if asked.shape is None else PEERS_FOR_SHAPES)).split(",")
    try:
        works = list(chosen(asked.work or (FOR_MODELS if asked.shape is None else FOR_SHAPES)))
        for name in names:
            if name not in peers:
                raise ValueError(f"the peer {name!r} is unknown; choose from {', '.join(peers)}")
        if asked.pairs < 1:
            raise ValueError(f"--pairs {asked.pairs} must be at least 1")
        counts = _thread_counts(asked.threads)
        folder = asked.folder.resolve()
        models = list(_models(asked, folder))
    except (ValueError, CannotInstall, OSError) as error:
        print(f"cpu_peers: {error}", file=sys.stderr)
        return 2
    how = Measuring(works, asked.pairs, cache(_our_start), None if asked.no_ceilings else bandwidth_now, say)
    llamacpp = Asked(tuple(asked.llamacpp_bin), asked.llamacpp_source, asked.kleidiai)
    runs, good = list[dict[str, Any]](), list[bool]()
    for threads in counts:
        # Measure ceilings with the same number of threads as the engines.
        native.set_threads(threads)
        places = [Place(model, folder, threads, llamacpp) for model in models]
        todo = [(name, peers[name], place) for place in places for name in names]
        found, went_well = (_check_all if asked.check_fairness else _compare_all)(todo, how)
        runs.append({"threads": threads, **found})
        good.append(went_well)
        if asked.json is not None:  # after each run, so that an interrupted run keeps its results
            asked.json.write_text(json.dumps({"runs": runs}, indent=1))
    return 0 if all(good) else 1


def _compare_all(todo: Todo, how: Measuring) -> tuple[dict[str, Any], bool]:
    """The JSON result, and whether anything was measured."""
    before = None if how.bandwidth is None else measure(refresh=True)
    compared = [compare(name, peer, place, how) for name, peer, place in todo]
    ceilings = None if before is None else better(before, measure(refresh=True))
    for one, (_, _, place) in zip(compared, todo, strict=True):
        print_table(ratio_table(one.found, place.threads))
        for line in (*problems(one.found), *_settings(one)):
            print(line)
    rows = [row for one in compared for row in one.found.rows]
    for line in notes(rows, ceilings):
        print(line)
    found = {
        "comparisons": [one.as_json() for one in compared],
        "ceilings": None if ceilings is None else asdict(ceilings),
    }
    return found, any(row.problem is None for row in rows)


def _settings(compared: Compared) -> Iterator[str]:
    """Each setting once, with the works it was fastest for."""
    works: dict[str, list[str]] = {}
    for work, setting in compared.settings.items():
        works.setdefault(setting, []).append(work)
    for setting, those in works.items():
        yield f"{compared.found.theirs.engine} was fastest with {setting}: {', '.join(those)}"


def _check_all(todo: Todo, how: Measuring) -> tuple[dict[str, Any], bool]:
    """The JSON result, and whether every peer reaches its own tool's speed."""
    checked: list[Fairness] = [row for name, peer, place in todo for row in check(name, peer, place, how)]
    print_table(fairness_table(checked))
    for row in checked:
        if row.problem is not None:
            print(f"not measured: {row.peer}, {row.work}: {row.problem}")
    return {"fairness": [row.as_json() for row in checked]}, all(row.fair for row in checked)


def say(line: str) -> None:
    print(f"cpu_peers: {line}", file=sys.stderr, flush=True)


def _thread_counts(text: str) -> list[int]:
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--threads {text!r} must be positive integers, such as 2 or 1,2,8")
    return counts


def _models(asked: argparse.Namespace, folder: Path) -> Iterator[Path]:
    if asked.layers is not None and asked.shape is None:
        raise ValueError(f"--layers {asked.layers} is for --shape; leave it out")
    if asked.shape is None:
        yield locate(asked.model).resolve()
        return
    names = asked.shape.split(",")
    for name in names:
        if name not in SHAPES:
            raise ValueError(f"the shape {name!r} is unknown; choose from {', '.join(SHAPES)}")
    for name in names:
        say(f"{name}: writing random weights of this shape, once")
        yield shape_file(name, folder, asked.layers)


def _our_start(model: Path) -> float | str:
    """Seconds, or the reason for a failure."""
    try:
        say(f"bankfull run: starting with {model.name}")
        return median(seconds_to_first_token(str(model), STARTS))
    except EngineFailed as error:
        return str(error)


def _folders(text: str) -> list[Path]:
    return [Path(name) for name in text.split(",")]


def _arguments(arguments: Sequence[str] | None, peers: Mapping[str, Peer]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description=__doc__)
    parser.add_argument(
        "--peers", help=f"comma-separated, of {', '.join(peers)}; default: all, or {PEERS_FOR_SHAPES} with --shape"
    )
    parser.add_argument(
        "--work", help=f"comma-separated, of {', '.join(WORKS)}; default: {FOR_MODELS}, or {FOR_SHAPES} with --shape"
    )
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of each work")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", default=DEFAULT_MODEL, help="as for bankfull run")
    what.add_argument("--shape", help=f"random weights instead of a model, of {', '.join(SHAPES)}")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="of a shape, only the first layers, where the memory is too small"
    )
    cores = str(len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", default=cores, help="threads of every engine; several, as in 1,2,8, run in turn")
    parser.add_argument(
        "--folder", type=Path, default=cache_dir() / "cpu_peers", help="for builds, environments, models and logs"
    )
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--llamacpp-bin",
        type=_folders,
        default=[],
        metavar="DIR[,DIR]",
        help="programs of a llama.cpp build instead of building it; with several, the fastest counts",
    )
    given.add_argument(
        "--llamacpp-source", type=Path, metavar="DIR", help="source tree of llama.cpp to build instead of fetching one"
    )
    parser.add_argument(
        "--kleidiai", type=Path, metavar="DIR", help="source tree of KleidiAI: llama.cpp is built with and without it"
    )
    parser.add_argument(
        "--check-fairness",
        action="store_true",
        help="do not compare; check that each peer is as fast here as with its own tool",
    )
    parser.add_argument("--json", type=Path, help="file for all pairs and other measurements")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the machine's ceilings")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
