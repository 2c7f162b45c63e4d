"""`bench serve`, `sweep` and `compare`: from the command line to a server and back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.load.kit import SERVER, stamped

from .conftest import Cli

SMALL = ("--requests", 12, "--rate", 100, "--output-len", "3-6", "--input-len", 9)


def test_serve_shows_every_figure(cli: Cli, tmp_path: Path) -> None:
    page, text, result = (tmp_path / name for name in ("a.html", "a.md", "a.json"))
    files = ("--html", page, "--markdown", text, "--result", result, "--details")
    with stamped(wait=0.01, gap=0.002) as server:
        done = cli("bench", "serve", "--url", server.address.url, *SMALL, "--slo", "ttft=9s", "--price", 2, *files)
    assert done.code == 0, done.err
    for shown in (
        "TTFT",
        "TPOT",
        "ITL",
        "E2E",
        "median",
        "p90",
        "p95",
        "p99",
        "% of limit",
        "job completion time",
        "per minute",
        "goodput",
        "attainment",
        "input tokens/s",
        "output tokens/s",
        "cost per million output tokens",
    ):
        assert shown in done.out, shown
    found = json.loads(result.read_text())
    assert found["completed"] == 12 and len(found["ttfts"]) == 12 and found["bankfull"]["attainment"] == 1.0
    assert page.read_text().startswith("<!doctype html>") and "| TTFT |" in text.read_text()


def test_serve_as_json_is_one_object(cli: Cli) -> None:
    with stamped() as server:
        found = cli("bench", "serve", "--url", server.address.url, *SMALL, "--json", "--price-of", "h100")
    assert found.code == 0 and found.out.count("\n") == 1
    assert found.json["model_id"] == "stamps" and found.json["bankfull"]["cost"]["price_per_hour"] > 0


def test_serve_takes_files_traces_and_conversations(cli: Cli, tmp_path: Path) -> None:
    talks, trace = tmp_path / "talks.json", tmp_path / "trace.jsonl"
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    talks.write_text(json.dumps([{"conversations": said}]))
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n' * 3)
    with stamped() as server:
        at = ("bench", "serve", "--url", server.address.url, "--json")
        assert cli(*at, "--sharegpt", talks, "--requests", 4, "--rate", "inf").json["completed"] == 4
        assert cli(*at, "--trace", trace, "--trace-speed", 2).json["completed"] == 3
        turns = cli(*at, "--turns", 3, "--api", "chat", "--requests", 2, "--rate", 50, "--output-len", 2).json
        assert turns["completed"] == 6
        bursts = cli(*at, *SMALL, "--burstiness", 0.5).json
        assert bursts["burstiness"] == 0.5 and "gamma" in bursts["bankfull"]["arrivals"]


def test_serve_without_a_success_is_a_failure(cli: Cli) -> None:
    with stamped(refuse=2) as server:
        done = cli("bench", "serve", "--url", server.address.url, "--requests", 1, "--rate", "inf")
    assert done.code == 1 and "429" in done.out


def test_sweep_finds_the_rate_of_a_queue(cli: Cli, tmp_path: Path) -> None:
    """20 ms of service: no more than 50 requests per second can be served at all."""
    page = tmp_path / "sweep.html"
    options = ("--seconds", 0.5, "--least-requests", 10, "--first-rate", 10, "--precision", 0.5, "--confirmations", 1)
    with stamped(service=0.02) as server:
        at = ("bench", "sweep", "--url", server.address.url, *options, "--output-len", 1, "--html", page)
        done = cli(*at, "--slo", "ttft=100ms", "--json")
        assert done.code == 0, done.err
        assert 2 < done.json["highest_rate"] < 120 and len(done.json["runs"]) == len(done.json["trials"])
        shown = cli(*at, "--slo", "ttft=10s", "--highest-rate", 10).out
        assert "10 requests/s is the highest rate" in shown and "no higher rate was tried" in shown
        assert "a single request on the idle server" in cli(*at, "--slo", "ttft=10ms").sentence
    assert "SLO attainment by rate" in page.read_text()


def test_compare_prints_ratios_of_servers_that_it_starts(cli: Cli, model: Path) -> None:
    def command(gap: float) -> str:
        return f"{SERVER} --port {{port}} --wait 0.01 --gap {gap}"

    peer = ("--ours", command(0.01), "--peer", f"slow={command(0.05)}", "--pairs", 1)
    found = cli("bench", "compare", "-m", model, *peer, *SMALL, "--json")
    assert found.code == 0, found.err
    rows = {row["work"]: row for row in found.json["comparisons"][0]["rows"]}
    assert 3 < rows["TPOT mean"]["ratio"]["median"] < 7
    assert "pair 1 of 1" in found.err


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (("serve", "--url", "nowhere"), "not the address"),
        (("serve", "--url", "http://127.0.0.1:1"), "cannot be reached"),
        (("serve", "--rate", 0), "rate=0"),
        (("serve", "--slo", "fast"), "is not an objective"),
        (("serve", "--input-len", "some"), "not a length"),
        (("serve", "--sharegpt", "a", "--trace", "b"), "--sharegpt and --trace exclude each other"),
        (("serve", "--extra-body", "[1]"), "not a JSON object"),
        (("serve", "--price", 1, "--price-of", "h100"), "--price and --price-of exclude each other"),
        (("serve", "--price", -1), "--price -1"),
        (("serve", "--price-of", "abacus"), "abacus"),
        (("serve", "--api", "telegraph"), "completions or chat"),
        (("serve", "--arrivals", "tidal"), "poisson"),
        (("serve", "--max-concurrency", 0), "max_concurrency=0"),
        (("sweep",), "--slo"),
        (("sweep", "--slo", "ttft=1s", "--requests", 5), "leave out"),
        (("sweep", "--slo", "ttft=1s", "--target", 2), "target=2"),
        (("sweep", "--slo", "ttft=1s", "--seconds", 0), "--seconds"),
        (("compare", "--peer", "x"), "is not a peer"),
        (("compare", "--peer", "x=serve"), "{port}"),
        (("compare", "--peer", "x=http://a:1", "--pairs", 0), "--pairs 0"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(cli: Cli, bad: tuple[object, ...], says: str) -> None:
    assert says in cli("bench", *bad).sentence


def test_without_peers_the_installed_ones_are_looked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bankfull.bench.compare.servers.installed_peers", list)
    assert "No peer is installed (llama-server, vllm, sglang)" in cli("bench", "compare").sentence


def test_the_client_starts_without_torch() -> None:
    import subprocess

    parts = ", ".join(f"bankfull.bench.{name}" for name in ("load.run", "load.sweep", "report.html", "report.text"))
    code = f"import sys, bankfull.cli.app, bankfull.cli.bench, {parts}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
