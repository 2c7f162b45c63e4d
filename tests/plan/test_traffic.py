"""Traffic parsed from a line of text, and the traces it generates."""

from __future__ import annotations

import pytest

from bankfull.errors import ConfigError
from bankfull.plan.traffic import UniformLengths, parse_traffic


def test_a_line_says_how_often_and_how_long() -> None:
    found = parse_traffic("rate=5/s, in=1000, out=200")
    assert (found.rate, found.prompt, found.output) == (5.0, UniformLengths(1000, 1000), UniformLengths(200, 200))
    assert found.arrivals.kind == "poisson" and found.longest == 1200


@pytest.mark.parametrize(
    ("text", "rate"), [("90/min", 1.5), ("7200/h", 2.0), ("0.5", 0.5), (".25 / s", 0.25), ("3/second", 3.0)]
)
def test_a_rate_has_any_unit_of_time(text: str, rate: float) -> None:
    assert parse_traffic(f"rate={text},in=1,out=1").rate == pytest.approx(rate)


def test_lengths_are_ranges_and_arrivals_come_in_bursts() -> None:
    found = parse_traffic("RATE=2/s, in=20-40, out=5 - 9, shared=7, burstiness=0.5")
    assert found.prompt == UniformLengths(20, 40) and found.output == UniformLengths(5, 9) and found.shared == 7
    assert (found.arrivals.kind, found.arrivals.burstiness) == ("gamma", 0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("in=10, out=5", "lacks rate="),
        ("rate=5/s, out=5", "lacks in="),
        ("rate=5/s, in=10", "lacks out="),
        ("", "lacks rate="),
        ("rate=5/s, in=10, out=5, sharde=3", "did you mean 'shared'"),
        ("rate=5/s, in=10, out=5, zzz=3", "use rate, in, out"),
        ("rate=5/s, in, out=5", "not of the form name=value"),
        ("rate=5/s, rate=6/s, in=10, out=5", "given twice"),
        ("rate=0/s, in=10, out=5", "is not a request rate"),
        ("rate=-1/s, in=10, out=5", "is not a request rate"),
        ("rate=5/fortnight, in=10, out=5", "is not a request rate"),
        ("rate=5/s, in=0, out=5", "is not a number of tokens"),
        ("rate=5/s, in=9-3, out=5", "is not a number of tokens"),
        ("rate=5/s, in=1e3, out=5", "is not a number of tokens"),
        ("rate=5/s, in=99999999999, out=5", "is not a number of tokens"),
        ("rate=5/s, in=10, out=5, shared=10", "must be less than every prompt"),
        ("rate=5/s, in=10, out=5, arrivals=magic", "arrival process 'magic' is unknown"),
        ("rate=5/s, in=10, out=5, arrivals=constant, burstiness=2", "has no effect"),
        ("rate=5/s, in=10, out=5, burstiness=x", "is not a number"),
    ],
)
def test_invalid_traffic_is_rejected_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_traffic(text)


def test_a_trace_is_the_same_for_the_same_seed_and_begins_with_what_is_shared() -> None:
    traffic = parse_traffic("rate=4/s, in=20-40, out=5-9, shared=7")
    trace = traffic.trace(400, 97, seed=3)
    assert trace == traffic.trace(400, 97, seed=3) != traffic.trace(400, 97, seed=4)
    assert len({arrival.prompt[:7] for arrival in trace}) == 1
    assert len({arrival.prompt for arrival in trace}) == 400
    assert {len(arrival.prompt) for arrival in trace} == set(range(20, 41))
    assert {arrival.output for arrival in trace} == set(range(5, 10))
    assert trace[-1].time == pytest.approx(100, rel=0.15)
    assert all(0 <= token < 97 for token in trace[0].prompt)
