"""Compares one peer with this engine: starts both, then measures all rows of their table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bankfull.bench.compare.rows import Bandwidth, Comparison, Reach, Row, Side
from bankfull.errors import BankfullError
from benchmarks.cpu_peers import models
from benchmarks.cpu_peers.contenders import Contender, LoadedEngine
from benchmarks.cpu_peers.install import CannotInstall
from benchmarks.cpu_peers.llamacpp import LlamaCpp
from benchmarks.cpu_peers.peers import ROOT, Peer, Place, Ready, module
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.reach import Looking, bytes_per_token
from benchmarks.cpu_peers.turns import IDLE, MEMORY, Around, Pair, Say
from benchmarks.cpu_peers.works import FreshPrompts, Work

START = "start to first token"
OURS = "bankfull"


@dataclass(frozen=True, slots=True)
class Measuring:
    """Works, pairs and instruments of a measurement."""

    works: Sequence[Work]
    pairs: int
    our_start: Callable[[Path], float | str]
    """Start-up seconds for a model, or the reason for a failure."""
    bandwidth: Looking | None
    """Bandwidth probe; None = not measured."""
    say: Say


@dataclass(frozen=True, slots=True)
class Compared:
    """Rows, and the peer's best settings by work."""

    found: Comparison
    settings: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {**self.found.as_json(), "settings": dict(self.settings)}


def compare(name: str, peer: Peer, place: Place, how: Measuring) -> Compared:
    """Failures become rows with the reason."""
    ours, theirs = Side(OURS, place.model.name), Side(name, place.model.name)
    try:
        how.say(f"{name}: preparing")
        ready = peer(place)
        ours, theirs = Side(OURS, ready.our_model.name), Side(name, ready.model.name)
        with Engines(place, FreshPrompts(models.vocabulary(ready.our_model)), how.say) as engines:
            pair, start = _loaded(name, ready, engines, how)
            ours, theirs = replace(ours, engine=pair.ours.name), replace(theirs, engine=pair.theirs.name)
            beside = [start, *pair.side_rows()]
            rows = [_row(pair, work, ready.our_model, how) for work in how.works]
        return Compared(Comparison(name, ours, theirs, [*rows, *beside]), pair.theirs.settings)
    except (CannotInstall, EngineFailed, BankfullError, OSError) as error:
        every = [*(work.name for work in how.works), START, MEMORY, IDLE]
        return Compared(Comparison(name, ours, theirs, [Row(row, "", problem=str(error)) for row in every]), {})


class Engines:
    """Processes of one comparison, all ended with it."""

    def __init__(self, place: Place, fresh: FreshPrompts, say: Say) -> None:
        self._place, self.fresh, self._say = place, fresh, say
        self._started: list[EngineProcess] = []

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        while self._started:
            self._started.pop().quit()

    def start(
        self, label: str, command: Sequence[str], model: Path, variables: Mapping[str, str] | None = None
    ) -> tuple[EngineProcess, float]:
        """A loaded, paused engine that has generated a token, and the seconds from its start to that token."""
        threads = self._place.threads
        # Set before any import, so that no library starts a thread pool of another size.
        every = {"OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}
        self._say(f"{label}: loading {model.name}")
        engine = EngineProcess(label, command, self._place.folder / f"{label}.err", variables=every, folder=ROOT)
        self._started.append(engine)
        engine.load(str(model), threads)
        engine.work(self.fresh.take(1, 32), 1)
        seconds = time.perf_counter() - engine.started
        engine.sleep()
        return engine, seconds

    def end(self, engine: EngineProcess) -> None:
        self._started.remove(engine)
        engine.quit()

    def ours(self, model: Path) -> LoadedEngine:
        return LoadedEngine(self.start(OURS, module(sys.executable, "engine_bankfull"), model)[0])

    def theirs(self, name: str, ready: Ready) -> tuple[Contender, float]:
        """The contender, and the seconds from process start to its first token. A first start warms the page cache and
        the peer's compile cache and does not count; neither does ours."""
        peer = ready.peer
        if isinstance(peer, LlamaCpp):
            self._say(f"{name}: starting with {ready.model.name}")
            peer.seconds_to_first_token()
            return peer, peer.seconds_to_first_token()
        self.end(self.start(name, peer.command, ready.model, peer.variables)[0])
        engine, seconds = self.start(name, peer.command, ready.model, peer.variables)
        return LoadedEngine(engine), seconds


def _loaded(name: str, ready: Ready, engines: Engines, how: Measuring) -> tuple[Pair, Row]:
    our_start = how.our_start(ready.our_model)
    theirs, their_start = engines.theirs(name, ready)
    ours = engines.ours(ready.our_model)
    if isinstance(our_start, str):
        start = Row(START, "s", problem=our_start)
    else:
        start = Row(START, "s", (our_start,), (their_start,), more_is_better=False)
    return Pair(ours, theirs, engines.fresh), start


def _row(pair: Pair, work: Work, our_model: Path, how: Measuring) -> Row:
    """A row; decoding is compared with the read bandwidth measured around each of our turns."""
    if how.bandwidth is None or work.measure != "decode":
        return pair.compare(work, how.pairs, how.say)
    needed = bytes_per_token(our_model, work)
    bandwidth, seen = how.bandwidth, list[Bandwidth]()
    row = pair.compare(work, how.pairs, how.say, Around(lambda: bandwidth(needed), seen))
    return row if row.problem else replace(row, reach=Reach(needed, tuple(seen)))
