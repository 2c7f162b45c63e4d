"""Each peer: how it gets ready, and all its rows of the table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bankfull.errors import BankfullError
from benchmarks.cpu_peers import models
from benchmarks.cpu_peers.install import RECIPES, CannotInstall, install
from benchmarks.cpu_peers.process import EngineFailed, EngineProcess
from benchmarks.cpu_peers.turns import Pair, Row, Say
from benchmarks.cpu_peers.works import FreshPrompts, Work

ROOT = Path(__file__).resolve().parents[2]
START, MEMORY, IDLE = "start to first token", "resident memory", "idle CPU"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run keeps things, and what it compares."""

    model: Path
    folder: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that can be started."""

    command: Sequence[str]
    model: Path
    our_model: Path
    note: str = ""


Peer = Callable[[Place], Ready]
"""Installs and converts whatever is missing."""


def module(python: Path | str, name: str) -> list[str]:
    return [str(python), "-m", f"benchmarks.cpu_peers.{name}"]


def llamacpp(place: Place) -> Ready:
    """The file as it is, for both."""
    model = models.gguf_only(place.model)
    return Ready(module(install(RECIPES["llamacpp"], place.folder), "engine_llamacpp"), model, model, model.name)


def llamacpp_q4_0(place: Place) -> Ready:
    """The same numbers as Q4_0, llama.cpp's fastest type, for both."""
    python = install(RECIPES["llamacpp"], place.folder)
    model = models.requantized(place.model, place.folder, python, "Q4_0", ROOT)
    return Ready(module(python, "engine_llamacpp"), model, model, model.name)


def vllm(place: Place) -> Ready:
    """bfloat16 for the peer, which has no fast 4-bit path on CPUs; the file as it is for us."""
    python = install(RECIPES["vllm"], place.folder)
    return Ready(module(python, "engine_vllm"), models.widened(place.model, place.folder), place.model)


PEERS: Mapping[str, Peer] = {"llamacpp": llamacpp, "llamacpp-q4_0": llamacpp_q4_0, "vllm": vllm}


def compare(
    name: str, peer: Peer, works: Sequence[Work], pairs: int, place: Place, our_start: float | str, say: Say
) -> list[Row]:
    """All rows of one peer; what cannot be had is a row that says why. `our_start` are seconds, or such a reason."""
    engines: list[EngineProcess] = []
    try:
        say(f"{name}: getting it ready")
        ready = peer(place)
        fresh = FreshPrompts(models.vocabulary(ready.our_model))
        theirs, their_start = _started(name, ready.command, ready.model, place, fresh, engines, say)
        ours, _ = _started(
            "bankfull", module(sys.executable, "engine_bankfull"), ready.our_model, place, fresh, engines, say
        )
        theirs.name += f" ({ready.note})" if ready.note else ""
        pair = Pair(ours, theirs, fresh)
        start = _start_row(theirs.name, our_start, their_start)
        beside = [start, *pair.side_rows()]
        return [*(pair.compare(work, pairs, say) for work in works), *beside]
    except (CannotInstall, EngineFailed, BankfullError, OSError) as error:
        every = [*(work.name for work in works), START, MEMORY, IDLE]
        return [Row(row, name, "", problem=str(error)) for row in every]
    finally:
        for engine in engines:
            engine.quit()


def _started(
    label: str, command: Sequence[str], model: Path, place: Place, fresh: FreshPrompts,
    engines: list[EngineProcess], say: Say,
) -> tuple[EngineProcess, float]:  # fmt: skip
    """An engine that has loaded and given a token, asleep; and the seconds from starting it to that token."""
    # Set before anything loads, so that no library starts a pool of another size.
    variables = {"OMP_NUM_THREADS": str(place.threads), "PYTHONDONTWRITEBYTECODE": "1"}
    engine = EngineProcess(label, command, place.folder / f"{label}.err", variables=variables, folder=ROOT)
    engines.append(engine)
    say(f"{label}: loading {model.name}")
    engine.load(str(model), place.threads)
    engine.work(fresh.take(1, 32), 1)
    seconds = time.perf_counter() - engine.started
    engine.sleep()
    return engine, seconds


def _start_row(peer: str, ours: float | str, theirs: float) -> Row:
    if isinstance(ours, str):
        return Row(START, peer, "s", problem=ours)
    return Row(START, peer, "s", (ours,), (theirs,), more_is_better=False)
