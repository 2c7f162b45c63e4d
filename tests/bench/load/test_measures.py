"""Figures compared with values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bankfull.bench.load.measures import Measured, distribution
from bankfull.errors import ConfigError
from bankfull.traffic.slo import Slo, parse_slo
from tests.bench.load.kit import outcome

RUN = [
    outcome(0.0, (1.0, 1.5, 2.0), prompt=4),
    outcome(1.0, (3.0, 3.1, 3.4), tokens=5),
    outcome(2.0, (4.0,), prompt=6),
    outcome(3.0, (), error="status 429"),
]


def test_latencies_count_from_when_a_request_was_due() -> None:
    first, second, single, failed = RUN
    assert (first.ttft, first.e2e, first.tpot) == (1.0, 2.0, 0.5)
    assert second.ttft == 2.0 and second.tpot == pytest.approx(0.1), "five tokens came in three events"
    assert second.gaps == pytest.approx([0.1, 0.3])
    assert single.tpot is None and single.gaps == [] and single.figures()["itl"] is None
    assert failed.ttft is None


def test_rates_and_tokens_are_over_the_whole_time_and_without_failures() -> None:
    m = Measured(RUN, Slo())
    assert m.duration == 4.0 and m.request_rate == 0.75
    assert (m.input_tokens, m.output_tokens) == (20, 9)
    assert m.goodput is None and m.attainment_curve() == []
    latencies = m.latencies
    assert latencies["ttft"] is not None and latencies["ttft"].mean == pytest.approx(5 / 3)
    assert latencies["tpot"] is not None and latencies["tpot"].count == 2
    assert latencies["itl"] is not None and latencies["itl"].count == 4
    assert m.peak_concurrency() == 3


def test_goodput_counts_those_that_meet_every_objective_and_failures_meet_none() -> None:
    m = Measured(RUN, parse_slo("ttft=2s, tpot=400ms"))
    assert m.attained() == 0.5, "the second and the single-token one; the first exceeds TPOT, the fourth failed"
    assert m.goodput == 0.5
    assert m.attained(1.25) == 0.75 and m.attained(100) == 0.75
    assert m.attained(0.4) == 0.0
    curve = m.attainment_curve()
    assert [part for _, part in curve] == sorted(part for _, part in curve) and curve[0][0] == pytest.approx(0.1)


def test_percentiles_are_those_of_numpy_and_nothing_has_none() -> None:
    values = [float(n) for n in range(101)]
    found = distribution(values)
    assert found is not None
    assert (found.median, found.p90, found.p95, found.p99) == (50.0, 90.0, 95.0, 99.0)
    assert found.std == pytest.approx(np.std(values)) and distribution([]) is None
    with pytest.raises(ConfigError):
        Measured([], Slo())


def test_the_run_second_by_second() -> None:
    seconds = Measured(RUN, Slo()).per_second()
    assert [events for _, events, _ in seconds] == [0, 2, 1, 3, 1]
    assert [open_ for _, _, open_ in seconds] == [1, 2, 3, 3, 2]


def test_growing_latencies_are_noticed() -> None:
    steady = [outcome(float(n), (n + 1.0,)) for n in range(40)]
    queue = [outcome(float(n), (2.0 * n + 1.0,)) for n in range(40)]
    assert Measured(steady, Slo()).growth == pytest.approx(1.0)
    assert (Measured(queue, Slo()).growth or 0) > 5
    assert Measured(steady[:8], Slo()).growth is None


def test_objectives_are_read_with_their_units() -> None:
    assert parse_slo("ttft=500ms, tpot=50ms") == Slo(ttft=0.5, tpot=0.05)
    assert parse_slo("TTFT: 1.5s,e2el=2000") == Slo(ttft=1.5, e2e=2.0), "a bare number is in milliseconds"
    assert parse_slo("itl=800us") == Slo(itl=pytest.approx(0.0008))
    assert str(parse_slo("ttft=0.5s, e2e=20s")) == "ttft=500ms, e2e=20s"


BAD = ("", "fast", "ttft", "ttft=", "ttft=0", "ttft=1h", "ttft=1s, ttft=2s", "p99=1s", "ttft=1.2.3s")


@pytest.mark.parametrize("bad", BAD)
def test_bad_objectives_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        parse_slo(bad)
