"""What the pages name exists: commands with their options, make targets, paths, links. `make test-docs` runs them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs import commands as reading
from docs.commands import ROOT, Command, DocsError, pages
from docs.try_commands import NOT_RUN, SHORTER

SOURCES = ("bankfull", "benchmarks", "csrc", "docs", "tests")


def page_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """A page beside the repository's own files."""
    monkeypatch.setattr(Command, "place", property(lambda self: f"{self.page.name}:{self.line}"))
    monkeypatch.setattr(reading.Block, "place", property(lambda self: f"{self.page.name}:{self.line}"))
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def code(language: str, text: str) -> str:
    return f"# A page\n\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_in_a_block_exists_with_its_options(page: Path) -> None:
    for command in reading.commands(page):
        assert reading.fault_of(command) is None, f"{command.place}: {command.text}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_in_a_sentence_exists_with_its_options(page: Path) -> None:
    for text in reading.inline(page):
        assert reading.fault_of_inline(text) is None, text


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_path_and_every_link_leads_somewhere(page: Path) -> None:
    assert [*reading.faults_of_paths(page), *reading.faults_of_links(page)] == []


@pytest.mark.parametrize(("name", "lines"), [("README.md", 150), ("docs/architecture.md", 290)])
def test_the_first_two_pages_stay_short(name: str, lines: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) < lines


def test_code_names_only_pages_that_exist() -> None:
    files = [ROOT / "Makefile", *(path for folder in SOURCES for path in (ROOT / folder).rglob("*.[pcht]*"))]
    texts = (
        (path, path.read_text(errors="replace"))
        for path in files
        if path.suffix in ("", ".py", ".cpp", ".hpp", ".toml")
    )
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts
        for name in reading.PAGE_NAME.findall(text)
        if not (ROOT / name).exists()
    }
    assert missing == set()


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in (*NOT_RUN, *SHORTER)])
def test_every_exception_of_the_runner_is_needed(pattern: str) -> None:
    assert any(re.search(pattern, command.text) for page in pages() for command in reading.commands(page))


def test_a_command_may_span_lines_and_carry_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# only a comment\nbankfull limits --json  # and a command\ncurl -s X \\\n  -d '{\n}'\nmake lint"
    found = list(reading.commands(page_of(tmp_path, monkeypatch, code("sh", text))))
    assert [(one.line, one.words[0]) for one in found] == [(5, "bankfull"), (6, "curl"), (9, "make")]
    assert found[0].words == ["bankfull", "limits", "--json"] and found[1].words[-1] == "{\n}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bankfull runn 'x'", "No such command"),
        ("bankfull run 'x' --max-token 5", "No such option"),
        ("bankfull run 'x' --max-tokens", "requires an argument"),
        ("bankfull limits --threads many", "valid integer"),
        ("bankfull key", "Missing argument"),
        ("bankfull bench sideways", "No such command"),
        ("KEY=1 bankfull serve --no-such", "No such option"),
        ("bankfull key alice --no-such >> keys.txt", "No such option"),
        ("make no-such-target", "no target no-such-target"),
        ("make soak no-such SOAK_OPTIONS='--short'", "no target no-such"),
        ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
    ],
)
def test_a_command_that_does_not_exist_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (command,) = reading.commands(page_of(tmp_path, monkeypatch, code("sh", text)))
    assert said in str(reading.fault_of(command))


@pytest.mark.parametrize(
    "text",
    [
        "bankfull run MODEL --max-tokens N",
        "bankfull batch submit requests.jsonl --wait",
        "bankfull key alice >> keys.txt",
        "make soak SOAK_OPTIONS='--short'",
        "python -m benchmarks.gpu --list",
    ],
)
def test_a_command_that_exists_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (command,) = reading.commands(page_of(tmp_path, monkeypatch, code("sh", text)))
    assert reading.fault_of(command) is None


def test_a_program_that_is_no_python_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = reading.commands(page_of(tmp_path, monkeypatch, code("python", "for x in:")))
    assert "no Python" in str(reading.fault_of(command))


def test_a_sentence_may_list_alternatives_and_leave_out_arguments() -> None:
    for text in ("bankfull key", "bankfull bench serve|sweep", "bankfull info [MODEL] --roofline", "make test", "make"):
        assert reading.fault_of_inline(text) is None
    assert "No such command" in str(reading.fault_of_inline("bankfull bench serve|sweeep"))
    assert "No such option" in str(reading.fault_of_inline("bankfull info MODEL [--rooofline]"))
    assert "no target" in str(reading.fault_of_inline("make tests"))


def test_a_block_needs_a_language_and_a_command_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DocsError, match="must name its language"):
        list(reading.commands(page_of(tmp_path, monkeypatch, code("", "make lint"))))
    with pytest.raises(DocsError, match="has no end"):
        list(reading.commands(page_of(tmp_path, monkeypatch, code("sh", "curl -d '{"))))


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("bankfull/sched/scheduler.py", True),
        ("sched/scheduler.py", True),
        ("sched/scheduler.Scheduler", True),
        ("csrc/pack*", True),
        ("scheduler.py", True),
        ("models/NAME.py", True),
        ("/v1/models", True),
        ("tokens/s", True),
        ("sched/nothing.py", False),
        ("sched/scheduler.Nothing", False),
        ("tests/nothing", False),
        ("csrc/nothing*", False),
        ("no_such_file.py", False),
        ("docs/nothing.toml", False),
    ],
)
def test_paths_of_the_repository_are_recognized(text: str, there: bool) -> None:
    assert reading.exists(text) is there


def test_links_are_followed_to_their_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# One, `two` & three\n[a](page.md#one-two--three) [b](none.md) [c](#four) [d](https://example.org)"
    assert list(reading.faults_of_links(page_of(tmp_path, monkeypatch, text))) == ["none.md", "#four"]


def test_the_architecture_lists_the_layers_that_lint_enforces() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["id"] == "layers")
    enforced = [sorted(layer.split(" | ")) for layer in layers if layer != "__main__"]
    page = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    found = re.search(r"modules further down: (.+?)\.", page)
    assert found is not None and [sorted(layer.split(", ")) for layer in found[1].split("; ")] == enforced
