"""How far the client's figures are from a stamped server's own, as quantiles: for a machine that is left alone.

    python -m tests.limits.load.accuracy --rate 200 --seconds 20 --tokens 20

Both processes note when they did not run although they had to. A figure that is off is laid to the machine only where
such a moment lies at the request's sending, its arrival, or its first or last token; all others are the client's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from time import monotonic, process_time

from bankfull.limits.bench_stats import quantile
from bankfull.limits.load.arrivals import Arrivals
from bankfull.limits.load.client import Asking, Client, Outcome
from bankfull.limits.load.stalls import Stall, sums, worst_at
from tests.limits.load.kit import asking, stalls_of, stamped, stamps

SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)
CLOSE, PART = 1e-3, 0.01
"""A figure may differ by a millisecond or by one percent."""


def figures(one: Outcome) -> dict[str, tuple[float, float]]:
    """The client's, and the server's."""
    arrived, written = stamps(one)
    assert one.ttft is not None and one.tpot is not None
    return {
        "TTFT": (one.ttft, written[0] - arrived), "E2E": (one.e2e, written[-1] - arrived),
        "TPOT": (one.tpot, (written[-1] - written[0]) / (len(written) - 1)),
    }  # fmt: skip


def off(one: Outcome) -> float:
    """Seconds by which its worst figure is further away than it may be; negative where all are near enough."""
    return max(abs(ours - theirs) - max(CLOSE, PART * theirs) for ours, theirs in figures(one).values())


def cause(one: Outcome, client: Sequence[Stall], server: Sequence[Stall]) -> str:
    """The longest stall at a moment that one of its figures hangs on."""
    arrived, written = stamps(one)
    assert one.sent is not None
    found = [
        (stall.seconds, f"{who}, {'by the machine' if stall.by_machine else 'by its own work'}")
        for who, stalls, moments in (
            ("the client stalled", client, (one.sent, one.times[0], one.ended)),
            ("the server stalled", server, (arrived, written[0], written[-1])),
        )
        for moment in moments
        if (stall := worst_at(stalls, moment)) is not None
    ]
    return max(found)[1] if found else "no stall was seen"


def show_stalls(who: str, stalls: Sequence[Stall]) -> None:
    for named, found in zip(("by the machine", "by its own work"), sums(stalls), strict=True):
        print(f"{who} stalled {named} {found.times} times: {1e3 * found.seconds:.1f} ms in all, "
              f"{1e3 * found.longest:.3f} ms at most")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=20)
    asked = parser.parse_args()
    count = round(asked.rate * asked.seconds)
    with stamped(wait=0.03, gap=0.01) as server:
        begun, used = monotonic(), process_time()
        client = Client(server, Asking())
        outcomes = client.run(asking(asked.tokens, count), Arrivals(asked.rate).offsets(count, 0))
        share = (process_time() - used) / (monotonic() - begun)
        theirs = [stall for stall in stalls_of(server) if stall.end > begun]
    print(f"{count} requests at {asked.rate:g}/s, {asked.tokens} tokens each; the client used {share:.1%} of a core")
    far = [one for one in outcomes if off(one) > 0]
    print(f"{len(far)} requests have a figure that is off by more than 1 ms and 1%")
    for reason, times in Counter(cause(one, client.stalls, theirs) for one in far).most_common():
        print(f"  {times} of them: {reason}")
    show_stalls("the client", client.stalls)
    show_stalls("the server", theirs)
    apart: dict[str, list[float]] = {"sent late": [one.late for one in outcomes if one.late is not None]}
    for one in outcomes:
        for name, (our, their) in figures(one).items():
            apart.setdefault(name, []).append(our - their)
    print(f"{'off by, ms':12}" + "".join(f"{100 * share:>9g}%" for share in SHARES))
    for name, values in apart.items():
        ranked = sorted(values)
        print(f"{name:12}" + "".join(f"{1e3 * quantile(ranked, share):>10.3f}" for share in SHARES))


if __name__ == "__main__":
    main()
