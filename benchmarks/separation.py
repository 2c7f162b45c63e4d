"""Prefill and decode apart against chunked prefill on equal hardware: python -m benchmarks.separation --help

Three arrangements share the cores of this machine evenly among their engine processes: one engine, as many replicas as
the separate pools have engines, and the separate pools. In each, some streams run all the time. First they are alone,
then long prompts arrive: the time between two of their tokens should stay the same. After that, requests of both kinds
arrive at given rates, whatever the server answers; goodput counts those that meet the objectives. Each arrangement is
measured for itself, and requests go to the engines without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from bankfull.cluster.local_replicas import local_replicas
from bankfull.errors import BankfullError, ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.handshake.link_tls import LinkTls
from bankfull.outputs import Delta
from bankfull.sample.params import SamplingParams
from bankfull.serve.engine.backend import Busy
from bankfull.serve.engine.link import Link
from bankfull.serve.replicas.local import Separation, local_separate
from bankfull.serve.replicas.replica_set import ReplicaSet
from bankfull.serve.replicas.separate_set import SeparateSet
from bankfull.submit import Submit
from bankfull.traffic.slo import Slo, parse_slo

READY_SECONDS = 600.0
PHASE_SECONDS = 900.0
"""No phase lasts longer."""
GOAL = 1.2
"""Goal for the ratio of the 99th percentiles, with long prompts and without."""


@dataclass(frozen=True)
class Work:
    streams: int
    prompt_tokens: int
    prompts: int
    every: float
    """Seconds between two long prompts."""
    short_tokens: int
    answer_tokens: int
    stream_tokens: int
    """Of each answer of a stream. The first gap of an answer contains the hand-over: long answers keep it below the
    99th percentile, which is to show the steps."""
    quiet: float
    """Seconds in which the streams are alone."""
    rates: tuple[float, ...]
    requests: int
    """At each rate; every fourth has a long prompt."""
    slo: Slo


@dataclass
class Answer:
    """The times of one request, in seconds."""

    begun: float
    stamps: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.stamps, self.stamps[1:], strict=False)]

    def meets(self, slo: Slo) -> bool:
        if self.refused or not self.stamps:
            return False
        gaps = self.gaps
        tpot = sum(gaps) / len(gaps) if gaps else None
        itl = max(gaps) if gaps else None
        end = self.stamps[-1] - self.begun
        return slo.met({"ttft": self.stamps[0] - self.begun, "tpot": tpot, "itl": itl, "e2e": end})


@dataclass
class Measured:
    arrangement: str
    quiet_itl: float = 0.0
    """99th percentile of the time between two tokens of the streams, in seconds."""
    busy_itl: float = 0.0
    ttft: float = 0.0
    """Median time to first token of the long prompts."""
    goodput: dict[float, float] = field(default_factory=dict)
    """Requests per second that met the objectives, by the rate of arrival."""
    shipped: int = 0
    late: int = 0

    @property
    def ratio(self) -> float:
        return self.busy_itl / self.quiet_itl if self.quiet_itl else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Client:
    def __init__(self, engines: ReplicaSet, vocab: int) -> None:
        self._engines, self._vocab = engines, vocab
        self._random = Random(1)

    def prompt(self, tokens: int) -> list[int]:
        """Another one each time: no prefix is cached."""
        return [self._random.randrange(3, self._vocab) for _ in range(tokens)]

    async def ask(self, tokens: int, answer: int) -> Answer:
        made = Answer(time.perf_counter())
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        try:
            async for items in self._engines.generate(Submit(self.prompt(tokens), params)):
                if any(isinstance(item, Delta) and item.token_ids for item in items):
                    made.stamps.append(time.perf_counter())
        except Busy:
            made.refused = True
        return made

    async def run_stream(self, work: Work, gaps: list[tuple[float, float]]) -> None:
        """One answer after the other, until it is cancelled; `gaps` gets the end and the length of each."""
        params = SamplingParams(temperature=0.0, max_tokens=work.stream_tokens, ignore_eos=True, detokenize=False)
        while True:
            last = None
            async for items in self._engines.generate(Submit(self.prompt(work.short_tokens), params)):
                if any(isinstance(item, Delta) and item.token_ids for item in items):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append((now, now - last))
                    last = now


async def measure(name: str, engines: ReplicaSet, work: Work, vocab: int) -> Measured:
    client, made = Client(engines, vocab), Measured(name)
    await client.ask(work.short_tokens, 4)
    gaps: list[tuple[float, float]] = []
    streams = [asyncio.ensure_future(client.run_stream(work, gaps)) for _ in range(work.streams)]
    try:
        await asyncio.sleep(0.2 * work.quiet)  # they begin
        begun = time.perf_counter()
        await asyncio.sleep(work.quiet)
        made.quiet_itl = percentile([gap for at, gap in gaps if at - gap >= begun], 0.99)
        begun = time.perf_counter()
        answers = await at_pace(lambda i: client.ask(work.prompt_tokens, 4), work.prompts, work.every)
        ended = time.perf_counter()
        made.busy_itl = percentile([gap for at, gap in gaps if begun <= at <= ended], 0.99)
        made.ttft = percentile([one.stamps[0] - one.begun for one in answers if one.stamps], 0.5)
        for task in streams:
            if task.done():
                task.result()  # raises what has ended it
    finally:
        for task in streams:
            task.cancel()
        await asyncio.wait(streams)
    for rate in work.rates:
        begun = time.perf_counter()
        answers = await at_pace(
            lambda i: client.ask(work.short_tokens if i % 4 else work.prompt_tokens, work.answer_tokens),
            work.requests,
            1 / rate,
        )
        # The last request has its share of the time, too: goodput is never above the rate.
        lasted = max(work.requests / rate, time.perf_counter() - begun)
        made.goodput[rate] = sum(one.meets(work.slo) for one in answers) / lasted
    if isinstance(engines, SeparateSet):
        made.shipped, made.late = engines.counts.nbytes, engines.counts.late
    return made


async def at_pace(ask: Callable[[int], Any], count: int, every: float) -> list[Answer]:
    """Begin a request at fixed times, whatever became of those before."""
    tasks, begun = [], time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, begun + number * every - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(number)))
    return list(await asyncio.wait_for(asyncio.gather(*tasks), PHASE_SECONDS))


@asynccontextmanager
async def running(engines: ReplicaSet) -> AsyncIterator[ReplicaSet]:
    await engines.start()
    try:
        await asyncio.wait_for(engines.wait_all_ready(), READY_SECONDS)
        yield engines
    finally:
        await engines.drain(0.0)
        await engines.close()


def shown(found: Sequence[Measured], work: Work) -> str:
    rates = "".join(f" goodput at {rate:g}/s |" for rate in work.rates)
    times = "ITL p99 quiet, ms | with prompts, ms | ratio | TTFT of prompts, s"
    lines = [
        f"| arrangement | {times} |{rates} handed over, MB | late |",
        "|---|---|---|---|---|" + "---|" * len(work.rates) + "---|---|",
    ]
    for one in found:
        goodput = "".join(f" {one.goodput[rate]:.2f} |" for rate in work.rates)
        lines.append(
            f"| {one.arrangement} | {1e3 * one.quiet_itl:.1f} | {1e3 * one.busy_itl:.1f} | {one.ratio:.2f} | "
            f"{one.ttft:.2f} |{goodput} {one.shipped / 1e6:.1f} | {one.late} |"
        )
    return "\n".join(lines)


def machine_line() -> str:
    from bankfull.limits.machine.cpu_ceilings import machine

    found = machine()
    return f"{found['cpu']}, {found['cores']} cores for this process"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.separation", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--separate", default="prefill=1,decode=1", help="the pools, as for bankfull serve")
    parser.add_argument("--link-tls", type=Path, help="folder for TLS between engines, with link=socket")
    parser.add_argument("--options", default="{}", help='engine options as JSON, such as {"memory": "1GiB"}')
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two long prompts")
    parser.add_argument("--short-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=128)
    parser.add_argument("--stream-tokens", type=int, default=1024, help="tokens of each answer of a stream")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds in which the streams are alone")
    parser.add_argument("--rates", default="0.25,0.5,1", help="requests per second, for goodput")
    parser.add_argument("--requests", type=int, default=24, help="requests at each rate")
    parser.add_argument("--slo", default="ttft=10s, itl=250ms")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    try:
        work = Work(
            given.streams,
            given.prompt_tokens,
            given.prompts,
            given.every,
            given.short_tokens,
            given.answer_tokens,
            given.stream_tokens,
            given.quiet,
            tuple(float(rate) for rate in given.rates.split(",")),
            given.requests,
            parse_slo(given.slo),
        )
        options, pools = json.loads(given.options), Separation.parse(given.separate)
        if given.link_tls is not None:
            if pools.link != "socket":
                raise ConfigError("--link-tls needs link=socket in --separate.")
            LinkTls(given.link_tls).answering()
        found = asyncio.run(compare(given.model, options, pools, work, str(given.link_tls or "")))
    except (BankfullError, ValueError) as error:
        print(f"separation: {error}", file=sys.stderr)
        return 2
    print(f"{machine_line()}; {given.model}; {work.streams} streams, prompts of {work.prompt_tokens} tokens")
    print(f"goodput: requests per second that meet {work.slo}; goal for the ratio: {GOAL}\n")
    print(shown(found, work))
    if given.json is not None:
        given.json.write_text(json.dumps([{**asdict(one), "ratio": one.ratio} for one in found], indent=1))
    return 0


async def compare(model: str, options: dict[str, Any], pools: Separation, work: Work, tls: str = "") -> list[Measured]:
    engines, over = pools.prefill + pools.decode, ", over sockets" if pools.link == "socket" else ""
    over += " with TLS" if tls else ""
    arrangements = {
        "one engine": local_replicas(ReplicaRange(1, 1)),
        f"{engines} replicas": local_replicas(ReplicaRange(engines, engines)),
        f"separate, {pools.prefill} + {pools.decode}{over}": local_separate(pools, tls=tls),
    }
    found = []
    for name, factory in arrangements.items():
        async with running(factory(partial(Link, model=model, options=options, tells_prefixes=True))) as made:
            assert made.facts is not None, "it is ready"
            found.append(await measure(name, made, work, made.facts.vocab))
    return found


if __name__ == "__main__":
    sys.exit(main())
