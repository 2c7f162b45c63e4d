"""Cases that schemathesis generates from the OpenAPI document. It has its own environment."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.soak.faults import SMALL
from tests.soak.figures import Figure
from tests.soak.served import Served, serving

TOOL = Path(".venv-clients/bin/schemathesis")
OWN_DEADLINE = "504"
"""Status of a call whose own `timeout` has passed; no other error uses it."""


def schema_cases(model: str, cases: int) -> Iterator[Figure]:
    """Run at least `cases` valid and invalid calls, none of which may end in a server error. One run finds far fewer
    distinct small cases than 20,000, so it is repeated with further seeds."""
    if not TOOL.exists():
        raise AssertionError(f"{TOOL} is missing: `make soak` installs it")
    with serving(model, *SMALL) as served:
        seed = 0
        while (made := _calls(served)) < cases:
            seed += 1
            _run(served, seed, min(200, max(10, (cases - int(made)) // 30)))
        answers = by_route(served).items()
        errors = {which: value for which, value in answers if which[1].startswith("5") and which[1] != OWN_DEADLINE}
        for (route, status), value in errors.items():
            print(f"soak: schemas: {value:.0f} times {status} from {route}", file=sys.stderr)
        alive = served.ready()
    yield Figure("schemathesis: calls", made, least=cases)
    yield Figure("schemathesis: answers with a server error", sum(errors.values()), most=0)
    yield Figure("schemathesis: the server is still ready", float(alive), least=1)


def _run(served: Served, seed: int, examples: int) -> None:
    command = [
        str(TOOL),
        "run",
        served.url + "/openapi.json",
        "--checks",
        "not_a_server_error",
        "--mode",
        "all",
        "--max-examples",
        str(examples),
        "--seed",
        str(seed),
        "--request-timeout",
        "60",
        "--no-color",
        "--generation-database",
        "none",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode not in (0, 1):
        raise AssertionError(f"schemathesis itself failed: {(result.stdout + result.stderr)[-2000:]}")
    if result.returncode == 1:
        print(result.stdout[-6000:], file=sys.stderr)


def _calls(served: Served) -> float:
    return served.metrics().get("http_requests_total", 0.0)


def by_route(served: Served) -> dict[tuple[str, str], float]:
    """Responses by route and status."""
    counts: dict[tuple[str, str], float] = {}
    pattern = re.compile(r'http_requests_total\{[^}]*route="([^"]*)"[^}]*status="(\d+)"[^}]*\} (\S+)')
    for route, status, value in pattern.findall(served.exposition()):
        counts[route, status] = counts.get((route, status), 0.0) + float(value)
    return counts
