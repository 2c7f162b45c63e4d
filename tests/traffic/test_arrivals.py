"""Arrival processes."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest
import scipy

from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals

COUNT = 20_000


def gaps(arrivals: Arrivals, seed: int = 0) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *arrivals.offsets(COUNT, seed)])]


def test_poisson_gaps_are_exponential() -> None:
    assert scipy.stats.kstest(gaps(Arrivals(25.0)), "expon", args=(0, 1 / 25)).pvalue > 0.01


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_variance_of_their_burstiness(burstiness: float) -> None:
    found = gaps(Arrivals(25.0, "gamma", burstiness))
    assert fmean(found) == pytest.approx(1 / 25, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_constant_gaps_are_all_alike_and_an_infinite_rate_is_all_at_once() -> None:
    assert Arrivals(4.0, "constant").offsets(4, 9) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert Arrivals(float("inf")).offsets(3, 9) == [0.0, 0.0, 0.0]


def test_a_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    arrivals = Arrivals(3.0)
    assert arrivals.offsets(50, 1) == arrivals.offsets(50, 1) != arrivals.offsets(50, 2)
    assert arrivals.offsets(50, 1) == arrivals.offsets(80, 1)[:50], "more requests do not change the first ones"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Arrivals(0.0), "rate=0.0"),
        (lambda: Arrivals(float("nan")), "rate=nan"),
        (lambda: Arrivals(1.0, "tidal"), "use one of poisson, gamma, constant"),
        (lambda: Arrivals(1.0, "gamma", 0.0), "burstiness=0.0"),
        (lambda: Arrivals(1.0, "poisson", 2.0), "use gamma"),
        (lambda: Arrivals(1.0).offsets(0, 0), "0 requests"),
        (lambda: Arrivals(1.0).offsets(10**9, 0), "1000000000 requests"),
    ],
)
def test_bad_input_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
