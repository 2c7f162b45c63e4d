"""python -m tests.sim SEED [COUNT]: replay seeds, and print their counts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict

from tests.sim.scenario import scenario_of
from tests.sim.world import World, simulate


def main() -> None:
    first = int(sys.argv[1])
    if len(sys.argv) == 2:
        scenario = scenario_of(first)
        print(scenario)
        print(World(scenario).run())
        return
    began, total, failed = time.process_time(), Counter[str](), []
    for seed in range(first, first + int(sys.argv[2])):
        try:
            total.update(asdict(simulate(seed)))
        except AssertionError as problem:
            failed.append(seed)
            print(problem)
    print(f"{sys.argv[2]} seeds, {len(failed)} failed, {time.process_time() - began:.1f} s", dict(total))
    sys.exit(bool(failed))


main()
