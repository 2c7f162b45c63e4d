"""One load test from workload to report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from bankfull.bench.load.client import Advance, LoadClient, RequestOptions, ask_once
from bankfull.bench.load.energy import EnergyMeter
from bankfull.bench.load.measures import Measured
from bankfull.bench.load.request_limits import RequestLimits, request_limits
from bankfull.bench.load.server import ServerUnderTest
from bankfull.bench.load.utilization import NO_DRAFTS, parse_counters, utilization
from bankfull.bench.load.workloads import (
    Conversation,
    ConversationTurn,
    PromptGenerator,
    RecordedTrace,
    ShareGpt,
    Synthetic,
    Workload,
    prompt_generator,
)
from bankfull.bench.report.report import LoadReport, Price, Setting
from bankfull.errors import ConfigError
from bankfull.traffic.arrivals import Arrivals
from bankfull.traffic.slo import Slo

WARM_UP_TOKENS, ALONE = 8, 3


@dataclass(frozen=True, slots=True)
class LoadTest:
    """Definition of a load test; the same for every server compared."""

    workload: Workload
    arrivals: Arrivals
    requests: int
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    request_options: RequestOptions = field(default_factory=RequestOptions)
    prompts: str = "auto"
    warm_ups: int = 1

    def describe(self) -> str:
        w = self.workload
        if isinstance(w, Synthetic):
            shared = f", {w.prefixes} shared prefixes of {w.prefix_tokens}" if w.prefixes else ""
            turns = f", {w.turns} turns" if w.turns > 1 else ""
            return f"{self.requests} x {_lengths(w.input)} in{shared}, {_lengths(w.output)} out{turns}"
        if isinstance(w, ShareGpt):
            return f"{self.requests} conversations of {w.path.name}" + (f", {w.turns} turns" if w.turns > 1 else "")
        return f"the trace {w.path.name}" + (f", {w.speed:g} times as fast" if w.speed != 1 else "")

    @property
    def turns(self) -> int | None:
        """Total number of requests, if known before the workload is generated."""
        w = self.workload
        return self.requests * w.turns if isinstance(w, Synthetic) else None

    @property
    def timing(self) -> str:
        if isinstance(self.workload, RecordedTrace):
            return "arrivals as recorded"
        if self.arrivals.rate == float("inf"):
            return "all at once"
        burst = f", burstiness {self.arrivals.burstiness:g}" if self.arrivals.kind == "gamma" else ""
        return f"{self.arrivals.kind} arrivals, {self.arrivals.rate:.4g}/s{burst}"


def _lengths(found: object) -> str:
    spread, low, high = (getattr(found, name) for name in ("spread", "low", "high"))
    if spread:
        return f"{found.mean:g}~{spread:g}"  # type: ignore[attr-defined]
    return f"{low}" if low == high else f"{low}-{high}"


class LoadRunner:
    """Runs load tests against one server, and caches what does not depend on a run."""

    def __init__(self, server: ServerUnderTest, *, price: Price | None = None, files: Path | None = None) -> None:
        self.server, self._price, self._files = server, price, files
        self._prompts: dict[str, PromptGenerator] = {}
        self._limits: RequestLimits | None = None
        self._knows_limits = self._warm = False

    def run(
        self, load: LoadTest, conversations: Sequence[Conversation] | None = None, advance: Advance | None = None
    ) -> LoadReport:
        """`conversations`: those that another runner generated from the same load."""
        conversations = self.conversations(load) if conversations is None else conversations
        offsets = self._offsets(load, conversations)
        self._suit_batches(load, conversations)
        if not self._warm:
            self.warm_up(load, conversations[0], advance)
        local = self.server.address.local
        before = parse_counters(self.server.metrics()) if self.server.ours else None
        client = LoadClient(self.server, load.request_options)
        with EnergyMeter(None if local else ()) as meter:
            outcomes = client.run(conversations, offsets, advance)
        after = parse_counters(self.server.metrics()) if before is not None else None
        measured = Measured(outcomes, load.slo)
        if not self._knows_limits:
            ceiling = None if after is None else after.ceiling
            self._limits, self._knows_limits = request_limits(self.server, ceiling, self._files), True
        tokens = NO_DRAFTS if before is None or after is None else after.tokens - before.tokens
        least = {} if self._limits is None else self._limits.mean(measured.good, tokens)
        return LoadReport(
            self._setting(load, len(conversations)),
            measured,
            utilization(before, after, measured.duration),
            least,
            meter.energy,
            self._price,
            client.stalls,
        )

    def _suit_batches(self, load: LoadTest, conversations: Sequence[Conversation]) -> None:
        """A server with static batches never starts the requests of an incomplete one."""
        size, most = self.server.static_batch, load.request_options.max_concurrency
        turns = sum(len(conversation.turns) for conversation in conversations)
        if left := turns % size:
            raise ConfigError(
                f"The server starts static batches of {size} requests, so that the last {left} of {turns} would wait "
                f"forever; give --requests as a multiple of {size}, or serve with --batching dynamic."
            )
        if most is not None and most < size:
            raise ConfigError(
                f"The server starts static batches of {size} requests, and --max-concurrency {most} never sends so "
                "many; raise it, or serve with --batching dynamic."
            )

    def warm_up(self, load: LoadTest, like: Conversation, advance: Advance | None = None) -> None:
        """A short completion of a prompt that no run uses, so that the prefix cache stays cold for the run."""
        prompts, first = self._prompts_for(load), like.turns[0]
        prompt = prompts.take(random.Random("warm up"), 16 if first.tokens is None else min(first.tokens, 256))
        turn = ConversationTurn(prompt, min(first.max_tokens, WARM_UP_TOKENS))
        for _ in range(max(1, load.warm_ups)):
            ask_once(self.server, load.request_options, Conversation((turn,)), advance, self.server.static_batch)
        self._warm = True

    def alone(self, load: LoadTest) -> Measured:
        """A few sequential requests: the lowest latency at any rate."""
        if (size := self.server.static_batch) > 1:
            raise ConfigError(
                f"The server starts static batches of {size} requests, and a sweep begins with single ones, which "
                "would wait forever; serve with --batching continuous or dynamic."
            )
        few = self.conversations(replace(load, requests=ALONE, seed=load.seed - 1))
        if not self._warm:
            self.warm_up(load, few[0])
        return Measured([ask_once(self.server, load.request_options, one) for one in few], load.slo)

    def conversations(self, load: LoadTest) -> list[Conversation]:
        return load.workload.make(load.requests, load.seed, self._prompts_for(load))

    def _prompts_for(self, load: LoadTest) -> PromptGenerator:
        """Chats and conversations of several turns need text; recorded conversations only need token counts."""
        turns = getattr(load.workload, "turns", 1)
        as_text = load.request_options.api == "chat" or turns > 1 or isinstance(load.workload, ShareGpt)
        how = "text" if as_text and load.prompts == "auto" else load.prompts
        if how not in self._prompts:
            self._prompts[how] = prompt_generator(self.server, how)
        return self._prompts[how]

    def _offsets(self, load: LoadTest, conversations: Sequence[Conversation]) -> list[float]:
        recorded = [conversation.at for conversation in conversations if conversation.at is not None]
        if len(recorded) == len(conversations):
            return recorded
        return load.arrivals.offsets(len(conversations), load.seed)

    def _setting(self, load: LoadTest, requests: int) -> Setting:
        server = self.server
        recorded = isinstance(load.workload, RecordedTrace)
        return Setting(
            server.address.url,
            server.model,
            load.request_options.api,
            load.describe(),
            load.timing,
            float("inf") if recorded else load.arrivals.rate,
            load.arrivals.burstiness,
            requests,
            load.seed,
            load.request_options.max_concurrency,
            datetime.now().strftime("%Y%m%d-%H%M%S"),
            "openai-chat" if load.request_options.api == "chat" else "openai",
        )
