"""The commands, paths and links that README.md, CONTRIBUTING.md and docs/*.md show, and what is wrong with them.

Every code block names its language. `sh` blocks hold commands and `python` blocks hold programs: `make test-docs` runs
them all (docs/try_commands.py). This module runs nothing. It checks that commands, options, make targets, paths and
links exist, and is quick enough for `make test` (tests/docs).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LANGUAGES = ("sh", "python", "text", "toml", "ini", "mermaid")
"""Languages that a code block may name. Only the first two are run."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
"""A word that stands for a value of the reader's: MODEL, FILE, N."""
PAGE_NAME = re.compile(r"\bdocs/[\w-]+\.md\b")
SUFFIXES = ("py", "md", "toml", "cpp", "hpp", "json", "svg", "png", "yml", "yaml", "sh", "txt")
FOLDERS = ("bankfull", "benchmarks", "csrc", "deploy", "docs", "tests")
REPOSITORY_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|cpp|hpp)")


class DocsError(Exception):
    """One sentence about what is wrong with a page."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of code."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One command of an `sh` block, or a whole `python` block."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def words(self) -> list[str]:
        """As the shell splits them, without comments and without variables that are set before the command."""
        words = shlex.split(self.text, comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            del words[0]
        return words


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        block = Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        if block.language not in LANGUAGES:
            known = ", ".join(LANGUAGES)
            raise DocsError(f"{block.place}: a code block must name its language, one of {known}.")
        yield block


def commands(page: Path) -> Iterator[Command]:
    """Everything on the page that is to be run, in the page's order."""
    for block in blocks(page):
        if block.language == "python":
            yield Command(page, block.line, "python", block.text)
        elif block.language == "sh":
            yield from _split(block)


def _split(block: Block) -> Iterator[Command]:
    """A command ends with its line, unless a backslash or an open quote continues it."""
    held: list[str] = []
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        held.append(line)
        text = "\n".join(held)
        try:
            words = shlex.split(text.replace("\\\n", " "), comments=True)
        except ValueError:
            continue
        if line.endswith("\\"):
            continue
        if words:
            yield Command(block.page, number - len(held) + 1, "sh", text)
        held = []
    if held:
        raise DocsError(f"{block.place}: the command {held[0]!r} has no end.")


def inline(page: Path) -> Iterator[str]:
    """Every piece of `code` outside of blocks; a table's escaped bars are bars."""
    for found in INLINE.finditer(FENCE.sub("", page.read_text())):
        yield " ".join(found[1].replace("\\|", "|").split())


def fault_of(command: Command) -> str | None:
    """Why a command of a block cannot work, found without running it."""
    if command.language == "python":
        try:
            compile(command.text, command.place, "exec")
        except SyntaxError as error:
            return f"is no Python: {error.msg}"
        return None
    return fault_of_words(command.words, complete=True)


def fault_of_inline(code: str) -> str | None:
    """The same for code inside a sentence, which may leave out what a command needs and may list alternatives."""
    if not re.match(r"(bankfull|make|python -m) [a-z]", code):
        return None
    for one in _alternatives(code):
        try:
            words = shlex.split(re.sub(r"[\[\]]", " ", one), comments=True)
        except ValueError as error:
            return str(error)
        fault = fault_of_words([word for word in words if not word.endswith("...")], complete=False)
        if fault is not None:
            return fault
    return None


def _alternatives(code: str) -> list[str]:
    """`bankfull bench serve|sweep` is two commands."""
    found = re.search(r"(?<=\s)[a-z-]+(?:\|[a-z-]+)+(?=\s|$)", code)
    if found is None:
        return [code]
    return [code[: found.start()] + one + code[found.end() :] for one in found[0].split("|")]


def fault_of_words(words: list[str], *, complete: bool) -> str | None:
    match words:
        case ["bankfull", *arguments]:
            return _fault_of_bankfull(arguments, complete)
        case ["make", *arguments]:
            return _fault_of_make(arguments)
        case ["python", "-m", module, *_] if module.partition(".")[0] in ("bankfull", "benchmarks", "tests", "docs"):
            path = ROOT / module.replace(".", "/")
            if path.with_suffix(".py").exists() or (path / "__main__.py").exists():
                return None
            return f"there is no module {module}"
    return None


def _fault_of_make(arguments: list[str]) -> str | None:
    unknown = [word for word in arguments if "=" not in word and word not in make_targets()]
    return f"the Makefile has no target {unknown[0]}" if unknown else None


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def command_line() -> Any:
    """All commands of `bankfull` as typer parses them."""
    import typer

    from bankfull.cli.app import make_app

    return typer.main.get_command(make_app())


def _fault_of_bankfull(arguments: list[str], complete: bool) -> str | None:
    """Parses as the command line does, and runs nothing."""
    arguments = [word for word in arguments[: _end_of_command(arguments)] if word not in ("-h", "--help")]
    command, context, name = command_line(), None, "bankfull"
    try:
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            if not hasattr(command, "commands"):
                return None
            left = [*context._protected_args, *context.args]
            if not left:
                return None if not complete or context.command_path == "bankfull" else "a subcommand is missing"
            name, command, arguments = command.resolve_command(context, left)
    except Exception as error:
        kind = type(error).__name__
        if not hasattr(error, "format_message"):
            if kind in ("Exit", "NoArgsIsHelpError"):
                return None
            raise
        # A word for a value of the reader's is no number, and a sentence may leave out an argument.
        excused = kind == "BadParameter" and any(PLACEHOLDER.fullmatch(word) for word in arguments)
        if excused or (not complete and kind in ("MissingParameter", "NoArgsIsHelpError")):
            return None
        return str(error.format_message())


def _end_of_command(words: list[str]) -> int:
    """Redirections, pipes and `&&` belong to the shell."""
    return next((at for at, word in enumerate(words) if re.match(r"^(\d?>|\||&|;)", word)), len(words))


def faults_of_paths(page: Path) -> Iterator[str]:
    """Paths of the repository that the page names in backticks, and pages that it names anywhere, but do not exist."""
    for code in inline(page):
        if not exists(code):
            yield code
    for name in PAGE_NAME.findall(page.read_text()):
        if not (ROOT / name).exists():
            yield name


def exists(code: str) -> bool:
    """False for what looks like a path of the repository and is none. `room/file.Name` is a name in `room/file.py`."""
    if not REPOSITORY_PATH.fullmatch(code) or any(PLACEHOLDER.fullmatch(part) for part in re.split(r"[/.]", code)):
        return True
    places = (ROOT, ROOT / "bankfull", ROOT / "docs", ROOT / "tests")
    if "/" not in code:
        return any(True for folder in FOLDERS for _ in (ROOT / folder).rglob(code))
    room = code.partition("/")[0]
    if room not in FOLDERS and not any((place / room).is_dir() for place in places):
        return True
    if any(any(True for _ in place.glob(code.rstrip("/"))) for place in places):
        return True
    path, _, name = code.rpartition(".")
    if not path or name in SUFFIXES:
        return False
    files = [place / f"{path}.py" for place in places]
    pattern = re.compile(rf"^\s*(?:async )?(?:def |class )?{re.escape(name)}\b", re.MULTILINE)
    return any(file.exists() and pattern.search(file.read_text()) for file in files)


def faults_of_links(page: Path) -> Iterator[str]:
    """Relative links that lead nowhere."""
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        linked = page.parent / name if name else page
        if not linked.exists() or (heading and heading not in headings(linked)):
            yield target


def headings(page: Path) -> set[str]:
    """As the anchors that a renderer makes of them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
