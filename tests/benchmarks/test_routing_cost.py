"""The cost of a routed request is measured on equal choices."""

from __future__ import annotations

import pytest

from benchmarks.routing_cost import CostedFront, main


@pytest.mark.parametrize("replicas", [4, 40])
def test_both_ways_choose_the_same_replicas(replicas: int) -> None:
    slow, fast = CostedFront(replicas, 0.9), CostedFront(replicas, 0.9)
    assert [slow.request(False)[0] for _ in range(60)] == [fast.request(True)[0] for _ in range(60)]


def test_the_command_prints_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--replicas", "3", "--requests", "5"])
    assert len(capsys.readouterr().out.splitlines()) == 3
