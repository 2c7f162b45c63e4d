from __future__ import annotations

import math

import pytest
import torch

from benchmarks.acceptance import NOISES, main, pairs, shares, typical_divergence


def test_rules_keep_their_order_and_bounds() -> None:
    for seed, pair in enumerate(pairs(60, 0.8, 0.5, 3)):
        found = shares(*pair, 3000, seed)
        error = 0.05  # five standard deviations of a share
        assert found["race, at least"] - error < found["race"] < found["1 - distance"] + error
        assert abs(found["rejection"] - found["1 - distance"]) < error
        assert abs(found["top token, race"] - found["top token, rejection"]) < error
        assert found["inverse CDF"] < found["race"]


def test_typical_acceptance_costs_the_divergence_of_its_tokens() -> None:
    flat = torch.full((4,), 0.25, dtype=torch.float64)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    expected = sum(q * math.log(q / 0.25) for q in skewed.tolist())
    assert typical_divergence(flat, skewed) == pytest.approx(expected), "each token of a flat target passes"
    sharp = torch.tensor([0.96, 0.04], dtype=torch.float64)  # the second token never passes
    given = (0.5 + 0.5 * 0.96, 0.5 * 0.04)
    expected = sum(g * math.log(g / p) for g, p in zip(given, (0.96, 0.04), strict=True))
    assert typical_divergence(sharp, torch.full((2,), 0.5, dtype=torch.float64)) == pytest.approx(expected)
    assert typical_divergence(flat, flat) == pytest.approx(0.0)


def test_the_table_has_a_line_per_noise(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--vocab", "30", "--pairs", "2", "--draws", "50"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(NOISES)
    assert len({line.count("|") for line in lines}) == 1
