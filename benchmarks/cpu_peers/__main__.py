"""python -m benchmarks.cpu_peers --peers llamacpp,vllm --work decode,prefill512 --pairs 7"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from bankfull.cli.terminal import print_table
from bankfull.limits.bench_stats import better
from bankfull.limits.ceilings import measure
from bankfull.paths import cache_dir
from bankfull.weights.locate import locate
from benchmarks.cpu_peers.peers import PEERS, Peer, Place, compare
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.startup import seconds_to_first_token
from benchmarks.cpu_peers.table import notes, ratio_table
from benchmarks.cpu_peers.works import WORKS, chosen

STARTS = 3


def main(arguments: Sequence[str] | None = None, peers: Mapping[str, Peer] = PEERS) -> int:
    asked = _arguments(arguments, peers)
    names = asked.peers.split(",")
    try:
        works = list(chosen(asked.work))
        for name in names:
            if name not in peers:
                raise ValueError(f"there is no peer {name!r}; choose from {', '.join(peers)}")
        if asked.pairs < 1 or asked.threads < 1:
            raise ValueError(f"--pairs {asked.pairs} and --threads {asked.threads} must be at least 1")
        place = Place(locate(asked.model).resolve(), asked.folder.resolve(), asked.threads)
    except ValueError as error:
        print(f"cpu_peers: {error}", file=sys.stderr)
        return 2
    before = None if asked.no_ceilings else measure(refresh=True)
    our_start = _our_start(str(place.model))
    rows = [row for name in names for row in compare(name, peers[name], works, asked.pairs, place, our_start, say)]
    ceilings = None if before is None else better(before, measure(refresh=True))
    print_table(ratio_table(rows, f"{place.model.name}, {place.threads} threads, bankfull against its peers"))
    for line in notes(rows, ceilings):
        print(line)
    if asked.json is not None:
        raw = {"rows": [row.as_json() for row in rows], "ceilings": None if ceilings is None else asdict(ceilings)}
        asked.json.write_text(json.dumps(raw, indent=1))
    return 1 if all(row.problem for row in rows) else 0


def say(line: str) -> None:
    print(f"cpu_peers: {line}", file=sys.stderr, flush=True)


def _our_start(model: str) -> float | str:
    """Seconds, or why there are none."""
    try:
        say("bankfull run: starting")
        return median(seconds_to_first_token(model, STARTS))
    except EngineFailed as error:
        return str(error)


def _arguments(arguments: Sequence[str] | None, peers: Mapping[str, Peer]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_peers", description=__doc__)
    parser.add_argument("--peers", default=",".join(peers), help=f"of {', '.join(peers)}")
    parser.add_argument("--work", default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of each work")
    parser.add_argument("--model", default="smollm2", help="as for bankfull run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument(
        "--folder", type=Path, default=cache_dir() / "cpu_peers", help="for environments, converted models and logs"
    )
    parser.add_argument("--json", type=Path, help="a file for all raw figures")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the machine before and after")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
