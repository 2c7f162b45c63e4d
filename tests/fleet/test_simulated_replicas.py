"""Four simulated replicas with the real scheduler, prefix cache, reports and routing, under three kinds of traffic."""

from __future__ import annotations

from functools import lru_cache

import pytest

from bankfull.fleet.prefixes import PromptKeys
from bankfull.fleet.routing import POLICIES as ROUTING_POLICIES
from benchmarks.routing import ONE_CACHE, PAGE_TOKENS, TRAFFIC, Outcome, Session, compare, hot_prefix, main, multi_turn

POLICIES = (ONE_CACHE, "prefix", "round-robin", "least-loaded")
SESSIONS = 80


@lru_cache
def runs(traffic: str) -> dict[str, Outcome]:
    return compare(TRAFFIC[traffic](SESSIONS if traffic != "hot-prefix" else 200), POLICIES)


@pytest.mark.few(1)
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_every_request_is_answered_in_full(traffic: str) -> None:
    sessions = TRAFFIC[traffic](SESSIONS if traffic != "hot-prefix" else 200)
    for run in runs(traffic).values():
        assert len(run.turns) == sum(len(session.turns) for session in sessions)
        assert all(turn.ended is not None for turn in run.turns)


@pytest.mark.few(1)
@pytest.mark.parametrize("traffic", ["multi-turn", "skewed"])
def test_prefix_routing_comes_close_to_one_large_cache(traffic: str) -> None:
    found = runs(traffic)
    assert found["prefix"].hit_rate >= 0.95 * found[ONE_CACHE].hit_rate
    assert found["prefix"].hit_rate >= 2 * found["round-robin"].hit_rate
    assert found["prefix"].median_ttft <= found["least-loaded"].median_ttft
    assert found["prefix"].late_ttft <= found["least-loaded"].late_ttft


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_no_replica_is_left_idle_or_overrun(traffic: str) -> None:
    shares = runs(traffic)["prefix"].shares
    assert min(shares) > 0.15 and max(shares) < 0.35


def test_a_prefix_that_all_share_is_held_by_all() -> None:
    run = runs("hot-prefix")["prefix"]
    shared = PromptKeys(hot_prefix(1)[0].opening, "", PAGE_TOKENS)
    keys = set(shared.upto(shared.blocks))
    assert len(keys) > 100 and all(keys <= held for held in run.held)
    # Each replica computes it once, or twice when two requests arrive before the first has ended.
    computed = sum(turn.cached < PAGE_TOKENS * len(keys) for turn in run.turns)
    assert computed <= 2 * run.replicas
    assert run.median_ttft <= 1.1 * runs("hot-prefix")["least-loaded"].median_ttft


def test_the_front_predicts_what_the_engine_finds() -> None:
    """But for what is evicted or finished between the choice and the admission."""
    turns = runs("multi-turn")["prefix"].turns
    wrong = sum(abs(turn.predicted - turn.cached) for turn in turns)
    assert wrong <= 0.05 * sum(turn.cached for turn in turns)
    assert sum(turn.cached for turn in turns) > 0


def test_a_session_keeps_its_replica_and_strangers_avoid_a_busy_one() -> None:
    session = Session(0.0, tuple(range(640)), tuple((2.0, (n,), 4) for n in range(1, 6)))
    blocker = Session(3.2, tuple(range(9, 12_009)), ((0.0, (1,), 4),))
    alone = compare([session], ["prefix"], replicas=2)["prefix"]
    assert len({turn.replica for turn in alone.turns}) == 1
    # Its second turn arrives at about 4 s. The blocker, 12,000 tokens, takes 2.4 s and goes to the idle replica.
    beside = compare([session, blocker], ["prefix"], replicas=2)["prefix"]
    home = {turn.replica for turn in beside.turns if turn.session == 0}
    assert len(home) == 1 and {turn.replica for turn in beside.turns if turn.session == 1}.isdisjoint(home)


def test_traffic_and_simulation_are_reproducible() -> None:
    assert multi_turn(5, seed=3) == multi_turn(5, seed=3) != multi_turn(5, seed=4)
    one, two = (compare(multi_turn(12), ["prefix", "random-two"]) for _ in range(2))
    assert {name: run.turns for name, run in one.items()} == {name: run.turns for name, run in two.items()}


def test_the_benchmark_prints_a_line_for_each_policy(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sessions", "8", "--traffic", "multi-turn", "--replicas", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("multi-turn: 8 conversations")
    assert [line.strip().split("  ")[0].split(" ")[0] for line in lines[3:]] == ["one", *ROUTING_POLICIES]
    assert all("%" in line and "ms" in line for line in lines[3:])
