from __future__ import annotations

import pytest

from benchmarks.acceptance import NOISES, main, pairs, shares


def test_rules_keep_their_order_and_bounds() -> None:
    for seed, pair in enumerate(pairs(60, 0.8, 0.5, 3)):
        found = shares(*pair, 3000, seed)
        error = 0.05  # five standard deviations of a share
        assert found["race, at least"] - error < found["race"] < found["1 - distance"] + error
        assert abs(found["rejection"] - found["1 - distance"]) < error
        assert abs(found["top token, race"] - found["top token, rejection"]) < error
        assert found["inverse CDF"] < found["race"]


def test_the_table_has_a_line_per_noise(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--vocab", "30", "--pairs", "2", "--draws", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(NOISES)
    assert len({line.count("|") for line in lines}) == 1
