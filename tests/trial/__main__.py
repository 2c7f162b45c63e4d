"""`python -m tests.trial --cases N --seed S` draws cases and compares each with the plain loop."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("BANKFULL_SPECULATIVE", "off")


def main() -> int:
    asked = _arguments()
    from tests.trial.pool import prepare, reports

    prepare()
    if asked.only is not None:
        return _replay(asked.only)
    if asked.table:
        return _show_table(writes=asked.write)
    if asked.defects:
        return _show_defects(first_case(asked.seed), asked.cases)
    from tests.trial.summary import Summary

    summary, failures, begun = Summary(), [], time.monotonic()
    for some in reports(first_case(asked.seed), asked.cases, asked.workers):
        for report in some:
            summary.add(report)
            if report.problems:
                failures.append(report)
                _show_failure(report, shrinks=asked.shrink)
        _show_progress(summary.cases, asked.cases, len(failures), time.monotonic() - begun)
    print(file=sys.stderr)
    if asked.json:
        print(
            json.dumps(
                {
                    "cases": summary.cases,
                    "failed": summary.failed,
                    "refused": summary.refused,
                    "tokens": summary.tokens,
                    "cut": summary.cut,
                    "weak": summary.weak,
                    "ran": summary.ran,
                    "failures": [r.case.to_json() for r in failures],
                }
            )
        )
    else:
        print("\n".join(summary.lines()))
    return 1 if failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.trial", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, help="how many cases to draw")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number is this times a million")
    parser.add_argument("--only", metavar="CASE", help="replay one case: its JSON, a file with it, or its number")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make failures smaller")
    parser.add_argument("--workers", type=int, default=1, help="processes that run cases")
    parser.add_argument("--table", action="store_true", help="show what may be combined with what, and run nothing")
    parser.add_argument("--write", action="store_true", help="with --table: write it into docs/combinations.md")
    parser.add_argument("--defects", action="store_true", help="plant each known defect, and count the cases it takes")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    return parser.parse_args()


def first_case(seed: int) -> int:
    return seed * 1_000_000


def _show_failure(report, *, shrinks: bool) -> None:  # type: ignore[no-untyped-def]
    from tests.trial.shrink import shrunk
    from tests.trial.trial import run_case

    case, problems = report.case, report.problems
    if shrinks:
        case = shrunk(case, lambda less: bool(run_case(less).problems))
        problems = run_case(case).problems or problems
    print(f"\nFAILED: {problems[0]}\n  {command_of(case)}", flush=True)


def command_of(case) -> str:  # type: ignore[no-untyped-def]
    return f"python -m tests.trial --only '{case.to_json()}'"


def _replay(text: str) -> int:
    from tests.trial.case import Case
    from tests.trial.drawing import draw
    from tests.trial.trial import run_case

    if text.isdigit():
        case = draw(int(text))
    else:
        case = Case.from_json(text if text.lstrip().startswith("{") else Path(text).read_text())
    report = run_case(case)
    print(command_of(case))
    print(f"refused: {report.refused}" if report.refused else f"{report.verdict.compared} tokens compared")
    for problem in report.problems:
        print(f"FAILED: {problem}")
    return 1 if report.problems else 0


def _show_table(*, writes: bool) -> int:
    from tests.trial import combinations

    if writes:
        combinations.write()
    print("\n".join(combinations.on_the_page() if writes else combinations.table()))
    return 0


def _show_defects(first: int, most: int) -> int:
    from tests.trial.defects import DEFECTS, LEAST_FOUND, cases_until_found

    found = 0
    for defect in DEFECTS:
        seen = cases_until_found(defect, first, most)
        found += seen is not None
        told = f"{seen[0]:5} cases: {seen[1][:150]}" if seen else f"not in {most} cases"
        print(f"{defect.__name__:48} {told}", flush=True)
    print(f"{found} of {len(DEFECTS)} defects were found.")
    return 0 if found >= LEAST_FOUND else 1


def _show_progress(done: int, cases: int, failed: int, seconds: float) -> None:
    filled = 40 * done // cases
    left = seconds / done * (cases - done)
    bar = "#" * filled + "-" * (40 - filled)
    print(f"\r[{bar}] {done}/{cases}, {failed} failed, {left:.0f} s left ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
