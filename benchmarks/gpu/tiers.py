"""python -m benchmarks.gpu.tiers: restoring a prefix from host memory and from disk against computing it again.

One engine with random weights. Each figure stands beside its limit: the rate of plain copies between pinned memory and
the device, and the rate at which the same file is read without the engine.

`--turns`: conversations whose contexts exceed the pool four times take turns, several at a time, with a host tier of
four times the pool. Cached prompt tokens as a share of what an unbounded cache gives.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from bankfull.assembly import assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.limits.statistics import spread
from bankfull.runtime.device import open_device
from bankfull.state.disk import DiskStore
from bankfull.state.prefix import Chain
from bankfull.state.tiers import Key
from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config
from bankfull.types import Tier
from benchmarks.gpu.engine import Session, Setup, Trace

PIECE = 2 << 20
"""Bytes of a plain copy: about a page of an 8B model."""
TURNS_AT_ONCE = 8
ANSWER_TOKENS = 16


class TieredSession(Session):
    """A session whose engine has tiers."""

    def __init__(self, setup: Setup, device: str, **tiers: str) -> None:
        self.setup, self._random = setup, random.Random(0)
        opened = open_device(device)
        dtype = getattr(torch, setup.dtype)
        files = random_model(setup.shape, shape_config(setup.shape), dtype, opened.torch)
        run = RunConfig(device=device, dtype=setup.dtype, speculative="off")
        sched = SchedConfig(rows=setup.rows, step_tokens=setup.step_tokens)
        self.made = assemble(files, run, sched, StateConfig(**tiers), max_len=setup.max_len, device=opened)  # type: ignore[arg-type]
        self.engine = self.made.engine
        self.run([self.prompt(64)], 4)

    @property
    def state(self) -> Any:
        return self.engine.scheduler.state

    def keys(self, prompt: Sequence[int], length: int) -> list[Key]:
        chain = Chain(b"", self.state.layout.block_tokens)
        chain.extend(prompt, length)
        return list(self.state.keys_for(chain, length))

    def settle(self) -> None:
        """Run until nothing moves."""
        while self.engine.busy:
            self.engine.step()

    def forget_host(self) -> None:
        """The host tier loses what write-behind has copied there."""
        for tier in self.state.tiers.lower:
            if tier.tier == Tier.HOST:
                tier.forget()


def first_token(session: TieredSession, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and the prompt's cached tokens."""
    found: list[int] = []
    engine = session.engine
    note = lambda plan: found.extend(enter.computed for enter in plan.enter)  # noqa: E731
    engine.on_launch.append(note)
    trace = session.run([prompt], 2)
    engine.on_launch.remove(note)
    return trace.all_started, found[0]


def restore_seconds(session: TieredSession, keys: Sequence[Key], length: int) -> float:
    """Seconds until a prefix is on the device, by the engine's own loop."""
    tiers = session.state.tiers
    begun = perf_counter()
    fetch = tiers.fetch(keys, length, 0.0)
    assert fetch is not None, "the device has no room, or the prefix is nowhere"
    while not fetch.done:
        session.engine.step()
    taken = perf_counter() - begun
    tiers.release(fetch)
    return taken


