"""`python -m tests.structure`: the package in numbers. `tests/test_structure.py` keeps them from growing back."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "bankfull"
WINDOW = 6
"""Consecutive lines that count as a duplicate when they stand in two places."""


def modules() -> dict[str, str]:
    """The text of every module, by its path inside the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def repeated_class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that are defined more than once, with the modules that define them."""
    found = defaultdict(list)
    for name, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    return {name: places for name, places in found.items() if len(places) > 1}


def repeated_lines(sources: dict[str, str]) -> int:
    """Lines of code inside a run of at least WINDOW lines that also stands elsewhere. Imports and blank lines are not
    counted: every module has them."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for name, text in sources.items():
        code = [line.strip() for line in text.splitlines()]
        code = [line for line in code if line and not line.startswith(("import ", "from ", "#"))]
        for start in range(len(code) - WINDOW + 1):
            places[tuple(code[start : start + WINDOW])].append((name, start))
    lines = {
        (name, start + offset)
        for copies in places.values()
        if len(copies) > 1
        for name, start in copies
        for offset in range(WINDOW)
    }
    return len(lines)


def lines_by_room(sources: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Modules and lines of each folder directly inside the package; modules beside them are the room ``bankfull``."""
    found: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, text in sources.items():
        room = name.split("/")[0] if "/" in name else "bankfull"
        count, lines = found[room]
        found[room] = count + 1, lines + len(text.splitlines())
    return dict(found)


def main() -> None:
    sources = modules()
    rooms = lines_by_room(sources)
    for room, (count, lines) in sorted(rooms.items(), key=lambda item: -item[1][1]):
        print(f"{room:12} {count:4} modules {lines:7,} lines")
    print(f"{'all':12} {len(sources):4} modules {sum(lines for _, lines in rooms.values()):7,} lines")
    name, text = max(sources.items(), key=lambda source: len(source[1].splitlines()))
    print(f"the longest module: {name}, {len(text.splitlines())} lines")
    print(f"class names that are defined more than once: {len(repeated_class_names(sources))}")
    print(f"lines in runs of {WINDOW} or more that stand in two places: {repeated_lines(sources):,}")


if __name__ == "__main__":
    main()
