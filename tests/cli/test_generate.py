"""`generate`: every request gets its result, in order, once, whatever happened before."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bankfull import LLM, SamplingParams

from .conftest import Cli, Done

SHORT = ("--max-tokens", 6, "--ignore-eos", "--rows", 2, "--temperature", 0)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path: Path, *lines: Any) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def requests(count: int) -> list[dict[str, Any]]:
    """Some long and some short, so that they do not end in the order in which they came."""
    lengths = [20 if i % 3 == 0 else 2 for i in range(count)]
    return [{"id": f"r{i}", "prompt": f"The river {i}", "params": {"max_tokens": n}} for i, n in enumerate(lengths)]


def test_results_are_those_of_the_offline_api_in_the_order_of_the_input(
    cli: Cli, model: Path, files: tuple[Path, Path]
) -> None:
    given, out = files
    messages = [{"role": "user", "content": "The river"}]
    write(given, {"prompt": "The river"}, {"messages": messages, "id": 7}, "", {"prompt_token_ids": [5, 6, 7]})
    done = cli("generate", "-i", given, "-o", out, "-m", model, *SHORT)
    assert done.code == 0 and done.out == ""
    assert "3 results, 0 of them errors" in done.err and "% of this machine's limit" in done.err
    llm = LLM(str(model))
    expected = [*llm.generate("The river", GREEDY), *llm.chat(messages, GREEDY), *llm.generate([5, 6, 7], GREEDY)]
    found = read(out)
    assert [r["token_ids"] for r in found] == [e.outputs[0].token_ids for e in expected]
    assert [r["text"] for r in found] == [e.outputs[0].text for e in expected]
    assert [r["index"] for r in found] == [0, 1, 2] and found[1]["id"] == 7 and "id" not in found[0]


def test_long_and_short_requests_keep_their_order(cli: Cli, model: Path, files: tuple[Path, Path]) -> None:
    given, out = files
    write(given, *requests(23))
    assert cli("generate", "-i", given, "-o", out, "-m", model, *SHORT).code == 0
    found = read(out)
    assert [r["id"] for r in found] == [f"r{i}" for i in range(23)]
    assert [r["usage"]["completion_tokens"] for r in found] == [20 if i % 3 == 0 else 2 for i in range(23)]


def test_on_a_terminal_progress_is_a_bar(
    cli: Cli, model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files[0], *requests(3))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = cli("generate", "-i", files[0], "-o", files[1], "-m", model, *SHORT)
    assert done.code == 0 and "3/3" in done.err and len(read(files[1])) == 3


def test_only_a_window_of_requests_is_ever_in_the_engine(
    cli: Cli, model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bankfull.frontend import Frontend

    most = 0
    submit = Frontend.submit

    def counted(self: Frontend, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        made = submit(self, *args, **kwargs)
        most = max(most, len(self.pending))
        return made

    monkeypatch.setattr(Frontend, "submit", counted)
    given, out = files
    write(given, *requests(60))
    assert cli("generate", "-i", given, "-o", out, "-m", model, *SHORT).code == 0
    assert len(read(out)) == 60 and 2 <= most <= 8


def run_again(cli: Cli, model: Path, files: tuple[Path, Path]) -> Done:
    return cli("generate", "-i", files[0], "-o", files[1], "-m", model, *SHORT)


@pytest.mark.parametrize("cut", [0, 1, 200, -1, -30])
def test_a_run_that_was_killed_goes_on_where_it_stopped(
    cli: Cli, model: Path, files: tuple[Path, Path], cut: int
) -> None:
    given, out = files
    write(given, *requests(9))
    run_again(cli, model, files)
    whole = out.read_bytes()
    out.write_bytes(whole[:cut])  # a kill leaves any part of the file, also half a line
    kept = whole[:cut].count(b"\n")
    done = run_again(cli, model, files)
    assert done.code == 0

    def without_usage(data: bytes) -> list[dict[str, Any]]:
        """What was cached before depends on what ran before."""
        return [{k: v for k, v in json.loads(line).items() if k != "usage"} for line in data.splitlines()]

    assert without_usage(out.read_bytes()) == without_usage(whole)
    assert out.read_bytes().splitlines()[:kept] == whole.splitlines()[:kept]
    assert (f"{kept} results" in done.err.splitlines()[0]) == (kept > 0)


def test_a_run_that_is_complete_loads_no_model(
    cli: Cli, model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(files[0], *requests(3))
    run_again(cli, model, files)
    before = files[1].read_bytes()
    monkeypatch.setattr("bankfull.cli.options.EngineOptions.load", lambda self: pytest.fail("a model was loaded"))
    assert "nothing left to do" in run_again(cli, model, files).err
    assert files[1].read_bytes() == before


def test_more_input_is_simply_more_to_do(cli: Cli, model: Path, files: tuple[Path, Path]) -> None:
    write(files[0], *requests(3))
    run_again(cli, model, files)
    write(files[0], *requests(5))
    assert run_again(cli, model, files).code == 0
    assert [r["id"] for r in read(files[1])] == [f"r{i}" for i in range(5)]


@pytest.mark.parametrize("change", ["line", "shorter", "options", "foreign", "not json"])
def test_results_of_another_run_are_never_mixed_in(
    cli: Cli, model: Path, files: tuple[Path, Path], change: str
) -> None:
    given, out = files
    write(given, *requests(4))
    run_again(cli, model, files)
    more: tuple[str, ...] = ()
    if change == "line":
        write(given, *requests(1), {"prompt": "changed"}, *requests(4)[2:])
    elif change == "shorter":
        write(given, *requests(3))
    elif change == "options":
        more = ("--temperature", "1")
    else:
        out.write_text('{"my": "notes"}\n' if change == "foreign" else "Dear diary\nmore\n")
    before = out.read_bytes()
    assert "output" in cli("generate", "-i", given, "-o", out, "-m", model, *SHORT, *more).sentence
    assert out.read_bytes() == before


BAD_LINES: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ("[1]", "list"),
    ({"prompt": "a", "messages": []}, "exactly one"),
    ({"id": 3}, "exactly one"),
    ({"prompt": 5}, "text"),
    ({"prompt": ""}, "empty"),
    ({"prompt": "word " * 2000}, "256"),
    ({"prompt": "a", "temprature": 1}, "temprature"),
    ({"prompt": "a", "params": {"temprature": 1}}, "temprature"),
    ({"prompt": "a", "params": {"temperature": -1}}, "temperature"),
    ({"prompt": "a", "params": [1]}, "params"),
    ({"prompt": "a", "params": {"structured": {"shape": 1}}}, "shape"),
    ({"prompt_token_ids": [999999]}, "999999"),
    ({"prompt_token_ids": "abc"}, "list"),
    ({"messages": ["hello"]}, "message 0"),
]


def test_a_bad_line_is_reported_in_its_place_and_the_others_go_on(
    cli: Cli, model: Path, files: tuple[Path, Path]
) -> None:
    given, out = files
    good = {"prompt": "The river"}
    write(given, *[line for bad, _ in BAD_LINES for line in (bad, good)])
    done = cli("generate", "-i", given, "-o", out, "-m", model, *SHORT)
    assert done.code == 0 and f"{len(BAD_LINES)} of them errors" in done.err
    found = read(out)
    for result, (bad, named) in zip(found[::2], BAD_LINES, strict=True):
        assert named in result["error"], (bad, result)
        assert "text" not in result
    assert all(len(r["token_ids"]) == 6 for r in found[1::2])
    assert found[6]["id"] == 3
    assert "nothing left to do" in cli("generate", "-i", given, "-o", out, "-m", model, *SHORT).err


def test_messages_for_a_model_without_template_are_an_error_of_their_line(
    cli: Cli, mute: Path, files: tuple[Path, Path]
) -> None:
    write(files[0], {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"})
    assert cli("generate", "-i", files[0], "-o", files[1], "-m", mute, *SHORT).code == 0
    first, second = read(files[1])
    assert "chat template" in first["error"] and "text" in second


def test_a_line_too_long_to_hold_is_an_error_of_its_own(
    cli: Cli, model: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bankfull.cli.batchfile.LONGEST_LINE", 1000)
    write(files[0], {"prompt": "a"}, {"prompt": "b" * 5000}, {"prompt": "c"})
    assert run_again(cli, model, files).code == 0
    assert ["error" in r for r in read(files[1])] == [False, True, False]


def test_structured_output_may_be_asked_for_by_line(cli: Cli, model: Path, files: tuple[Path, Path]) -> None:
    params = {"structured": {"choice": ["yes", "no"]}, "logit_bias": {"5": 1.0}, "ignore_eos": False}
    write(files[0], {"prompt": "The river", "params": params})
    cli("generate", "-i", files[0], "-o", files[1], "-m", model, "--max-tokens", 20)
    assert read(files[1])[0]["text"] in ("yes", "no")


def test_an_empty_input_gives_an_empty_output(cli: Cli, model: Path, files: tuple[Path, Path]) -> None:
    write(files[0])
    assert run_again(cli, model, files).code == 0
    assert files[1].read_bytes() == b""


def test_files_that_cannot_be_used_get_one_sentence(
    cli: Cli, model: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    given, out = files
    write(given, {"prompt": "a"})
    common = ("-m", model, *SHORT)
    assert "does not exist" in cli("generate", "-i", tmp_path / "no", "-o", out, *common).sentence
    assert "cannot be read" in cli("generate", "-i", tmp_path, "-o", out, *common).sentence
    assert "cannot be written" in cli("generate", "-i", given, "-o", tmp_path / "no" / "out", *common).sentence
    assert "both" in cli("generate", "-i", given, "-o", given, *common).sentence
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "Another run" in cli("generate", "-i", given, "-o", out, *common).sentence
