"""python -m tests.soak: the long trials of the service, reported in one table. --short runs less of each."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from tests.soak.costs import crowd, idle_cpu, overhead
from tests.soak.faults import disconnects, kills, overload
from tests.soak.figures import Figure, table
from tests.soak.schemas import schema_cases
from tests.soak.sharing import sharing
from tests.soak.tenants import tenants_everywhere

Trial = Callable[[], Iterator[Figure]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _arguments(arguments)
    figures: list[Figure] = []
    trials = _trials(options)
    for name in options.only.split(",") if options.only else trials:
        if name not in trials:
            print(f"soak: there is no trial {name!r}; choose from {', '.join(trials)}", file=sys.stderr)
            return 2
        begun = time.monotonic()
        print(f"soak: {name} ...", file=sys.stderr, flush=True)
        try:
            figures += trials[name]()
        except AssertionError as error:
            print(f"soak: {name}: {error}", file=sys.stderr)
            figures.append(Figure(f"{name}: completed", 0.0, least=1))
        print(f"soak: {name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(json.dumps([one.as_json() for one in figures], indent=1) if options.json else table(figures))
    return 0 if all(one.holds for one in figures) else 1


def _trials(options: argparse.Namespace) -> dict[str, Trial]:
    from tests.tiny import speaking_folder

    tiny = str(speaking_folder())
    return {
        "schemas": lambda: schema_cases(tiny, options.cases),
        "disconnects": lambda: disconnects(tiny, options.disconnects),
        "overload": lambda: overload(options.model, options.seconds, options.rounds),
        "kills": lambda: kills(tiny, options.kills),
        "batch": lambda: batch_crashes(short=options.short),
        "power": lambda: power_cuts(short=options.short),
        "crowd": lambda: crowd(tiny, options.streams, options.idle),
        "idle": lambda: idle_cpu(tiny, 2 * options.seconds),
        "overhead": lambda: overhead(options.model, 64, options.rounds),
        "tenants": lambda: tenants_everywhere(options.model, 3 * options.seconds, options.rounds),
        "sharing": lambda: sharing(options.model, options.seconds, min(options.rounds, 3)),
    }


def batch_crashes(*, short: bool) -> Iterator[Figure]:
    """The crash loop of the tests: a hundred kills in ten thousand lines, or a short version."""
    name = "after_repeated_kills" if short else "a_hundred_kills"
    passed, _ = _test_passes("tests/serve/batch/test_batches.py", name)
    yield Figure("batch: kills with one result per line", 8 if short else 100)
    yield Figure("batch: the crash loop passed", float(passed), least=1)


def power_cuts(*, short: bool) -> Iterator[Figure]:
    """Power cuts in uploads, batches, results and cancels, before every disk write or every twelfth."""
    which = "every_twelfth_change" if short else "every_change"
    passed, printed = _test_passes("tests/serve/data/test_power_cut.py", which)
    tried = re.search(r"(\d+) power cuts", printed)
    yield Figure("power: cuts during writes of the batch service", float(tried[1]) if tried else 0.0, least=1)
    yield Figure("power: acknowledged data survived every cut", float(passed), least=1)


def _test_passes(file: str, name: str) -> tuple[bool, str]:
    """Whether the test passes, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-n", "0", file, "-k", name]
    result = subprocess.run(command, capture_output=True, text=True)
    passed = result.returncode == 0 and "1 passed" in result.stdout
    if not passed:
        print(result.stdout[-3000:], file=sys.stderr)
    return passed, result.stdout


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description="Long trials of the service, with figures.")
    parser.add_argument("--short", action="store_true", help="a quick run: less of each trial")
    parser.add_argument("--only", help="names of trials, separated by commas")
    parser.add_argument(
        "--model", default="smollm2", help="model for the overload trial and for the comparison with the engine alone"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    sizes = {
        "cases": (20_000, 500),
        "disconnects": (1000, 60),
        "kills": (20, 2),
        "streams": (500, 100),
        "idle": (2000, 200),
        "rounds": (7, 1),
        "seconds": (10.0, 2.0),
    }
    for name, (most, _) in sizes.items():
        parser.add_argument(f"--{name}", type=type(most), help=f"{most}, or less with --short")
    options = parser.parse_args(arguments)
    for name, both in sizes.items():
        given = getattr(options, name)
        if given is not None and given <= 0:
            parser.error(f"--{name} {given} must be above 0")
        setattr(options, name, both[options.short] if given is None else given)
    return options


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server outlives its trial
    sys.exit(main())
