"""How far the client's figures are from a stamped server's own, as quantiles: for a machine that is left alone.

    python -m tests.limits.load.accuracy --rate 200 --seconds 20 --tokens 20
"""

from __future__ import annotations

import argparse
from time import monotonic, process_time

from bankfull.limits.bench_stats import quantile
from bankfull.limits.load.arrivals import Arrivals
from bankfull.limits.load.client import Asking, Client
from tests.limits.load.kit import asking, stamped, stamps

SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=20)
    asked = parser.parse_args()
    count = round(asked.rate * asked.seconds)
    with stamped(wait=0.03, gap=0.01) as server:
        begun, used = monotonic(), process_time()
        outcomes = Client(server, Asking()).run(asking(asked.tokens, count), Arrivals(asked.rate).offsets(count, 0))
        share = (process_time() - used) / (monotonic() - begun)
    apart: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "E2E": [], "sent late": []}
    beyond = 0
    for one in outcomes:
        arrived, written = stamps(one)
        assert one.ttft is not None and one.tpot is not None and one.late is not None
        figures = {
            "TTFT": (one.ttft, written[0] - arrived), "E2E": (one.e2e, written[-1] - arrived),
            "TPOT": (one.tpot, (written[-1] - written[0]) / (asked.tokens - 1)), "sent late": (one.late, 0.0),
        }  # fmt: skip
        for name, (ours, theirs) in figures.items():
            apart[name].append(ours - theirs)
        beyond += any(abs(a - b) > max(1e-3, 0.01 * b) for name, (a, b) in figures.items() if name != "sent late")
    print(f"{count} requests at {asked.rate:g}/s, {asked.tokens} tokens each; the client used {share:.1%} of a core")
    print(f"{beyond} requests have a figure that is off by more than 1 ms and 1%")
    print(f"{'off by, ms':12}" + "".join(f"{100 * share:>9g}%" for share in SHARES))
    for name, values in apart.items():
        ranked = sorted(values)
        print(f"{name:12}" + "".join(f"{1e3 * quantile(ranked, share):>10.3f}" for share in SHARES))


if __name__ == "__main__":
    main()
