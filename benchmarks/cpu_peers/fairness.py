"""Checks that a peer is as fast in this harness as with its own tool: both alternately, work by work.

In the harness: a turn as in a comparison, right after a turn of this engine. By itself: the peer's own tool, called as
its users call it, right after that tool has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from bankfull.errors import BankfullError
from bankfull.limits.statistics import spread
from benchmarks.cpu_peers import models
from benchmarks.cpu_peers.compare import Engines, Measuring
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.llamacpp import LlamaCpp
from benchmarks.cpu_peers.peers import Peer, Place, Ready
from benchmarks.cpu_peers.process import EngineFailed
from benchmarks.cpu_peers.turns import Pair
from benchmarks.cpu_peers.works import FreshPrompts, Work

LEAST = 0.95
"""Fraction of its own tool's speed that a peer must reach in this harness."""


@dataclass(frozen=True, slots=True)
class Fairness:
    peer: str
    threads: int
    work: str
    harness: tuple[float, ...] = ()
    own_tool: tuple[float, ...] = ()
    problem: str | None = None

    @property
    def ratios(self) -> list[float]:
        return [here / there for here, there in zip(self.harness, self.own_tool, strict=True)]

    @property
    def fair(self) -> bool:
        return self.problem is None and spread(self.ratios).median >= LEAST

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratios": self.ratios, "fair": self.fair}


def check(name: str, peer: Peer, place: Place, how: Measuring) -> list[Fairness]:
    """One row per work; failures become rows with the reason."""
    try:
        how.say(f"{name}: preparing")
        ready = peer(place)
        with Engines(place, FreshPrompts(models.vocabulary(ready.our_model)), how.say) as engines:
            theirs, _ = engines.theirs(name, ready)
            pair = Pair(engines.ours(ready.our_model), theirs, engines.fresh)
            return [_checked(name, pair, *_own_tool(ready, work), place, how) for work in how.works]
    except (CannotInstall, EngineFailed, BankfullError, OSError) as error:
        return [Fairness(name, place.threads, work.name, problem=str(error)) for work in how.works]


def _own_tool(ready: Ready, work: Work) -> tuple[Work, Callable[[], float]]:
    """The work in a form that both can time, and the tool by itself."""
    peer = ready.peer
    if isinstance(peer, LlamaCpp):
        return work, lambda: peer.rate_by_itself(work)
    tool = peer.own_tool
    if tool is None:
        raise EngineFailed("it has no tool of its own")
    # The tools of engines that stay loaded report the time of a whole call, so whole calls are compared.
    whole = replace(work, measure="output", repetitions=1)
    return whole, lambda: tool.rate(whole)


def _checked(
    name: str, pair: Pair, work: Work, by_itself: Callable[[], float], place: Place, how: Measuring
) -> Fairness:
    harness, own_tool = list[float](), list[float]()

    def in_harness() -> float:
        turn = work.turn(pair.fresh)
        pair.rate(pair.ours, work, turn)
        return pair.rate(pair.theirs, work, turn)

    try:
        pair.get_ready(work)
        by_itself()  # warm-up, as in the harness: neither starts with cold files
        for number in range(how.pairs):
            if number % 2 == 0:
                harness.append(in_harness())
                own_tool.append(by_itself())
            else:
                own_tool.append(by_itself())
                harness.append(in_harness())
            at = f"{name}, {work.name}, pair {number + 1} of {how.pairs}"
            how.say(f"{at}: {harness[-1]:.1f} in the harness, {own_tool[-1]:.1f} by itself, tokens/s")
    except EngineFailed as error:
        return Fairness(name, place.threads, work.name, problem=str(error))
    return Fairness(name, place.threads, work.name, tuple(harness), tuple(own_tool))


def fairness_table(rows: Sequence[Fairness]) -> Table:
    table = Table(title="Each peer in this harness and with its own tool, tokens/s")
    for heading in ("peer", "threads", "work", "harness / own tool", "quartiles", "harness", "own tool", "pairs"):
        table.add_column(heading, justify="left" if heading in ("peer", "work") else "right")
    for row in rows:
        if row.problem is not None:
            table.add_row(row.peer, str(row.threads), row.work, "not measured")
            continue
        ratio, here, there = spread(row.ratios), spread(row.harness), spread(row.own_tool)
        verdict = f"{ratio.median:.2f}x" + ("" if row.fair else f", below {LEAST}x")
        table.add_row(
            row.peer,
            str(row.threads),
            row.work,
            verdict,
            f"{ratio.lower:.2f}x .. {ratio.upper:.2f}x",
            f"{here.median:.1f}",
            f"{there.median:.1f}",
            str(ratio.count),
        )
    return table
