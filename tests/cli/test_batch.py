"""`bankfull batch` against a server on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.batch.test_batches import line
from tests.serve.batch_app import RandomHandler, batch_app
from tests.serve.server import served

from .conftest import Cli


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.cli.batch.POLL_SECONDS", 0.05)
    monkeypatch.setenv("BANKFULL_API_KEY", "mine")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(batch_app(tmp_path / "server", RandomHandler(0, trouble=0.0))) as url:
        yield url


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    file = tmp_path / 'odd "name".jsonl'
    file.write_text("\n".join(line(str(n), "bad" if n == 2 else "why?") for n in range(5)))
    return file


def test_from_a_file_of_requests_to_a_file_of_results(cli: Cli, url: str, requests: Path, tmp_path: Path) -> None:
    made = cli("batch", "submit", requests, "--url", url, "--wait", "--json")
    assert made.code == 0 and made.json["status"] == "completed", made
    assert made.json["request_counts"] == {"total": 5, "completed": 4, "failed": 1}
    id, output = made.json["id"], tmp_path / "out.jsonl"
    assert f"{id}  completed  4/5 done, 1 failed" in cli("batch", "status", "--url", url).out
    fetched = cli("batch", "fetch", id, "-o", output, "--url", url)
    assert fetched.code == 1 and "1 requests failed" in fetched.err
    assert [json.loads(each)["custom_id"] for each in output.read_text().splitlines()] == ["0", "1", "3", "4"]
    assert json.loads((tmp_path / "out.jsonl.errors").read_text())["custom_id"] == "2"
    assert "no longer be cancelled" in cli("batch", "cancel", id, "--url", url).sentence


def test_a_batch_with_bad_lines_says_which(cli: Cli, url: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line("a") + "\nnonsense\n")
    made = cli("batch", "submit", file, "--url", url, "--wait")
    assert made.code == 1 and "line 2: The line is not valid JSON." in made.out
    assert "line 2" in cli("batch", "fetch", made.out.split()[0], "-o", tmp_path / "out", "--url", url).sentence


def test_another_key_finds_no_batch(cli: Cli, url: str, requests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id = cli("batch", "submit", requests, "--url", url, "--json").json["id"]
    monkeypatch.setenv("BANKFULL_API_KEY", "other")
    assert "There is no batch" in cli("batch", "status", id, "--url", url).sentence


@pytest.mark.parametrize(
    "bad", ["ftp://x", "nonsense", "http://127.0.0.1:9", "http://x:port", "http://127.0.0.1:99999"]
)
def test_a_server_that_is_not_there_is_one_sentence(cli: Cli, bad: str) -> None:
    assert "bankfull: " in cli("batch", "status", "--url", bad).sentence


def test_a_file_that_is_not_there_is_one_sentence(cli: Cli, url: str, tmp_path: Path) -> None:
    assert "cannot be read" in cli("batch", "submit", tmp_path / "none", "--url", url).sentence
    assert "--endpoint" in cli("batch", "submit", __file__, "--url", url).sentence
