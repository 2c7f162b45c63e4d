"""The client's measurements compared with a server that timestamps its own events."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from time import monotonic, process_time

import pytest

from bankfull.bench.load.client import LoadClient, RequestOptions
from bankfull.bench.load.stalls import Stall
from bankfull.traffic.arrivals import Arrivals
from tests.bench.load.kit import make_conversations, notes_of, off, simulated, stamped, stamps
from tests.bench.load.stamped_server import Line

RATE, SECONDS, TOKENS, GAP = 200.0, 2.0, 10, 0.01
ATTEMPTS = 5


def quiet(stalls: Iterable[Stall]) -> bool:
    """No stall lasted half of the time between two tokens, which could merge the second with the first."""
    return max((stall.seconds for stall in stalls), default=0.0) < GAP / 2


@pytest.mark.full  # uses real time: other tests on the machine make it fail
def test_at_200_requests_per_second_every_figure_is_within_a_millisecond_or_one_percent() -> None:
    """TTFT, TPOT and E2E of each request, using less than half of a core. A run without other load on the machine must
    meet the tolerance and decides the test; all but one in a hundred of its requests must also arrive at the server on
    time. On a machine that is never idle, the better half of the requests must meet it in some run: noise makes a
    client look worse, never better."""
    count, shares = int(RATE * SECONDS), []
    with stamped(wait=0.03, gap=GAP) as server:
        for attempt in range(ATTEMPTS):
            offsets = Arrivals(RATE).offsets(count, attempt)
            begun, used = monotonic(), process_time()
            client = LoadClient(server, RequestOptions())
            outcomes = client.run(make_conversations(TOKENS, count), offsets)
            seconds, used = monotonic() - begun, process_time() - used
            assert [one.error for one in outcomes] == [None] * count
            assert used < 0.5 * seconds, "the client uses less than half a core"
            notes = notes_of(server)
            pairs = [(one, notes.accounts[one.text]) for one in outcomes]
            shares.append(fmean(off(one, account.figures(client.begun + one.due)) < 1 for one, account in pairs))
            if quiet(client.stalls) and quiet(stall for stall in notes.stalls if stall.end > begun):
                assert shares[-1] == 1
                assert fmean(off(one, account.figures(account.came)) < 1 for one, account in pairs) >= 0.99
                return
    assert max(shares) >= 0.5, f"fraction of the requests within the tolerance, by run: {shares}"


def test_with_a_simulated_clock_every_figure_is_exact() -> None:
    offsets = Arrivals(RATE).offsets(400, 1)
    outcomes = simulated(Line(0.0, 0.03, 0.01), make_conversations(TOKENS, 400), offsets)
    for one in outcomes:
        arrived, written = stamps(one)
        assert one.ttft == pytest.approx(written[0] - arrived, abs=2e-6)  # timestamps have six digits
        assert one.e2e == pytest.approx(written[-1] - arrived, abs=2e-6)
        assert one.late == 0.0


def test_a_figure_never_flatters_the_server() -> None:
    """Both use the same clock, and nothing arrives before it was sent: the client's times can only be longer."""
    with stamped(wait=0.005, gap=0.002) as server:
        outcomes = LoadClient(server, RequestOptions()).run(make_conversations(5, 200), Arrivals(200.0).offsets(200, 0))
    for one in outcomes:
        arrived, written = stamps(one)
        assert one.ttft is not None and one.ttft >= written[0] - arrived
        assert one.e2e >= written[-1] - arrived
        assert one.late is not None and one.late >= 0
        assert len(one.times) == one.output_tokens == 5


def test_a_stall_is_charged_to_all_requests_that_were_due() -> None:
    """Each response occupies the server for 0.2 s: a closed-loop client would report ten fast requests. Here each of
    them waited, and its latency shows it."""
    rate, count, service = 100.0, 10, 0.2
    with stamped(service=service) as server:
        offsets = Arrivals(rate, "constant").offsets(count, 0)
        outcomes = sorted(
            LoadClient(server, RequestOptions()).run(make_conversations(1, count), offsets), key=lambda one: one.due
        )
    for number, one in enumerate(outcomes):
        waits = (number + 1) * service - (one.due - outcomes[0].due)
        assert one.e2e == pytest.approx(waits, abs=0.2)
        assert one.late is not None and one.late < 0.2, "sent when due, not when the server was free"
