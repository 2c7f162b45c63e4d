"""Random combinations on the engine equal a plain loop: 300 new ones with every commit."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trial import combinations
from tests.trial.__main__ import command_of
from tests.trial.case import Case
from tests.trial.defects import DEFECTS, GRAMMAR_CASES, LEAST_FOUND, MOST_CASES, cases_until_found
from tests.trial.drawing import draw
from tests.trial.shrink import shrunk
from tests.trial.trial import run_case

CASES, PARTS = 300, 15
SEED_VARIABLE = "BANKFULL_TRIAL_SEED"


def seed() -> int:
    """The same for all processes of a run: the environment's, or the commit's."""
    if given := os.environ.get(SEED_VARIABLE):
        return int(given)
    try:
        asked = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        return 0
    return int(found.strip()[:7], 16)


def test_the_grammar_defect_is_found_within_300_cases() -> None:
    seen = cases_until_found(DEFECTS[0], 0, GRAMMAR_CASES)
    assert seen is not None, "the trial does not see a line of sample/grammar.py put back"


@pytest.mark.full
def test_planted_defects_are_found_within_2000_cases() -> None:
    found = [defect.__name__ for defect in DEFECTS if cases_until_found(defect, 0, MOST_CASES)]
    assert len(found) >= LEAST_FOUND, {defect.__name__ for defect in DEFECTS} - set(found)


FOUND = [json.loads(line) for line in (Path(__file__).parent / "trial" / "found.jsonl").read_text().splitlines()]
"""Cases in which the trial has found a defect."""


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found["what"].replace(" ", "-"))
def test_what_the_trial_has_found_stays_mended(found: dict[str, Any]) -> None:
    assert not run_case(Case.from_json(json.dumps(found["case"]))).problems


def test_a_case_replays_from_its_text() -> None:
    for number in range(50):
        case = draw(number)
        assert Case.from_json(case.to_json()) == case and draw(number) == case


def test_several_processes_run_what_one_runs() -> None:
    """`make trial` has two of them, which import nothing of `__main__`."""
    asked = [sys.executable, "-m", "tests.trial", "--cases", "4", "--seed", "3", "--workers", "2", "--json"]
    ran = subprocess.run(asked, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True).stdout
    assert json.loads(ran)["cases"] == 4


def test_a_failure_is_made_smaller() -> None:
    """To what it needs, here two tokens of a prompt and one option."""

    def fails(case: Case) -> bool:
        return case.get("page") == 1 and any(len(ask.prompt) >= 2 and "stop" in ask.settings for ask in case.asks)

    case = next(case for number in itertools.count() if fails(case := draw(number)))
    small = shrunk(case, fails)
    assert len(small.asks) == 1 and len(small.asks[0].prompt) == 2
    assert dict(small.options) == {"page": 1} and set(small.asks[0].settings) <= {"stop", "max_tokens"}


def test_the_table_of_combinations_is_up_to_date() -> None:
    """Its shape, and some of its cells: other ones with each commit."""
    head, _, *lines = [line for line in combinations.on_the_page() if line.startswith("|")]
    columns = list(combinations.rare_values())
    assert head == "| | " + " | ".join(combinations.shown(*column) for column in columns) + " |"
    found = [line.strip("| ").split(" | ") for line in lines]
    cells = {kind: line[1:] for line in found for kind in line[0].split(", ")}
    assert sorted(cells) == sorted(combinations.KINDS.values()), "python -m tests.trial --table --write"
    for model, at in random.Random(seed()).sample(list(itertools.product(combinations.KINDS, range(len(columns)))), 40):
        told, now = cells[combinations.KINDS[model]][at], combinations.cell(model, *columns[at])
        assert told == now, f"{model} with {columns[at]}: python -m tests.trial --table --write"


@pytest.mark.parametrize("part", range(PARTS))
def test_random_combinations_equal_the_plain_loop(part: int) -> None:
    first, count = seed() * 1_000_000 + part * (CASES // PARTS), CASES // PARTS
    print(f"{SEED_VARIABLE}={seed()}: cases {first} to {first + count - 1}")
    compared = 0
    for number in range(first, first + count):
        report = run_case(draw(number))
        compared += report.verdict.compared
        if report.problems:
            small = shrunk(report.case, lambda less: bool(run_case(less).problems))
            pytest.fail(f"{report.problems[0]}\n{command_of(small)}", pytrace=False)
    assert compared > 3 * count, "the cases compare hardly any token"
