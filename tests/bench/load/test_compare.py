"""Comparison of two servers."""

from __future__ import annotations

import sys
from shlex import quote

import pytest

from bankfull.bench.compare import servers as side_by_side
from bankfull.bench.compare.servers import (
    Contender,
    RunningServer,
    compare_with,
    installed_peers,
    ours,
    parse_contender,
)
from bankfull.bench.compare.turns import in_pairs
from bankfull.bench.load.run import LoadTest
from bankfull.bench.load.workloads import Synthetic, parse_lengths
from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals
from bankfull.traffic.slo import parse_slo
from tests.bench.load.kit import SERVER, stamped

LOAD = LoadTest(
    Synthetic(parse_lengths("9"), parse_lengths("5")), Arrivals(60.0), 15, slo=parse_slo("ttft=10s"), prompts="text"
)


def command(name: str, **options: float) -> Contender:
    given = " ".join(f"--{option} {value}" for option, value in options.items())
    return Contender(name, f"{SERVER} --port {{port}} {given}")


def test_ratios_are_above_one_where_we_are_better() -> None:
    said: list[str] = []
    with RunningServer(command("bankfull", wait=0.05, gap=0.01), "m", None, said.append) as one:
        found = compare_with(one, command("slow", wait=0.15, gap=0.03), LOAD, 3)
    rows = {row.work: row for row in found.rows}
    for name in ("TTFT mean", "TPOT mean", "E2E mean"):
        spreads = rows[name].spreads()
        assert spreads is not None and spreads[0] is not None
        assert spreads[0].median == pytest.approx(3, rel=0.3) and spreads[0].count == 3
    assert {"goodput", "requests/s", "output tokens/s", "resident memory"} <= set(rows)
    assert found.title == "bankfull against slow, both on stamps"
    assert sum("pair" in line for line in said) == 3


def test_both_sides_are_asked_the_same_and_each_pair_something_else() -> None:
    with stamped() as first, stamped() as second:
        with RunningServer(Contender("bankfull", first.address.url), "m", None, lambda line: None) as one:
            found = compare_with(one, Contender("other", second.address.url), LOAD, 2)
        asked = [[call["prompt"] for call in server.ask("GET", "/stop").json] for server in (first, second)]
    assert all(row.others is None for row in found.rows), "the CPU time of servers not started here is unknown"
    assert sorted(asked[0]) == sorted(asked[1]) and len(asked[0]) == 1 + 2 * 15, "one warm-up and two runs"
    assert len(set(asked[0])) == len(asked[0])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("/no/such/server --port {port}", "cannot be started"),
        (f"{quote(sys.executable)} -c 'raise SystemExit(\"no weights\")' {{port}}", "no weights"),
        ("http://127.0.0.1:1", "was not ready"),
    ],
)
def test_an_unavailable_peer_is_a_row_with_the_reason(how: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "ADDRESS_SECONDS", 0.1)
    with stamped() as server, RunningServer(Contender("us", server.address.url), "m", None, lambda line: None) as one:
        found = compare_with(one, Contender("peer", how), LOAD, 2)
    assert [row.work for row in found.rows] == ["everything"] and says in str(found.rows[0].problem)


def test_requests_that_fail_are_no_figures() -> None:
    with (
        stamped() as good,
        stamped(refuse=5) as bad,
        RunningServer(Contender("us", good.address.url), "m", None, lambda line: None) as one,
    ):
        found = compare_with(one, Contender("peer", bad.address.url), LOAD, 1)
    assert all("429" in str(row.problem) for row in found.rows)


def test_each_is_first_in_every_other_pair() -> None:
    order: list[str] = []
    made = list(in_pairs(4, lambda: len(order), lambda w: order.append("a") or w, lambda w: order.append("b") or w))  # type: ignore[func-returns-value]
    assert "".join(order) == "abbaabba" and all(one == other for one, other in made)


def test_contenders_are_addresses_or_commands_with_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_contender("x=http://a:1").is_address and not parse_contender("x=serve --port {port}").is_address
    for bad in ("x", "=http://a", "x=", "x=serve"):
        with pytest.raises(ConfigError):
            parse_contender(bad)
    assert ours().how.endswith("-m bankfull serve {model} --port {port} --speculative off")
    monkeypatch.setattr(side_by_side.shutil, "which", lambda name: "/x" if name == "vllm" else None)
    assert [peer.name for peer in installed_peers()] == ["vllm"]
