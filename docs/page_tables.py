"""Draws docs/page-tables.svg from the page tables of a running scheduler: `python -m docs.page_tables`.

Two requests begin with the same system prompt; the first one has two samples. The pages, and who holds them, are those
that the engine's own scheduler and state manager have chosen. Only the tokens are made up: no model runs.
"""

from __future__ import annotations

from pathlib import Path

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.engine import Engine
from bankfull.fleet.page_tables import PageTables, SequencePages, page_tables_of
from bankfull.plan.fake_runner import Clock, FakeRunner
from bankfull.sched.scheduler import Scheduler
from bankfull.state.manager import StateManager
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import Request

PICTURE = Path(__file__).with_name("page-tables.svg")
SYSTEM, FIRST, SECOND = 16, 22, 20
"""Tokens of the common system prompt, and of the two prompts with it."""
CELL, GAP, LEFT, TOP, ROW = 74, 8, 150, 58, 74
NAMES = {("A", 0): "request A, sample 0", ("A", 1): "request A, sample 1", ("B", 0): "request B"}
STYLE = (
    "text{font:13px sans-serif;fill:#1f2328}.soft{fill:#59636e;font-size:12px}.page{fill:#fff;stroke:#59636e}"
    ".shared{fill:#ddf4ff;stroke:#0969da;stroke-width:2}.fill{fill:#0969da}.line{stroke:#0969da;stroke-width:1.5;"
    "stroke-dasharray:3 3}@media (prefers-color-scheme:dark){text{fill:#f0f6fc}.soft{fill:#9198a1}.page{fill:#0d1117;"
    "stroke:#9198a1}.shared{fill:#122d42;stroke:#4493f8}.fill{fill:#4493f8}.line{stroke:#4493f8}}"
)


def live_tables() -> PageTables:
    keys = Paged((TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32")))
    state = StateConfig(page_tokens=8)
    clock = Clock()
    manager = StateManager(layout_of([(keys,)], state.page_tokens), 20, 0, state)
    scheduler = Scheduler(SchedConfig(rows=4), manager, clock)
    engine = Engine(scheduler, FakeRunner(clock, lambda work: 1.0, lambda request, position: position), Plain(), 0)
    system = range(SYSTEM)
    engine.add(Request("A", (*system, *range(100, 100 + FIRST - SYSTEM)), FIRST + 20, samples=2))
    for _ in range(4):
        engine.step()
    engine.add(Request("B", (*system, *range(200, 200 + SECOND - SYSTEM)), SECOND + 20))
    for _ in range(2):
        engine.step()
    return page_tables_of(scheduler)


def drawn(tables: PageTables) -> str:
    size = tables.page_tokens[0]
    widest = max(len(one.tables[0]) for one in tables.sequences)
    width, height = LEFT + widest * (CELL + GAP) + 20, TOP + len(tables.sequences) * ROW + 30
    parts = [f'<text x="12" y="24">Page tables with pages of {size} tokens; shared pages are blue</text>']
    parts += [f'<text class="soft" x="{_x(i)}" y="44">block {i}</text>' for i in range(widest)]
    for number, one in enumerate(tables.sequences):
        parts += _row(one, TOP + number * ROW, tables)
    parts += _links(tables)
    parts.append(
        f'<text class="soft" x="12" y="{height - 12}">{tables.held} pages held, {tables.cached} cached, '
        f"{tables.free} free. The bar shows how full a page is.</text>"
    )
    told = "Page tables of three running sequences, drawn from a live scheduler"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{told}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _x(index: int) -> int:
    return LEFT + index * (CELL + GAP)


def _row(one: SequencePages, top: int, tables: PageTables) -> list[str]:
    size, name = tables.page_tokens[0], NAMES[one.request, one.sample]
    parts = [
        f'<text x="12" y="{top + 20}">{name}</text>',
        f'<text class="soft" x="12" y="{top + 38}">{one.computed} tokens</text>',
    ]
    for index, page in enumerate(one.tables[0]):
        held = tables.references.get(page, 1)
        full = max(0, min(size, one.computed - index * size))
        kind = "shared" if held > 1 else "page"
        label = f"page {page}" + (f" ×{held}" if held > 1 else "")
        x = _x(index)
        parts += [
            f'<rect class="{kind}" x="{x}" y="{top}" width="{CELL}" height="44" rx="4"/>',
            f'<text x="{x + 8}" y="{top + 20}">{label}</text>',
            f'<rect class="fill" x="{x + 8}" y="{top + 30}" width="{round((CELL - 16) * full / size)}" height="6"/>',
        ]
    return parts


def _links(tables: PageTables) -> list[str]:
    """A line between the rows where the same page is in both."""
    parts = []
    for number, (one, other) in enumerate(zip(tables.sequences, tables.sequences[1:], strict=False)):
        for index, (page, same) in enumerate(zip(one.tables[0], other.tables[0], strict=False)):
            if page == same:
                x, y = _x(index) + CELL // 2, TOP + number * ROW + 44
                parts.append(f'<line class="line" x1="{x}" y1="{y}" x2="{x}" y2="{y + ROW - 44}"/>')
    return parts


if __name__ == "__main__":
    PICTURE.write_text(drawn(live_tables()))