def copy_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """Bytes per second of plain copies in pieces of a page's size."""
    count = max(1, nbytes // PIECE)
    host = torch.empty(count, PIECE, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(count, PIECE, dtype=torch.uint8, device=device)
    found = {}
    for name, target, source in (("down", host, there), ("up", there, host)):
        rates = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = perf_counter()
            for i in range(count):
                target[i].copy_(source[i], non_blocking=True)
            torch.cuda.synchronize()
            rates.append(count * PIECE / (perf_counter() - begun))
        found[name] = median(rates)
    return found


def disk_rate(path: Path, nbytes: int, page: int) -> float:
    """Bytes per second of reading the data file page by page, without the cache of the operating system."""
    handle = os.open(path, os.O_RDONLY)
    size = min(nbytes, os.fstat(handle).st_size)
    buffer = bytearray(page)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    begun = perf_counter()
    for at in range(0, size - page + 1, page):
        os.preadv(handle, [buffer], at)
    taken = perf_counter() - begun
    os.close(handle)
    return (size // page * page) / taken


def drop_file_cache(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def measure_host(session: TieredSession, length: int, reps: int, report: dict[str, Any]) -> None:
    state, tiers = session.state, session.state.tiers
    cold, warm, restored, swapped = [], [], [], []
    nbytes = 0
    for _ in range(reps + 1):
        state.forget()
        prompt = session.prompt(length)
        seconds, cached = first_token(session, prompt)
        assert not cached
        cold.append(seconds)
        reach = (length - 1) // state.layout.block_tokens * state.layout.block_tokens
        keys = session.keys(prompt, reach)
        nbytes = sum(tiers.bytes_of(key) for key in keys)
        session.settle()  # write-behind
        session.forget_host()
        begun = perf_counter()
        tiers.swap_out(keys)
        session.settle()
        swapped.append(nbytes / (perf_counter() - begun))
        state.forget()  # on the device only
        restored.append(restore_seconds(session, keys, reach))
        state.forget()
        seconds, cached = first_token(session, prompt)
        assert cached == reach, f"{cached} of {reach} tokens were restored"
        warm.append(seconds)
    prefill = spread(cold[1:]).median
    report["host"] = {
        "prefix tokens": length,
        "bytes": nbytes,
        "cold first token, ms": 1e3 * prefill,
        "restored first token, ms": 1e3 * spread(warm[1:]).median,
        "restore alone, ms": 1e3 * spread(restored[1:]).median,
        "recompute / restore": prefill / spread(restored[1:]).median,
        "cold / restored first token": prefill / spread(warm[1:]).median,
        "swap-out GB/s": 1e-9 * spread(swapped[1:]).median,
        "swap-in GB/s": 1e-9 * nbytes / spread(restored[1:]).median,
    }


def measure_disk(session: TieredSession, length: int, reps: int, report: dict[str, Any]) -> None:
    state, tiers = session.state, session.state.tiers
    prompt = session.prompt(length)
    cold, _ = first_token(session, prompt)
    session.settle()
    reach = (length - 1) // state.layout.block_tokens * state.layout.block_tokens
    keys = session.keys(prompt, reach)
    nbytes = sum(tiers.bytes_of(key) for key in keys)
    mover = session.engine.runner.mover
    assert mover is not None
    store = mover.stores[Tier.DISK]
    assert isinstance(store, DiskStore)
    data = store.path / "pages.data"
    page = state.layout.frame_bytes
    rates, plain = [], []
    for _ in range(reps):
        drop_file_cache(data)
        plain.append(disk_rate(data, nbytes, page))
        drop_file_cache(data)
        state.forget()
        session.forget_host()
        rates.append(nbytes / restore_seconds(session, keys, reach))
    report["disk"] = {
        "bytes": nbytes,
        "cold first token, ms": 1e3 * cold,
        "plain read GB/s": 1e-9 * median(plain),
        "restore GB/s": 1e-9 * median(rates),
        "% of the plain rate": 100 * median(rates) / median(plain),
        "predicted GB/s": 1e-9 * tiers.rates.of(Tier.DISK, Tier.DEVICE),
    }


def moved_bytes(session: TieredSession) -> int:
    return sum(tier.traffic.written + tier.traffic.read for tier in session.state.tiers.lower)


def measure_company(session: TieredSession, length: int, report: dict[str, Any]) -> None:
    """Decode of 16 sequences, alone and while a prefix is swapped out and in without a pause."""
    state, tiers = session.state, session.state.tiers
    prompt = session.prompt(length)
    first_token(session, prompt)
    reach = (length - 1) // state.layout.block_tokens * state.layout.block_tokens
    keys = session.keys(prompt, reach)
    tiers.swap_out(keys)
    session.settle()
    holding: list[Any] = []

    def churn(trace: Trace) -> None:
        """Swap the prefix out, then in, then out again."""
        if state.moves or tiers.waits:
            return
        if holding:
            tiers.release(holding.pop())
            session.forget_host()
            tiers.swap_out(keys)
        else:
            for key in keys:
                tiers.device_pool(key).withdraw(key)
            if (fetch := tiers.fetch(keys, reach, 0.0)) is not None:
                holding.append(fetch)

    def run(before: Callable[[Trace], None] | None) -> float:
        trace = session.run(session.prompts(16, 256), 256, before)
        tokens = sum(trace.all_started < now <= trace.first_ended for now, _, _ in trace.tokens)
        return tokens / (trace.first_ended - trace.all_started)

    run(None)
    quiet, busy, traffic = [], [], []
    for _ in range(4):
        quiet.append(run(None))
        before, begun = moved_bytes(session), perf_counter()
        busy.append(run(churn))
        traffic.append(1e-9 * (moved_bytes(session) - before) / (perf_counter() - begun))
    if holding:
        tiers.release(holding.pop())
    session.settle()
    report["company"] = {
        "decode alone, tok/s": median(quiet),
        "decode beside swapping, tok/s": median(busy),
        "slowdown, %": 100 * (1 - median(b / q for b, q in zip(busy, quiet, strict=True))),
        "swapped meanwhile, GB/s": median(traffic),
    }


def hits(session: TieredSession, conversations: int, rounds: int, growth: int) -> float:
    """Cached prompt tokens as a share of all. Each round sends every conversation's next turn, `TURNS_AT_ONCE` at a
    time."""
    known = session.prompts(conversations, growth)
    cached = total = 0
    entered: dict[Any, int] = {}
    note = lambda plan: [entered.setdefault(enter.request, enter.computed) for enter in plan.enter]  # noqa: E731
    session.engine.on_launch.append(note)
    for _ in range(rounds):
        for first in range(0, conversations, TURNS_AT_ONCE):
            own = known[first : first + TURNS_AT_ONCE]
            entered.clear()
            trace = session.run(own, ANSWER_TOKENS)
            cached += sum(entered.values())
            total += sum(map(len, own))
            for (_, number, _), token in zip(trace.tokens, trace.ids, strict=True):
                own[number].append(token)
            for prompt in own:
                prompt += session.prompt(growth - ANSWER_TOKENS)
    session.engine.on_launch.remove(note)
    return cached / total


def measure_turns(setup: Setup, device: str, conversations: int, rounds: int, growth: int) -> dict[str, float]:
    tokens = conversations * rounds * growth
    found = {}
    pool = 0
    for name in ("unbounded", "device alone", "with a host tier"):
        memory = {"memory": str(pool)} if pool else {}
        if name == "with a host tier":
            memory["kv_host"] = str(4 * pool)
        session = TieredSession(setup, device, **memory)
        if not pool:
            pool = tokens * session.state.layout.token_bytes // 4
        begun = perf_counter()
        found[f"hit rate, {name}, %"] = 100 * hits(session, conversations, rounds, growth)
        found[f"seconds, {name}"] = perf_counter() - begun
        if (mover := session.engine.runner.mover) is not None:
            mover.close()
        del session, mover
        gc.collect()
        torch.cuda.empty_cache()
    share = found["hit rate, with a host tier, %"] / found["hit rate, unbounded, %"]
    return {"context tokens": tokens, "pool, GB": 1e-9 * pool, **found, "of the unbounded cache's, %": 100 * share}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tiers", description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--host", default="4GiB", help="0 = none")
    parser.add_argument("--disk", default="4GiB", help="0 = none")
    parser.add_argument("--turns", type=int, default=0, metavar="N", help="only the turns of N conversations")
    parser.add_argument("--rounds", type=int, default=4, help="turns of a conversation")
    parser.add_argument("--growth", type=int, default=512, help="new tokens of a turn")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    setup = Setup(asked.shape, dtype=asked.dtype, rows=32, max_len=asked.tokens + 512)
    report: dict[str, Any] = {"shape": asked.shape, "tokens": asked.tokens}
    if asked.turns:
        report["turns"] = measure_turns(setup, asked.device, asked.turns, asked.rounds, asked.growth)
    else:
        measure_prefix(asked, setup, report)
    for part, found in report.items():
        if isinstance(found, dict):
            print(part)
            for name, value in found.items():
                print(f"  {name:32} {value:,.5g}")
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    return 0


def measure_prefix(asked: argparse.Namespace, setup: Setup, report: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiers = {}
        if asked.host != "0":
            tiers["kv_host"] = asked.host
        if asked.disk != "0":
            tiers["kv_disk"] = f"{asked.disk}:{folder}"
        session = TieredSession(setup, asked.device, **tiers)
        if asked.host != "0":
            if torch.cuda.is_available():
                report["plain copies, GB/s"] = {
                    name: 1e-9 * rate for name, rate in copy_rates(session.made.device.torch, 512 << 20).items()
                }
            measure_host(session, asked.tokens, asked.reps, report)
            measure_company(session, asked.tokens, report)
        if asked.disk != "0":
            measure_disk(session, asked.tokens, asked.reps, report)
        mover = session.engine.runner.mover
        assert mover is not None
        mover.close()


if __name__ == "__main__":
    raise SystemExit(main())
