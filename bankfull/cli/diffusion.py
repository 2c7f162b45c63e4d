"""`bankfull bench diffusion`: speed of denoising beside what the speed costs."""

from __future__ import annotations

import json as json_text
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bankfull.cli.options import EngineOptions
from bankfull.config import DiffusionChoice
from bankfull.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from bankfull.bench.diffusion import DenoisingReport

USUAL = ("threshold=1", "threshold=0.9", "threshold=0.7")


def measure(
    engine: EngineOptions,
    ways: Sequence[str] | None,
    prompts: Path | None,
    prompt_len: int,
    output_len: int,
    concurrency: int,
    reps: int,
    seed: int,
    json: bool,
) -> None:
    ways = list(ways or USUAL)
    for way in ways:
        DiffusionChoice.parse(way)
    texts = None if prompts is None else lines_of(prompts)[:concurrency]
    llm = engine.load()

    from bankfull.bench.diffusion import DiffusionBench
    from bankfull.cli.terminal import print_table, progress

    front = llm.loaded.frontend
    if texts is None:
        asked = [
            random.Random(f"{seed}/{i}").choices(range(llm.loaded.model.vocab), k=prompt_len)
            for i in range(concurrency)
        ]
    else:
        asked = [front.encode(text)[1] for text in texts]
    bench = DiffusionBench(llm, asked, output_len, reps)
    reports: list[DenoisingReport] = []
    done = 0
    with progress("passes", reps * len(ways)) as advance:

        def count() -> None:
            nonlocal done
            done += 1
            advance(done, ways[len(reports)])

        for way in ways:
            reports.append(bench.run(way, count))
    if json:
        load = {"model": engine.model, "requests": len(asked), "output_len": output_len, "reps": reps}
        print(json_text.dumps({**load, "ways": [one.as_json() for one in reports]}))
        return
    print_table(table_of(reports, f"denoising of {engine.model}: {len(asked)} at a time, {output_len} tokens each"))
    print(
        "per forward: tokens of a sequence per step. equal: tokens equal to one per step. KL: predictions, against none"
    )
    print("cached. Speed without the last two columns means little; random prompts show speed only.")


def lines_of(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The prompts in {str(path)!r} cannot be read ({problem}); give a text file.") from None
    if not lines:
        raise ConfigError(f"{str(path)!r} has no prompts; give one on each line.")
    return lines


def table_of(reports: Sequence[DenoisingReport], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title))
    table.add_column("diffusion", no_wrap=True)
    for heading in ("tokens/s", "per forward", "equal", "KL (nats)"):
        table.add_column(heading, justify="right")
    for one in reports:
        table.add_row(
            Text(one.way + (" (lossy)" if one.lossy else "")),
            f"{one.rate:.1f}",
            f"{one.tokens_per_pass:.2f}",
            f"{100 * one.equal:.1f}%",
            f"{one.divergence:.2g}",
        )
    return table
