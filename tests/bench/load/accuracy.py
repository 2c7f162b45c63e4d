"""Errors of the client's figures compared with a timestamping server, as quantiles; needs an idle machine.

    python -m tests.bench.load.accuracy --rate 200 --seconds 20 --tokens 20
    python -m tests.bench.load.accuracy --standstill 25     # with stalls of that many milliseconds

The reference is the kernel's timestamps on the server's side (witness.py): when a request's bytes arrived, and when a
token's left. The client counts from when a request was due, so the server's figures start there too. A client that
sends late reports it correctly, but breaks its schedule; such requests are counted separately, as figures that are off
if the server's start with the arrival of the request.

Both processes record their stalls. An error is charged to the machine only if a stall coincides with the request's
sending, its arrival, or its first or last token; all other errors are the client's.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic, process_time, sleep

from bankfull.bench.load.client import LoadClient, LoopMain, Outcome, RequestOptions
from bankfull.bench.load.clock import run_precisely
from bankfull.bench.load.stalls import Stall, sums, worst_at
from bankfull.limits.statistics import quantile
from bankfull.traffic.arrivals import Arrivals
from tests.bench.load.kit import figures, make_conversations, notes_of, off, stamped

EVERY = 0.2
"""Seconds between two deliberate stalls."""
SHARES = (0.0, 0.5, 0.9, 0.99, 0.999, 1.0)


Stalls = tuple[Sequence[Stall], Sequence[Stall]]
"""Stalls of the client and of the server; like all times here, from the start of the run."""


def cause(one: Outcome, stalls: Stalls) -> str:
    """The longest stall that affects one of its figures."""
    assert one.sent is not None
    moments = one.sent, one.times[0], one.ended
    found = [
        (stall.seconds, f"{who} stalled, {'by the machine' if stall.by_machine else 'by its own work'}")
        for who, some in zip(("the client", "the server"), stalls, strict=True)
        for moment in moments
        if (stall := worst_at(some, moment)) is not None
    ]
    return max(found)[1] if found else "no stall was seen"


def show_far(where: str, outcomes: Sequence[Outcome], truths: Sequence[Mapping[str, float]], stalls: Stalls) -> None:
    far = [one for one, theirs in zip(outcomes, truths, strict=True) if off(one, theirs) >= 1]
    print(f"{len(outcomes) - len(far)} have every figure within 1 ms or 1% of the server's, counted {where}")
    for reason, times in Counter(cause(one, stalls) for one in far).most_common():
        print(f"  {times} have not: {reason}")


def show_stalls(who: str, stalls: Sequence[Stall]) -> None:
    for named, found in zip(("by the machine", "by its own work"), sums(stalls), strict=True):
        print(
            f"{who} stalled {named} {found.times} times: {1e3 * found.seconds:.1f} ms in all, "
            f"{1e3 * found.longest:.3f} ms at most"
        )


def disturbed(work: LoopMain, seconds: float) -> None:
    """A run of the client with repeated deliberate stalls."""

    def stand_still() -> None:
        sleep(seconds)
        asyncio.get_running_loop().call_later(EVERY, stand_still)

    async def both() -> None:
        asyncio.get_running_loop().call_later(EVERY, stand_still)
        await work()

    run_precisely(both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--standstill", type=float, default=0.0)
    asked = parser.parse_args()
    run = partial(disturbed, seconds=asked.standstill / 1e3) if asked.standstill else run_precisely
    count = round(asked.rate * asked.seconds)
    with stamped(wait=0.03, gap=0.01) as server:
        begun, used = monotonic(), process_time()
        client = LoadClient(server, RequestOptions(), run)
        outcomes = client.run(make_conversations(asked.tokens, count), Arrivals(asked.rate).offsets(count, 0))
        share = (process_time() - used) / (monotonic() - begun)
        notes = notes_of(server)
    accounts = [notes.accounts[one.text] for one in outcomes]
    print(f"{count} requests at {asked.rate:g}/s, {asked.tokens} tokens each; the client used {share:.1%} of a core")
    print(
        f"the kernel stamped {sum(one.stamped for one in outcomes)} answers for the client; the server's own clock "
        f"confirms its stamps of {sum(account.confirmed for account in accounts)}"
    )
    stalls = (
        client.stalls,
        [
            Stall(stall.begin - client.begun, stall.end - client.begun, stall.own)
            for stall in notes.stalls
            if stall.end > client.begun
        ],
    )
    from_due = [account.figures(client.begun + one.due) for one, account in zip(outcomes, accounts, strict=True)]
    from_coming = [account.figures(account.came) for account in accounts]
    show_far("from when a request was due, as the client's", outcomes, from_due, stalls)
    show_far("from when the request came to it", outcomes, from_coming, stalls)
    for who, some in zip(("the client", "the server"), stalls, strict=True):
        show_stalls(who, some)
    apart = {"came late": [f["E2E"] - g["E2E"] for f, g in zip(from_due, from_coming, strict=True)]}
    for one, theirs in zip(outcomes, from_due, strict=True):
        for name, ours in figures(one).items():
            apart.setdefault(name, []).append(ours - theirs[name])
    print(f"{'off by, ms':12}" + "".join(f"{100 * share:>9g}%" for share in SHARES))
    for name, values in apart.items():
        ranked = sorted(values)
        print(f"{name:12}" + "".join(f"{1e3 * quantile(ranked, share):>10.3f}" for share in SHARES))


if __name__ == "__main__":
    main()
