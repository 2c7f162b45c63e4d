"""Puts a recall study into the documentation: `python -m docs.recall_study STUDY --machine NAME`, then `make figures`.

STUDY is the directory of `bankfull train recall-study`. The table becomes the set `recall-study` of docs/figures.toml,
the chart docs/recall.svg, and docs/architectures.md shows both. NAME is a machine of docs/figures.toml.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from datetime import date
from pathlib import Path

from bankfull.errors import BankfullError
from bankfull.train.lm.study import CHART, STUDY, RecallStudy, read_study
from docs.figures import ROOT, FiguresError, load

SET = "recall-study"
PLACE = re.compile(r"<!-- recall study: .*? -->\n")
BEGIN, END = "# -- the recall study: written by docs/recall_study.py\n", "# -- end of the recall study\n"
BLOCK = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def figures_of(study: RecallStudy, machine: str, day: date) -> str:
    """The set as TOML."""
    task = study.task
    options = f"--length {task['length']} --pairs {task['pairs']} --steps {study.steps} --batch {study.batch}"
    lines = [
        f"[{SET}]",
        f'command = "bankfull train recall-study {options}"',
        f"date = {day}",
        f'machine = "{machine}"',
        f'note = "{task["pairs"]} pairs in {task["length"]} tokens; state of one sequence in float32"',
        f"[{SET}.columns]",
        'mixer = "{mixer}"',
        'layers = "`{layers}`"',
        '"state, kB" = "{state:.1f}"',
        'accuracy = "{accuracy:.3f}"',
        '"training, s" = "{seconds:.1f}"',
        f"[{SET}.row]",
    ]
    for number, point in enumerate(study.points):
        values = (
            f'mixer = "{point.kind}", layers = "{point.layers}", state = {point.state_bytes / 1000:.3f}, '
            f"accuracy = {point.accuracy:.4f}, seconds = {point.seconds:.1f}"
        )
        lines.append(f"{point.kind}-{number} = {{ {values} }}")
    return "\n".join([*lines, ""])


def put(study: RecallStudy, chart: Path, machine: str, day: date, docs: Path) -> None:
    """Write the set, the chart and the page's block below `docs`."""
    source = docs / "figures.toml"
    if machine not in source.read_text():
        raise FiguresError(f"{source.name} has no machine {machine!r}; add it to [machine] first.")
    block = f"{BEGIN}{figures_of(study, machine, day)}{END}"
    text = source.read_text()
    # Views come last in the file, so a new set goes before them.
    made = (
        BLOCK.sub(lambda _: block, text)
        if BLOCK.search(text)
        else text.replace("\n[view]\n", f"\n{block}\n[view]\n", 1)
    )
    source.write_text(made)
    shutil.copyfile(chart, docs / CHART)
    page = docs / "architectures.md"
    shown = f"![Recall against bytes of state]({CHART})\n\n<!-- figures: {SET} -->\n<!-- /figures -->\n"
    page.write_text(PLACE.sub(lambda _: shown, page.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the directory of the study")
    parser.add_argument("--machine", required=True, help="the machine's name in docs/figures.toml")
    given = parser.parse_args()
    try:
        put(read_study(given.study / STUDY), given.study / CHART, given.machine, date.today(), ROOT / "docs")
        load()
    except (BankfullError, FiguresError, OSError) as error:
        print(f"docs.recall_study: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
