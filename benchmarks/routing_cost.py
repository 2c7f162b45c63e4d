"""Microseconds that a front needs to choose a replica: python -m benchmarks.routing_cost

Each request looks up a prompt of 1,024 tokens, chooses with the `prefix` policy and notes the choice; between two
requests a few replicas report. "every replica" asks each replica's digest and makes one `Candidate` for each; "columns"
uses `PrefixIndex` and `ReplicaTable`, as the server does. Both choose the same replicas.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Sequence
from random import Random

from bankfull.fleet.meter import ReplicaMeter
from bankfull.fleet.prefixes import HeldPrefixes, PrefixIndex, PromptKeys
from bankfull.fleet.reports import Facts, Load, PrefixChanges
from bankfull.fleet.routing import routing_policy
from bankfull.fleet.table import ReplicaTable

PAGE_TOKENS, PROMPT, SHARED = 16, 1024, 512
SESSIONS = 200
REPORTS = 4
"""Replicas that report between two requests."""
FACTS = Facts("", 1 << 20, 50_000, 16, 8192, PAGE_TOKENS, 512, "", "")


class CostedFront:
    """Replicas with digests and loads, of which `measured` have timed their steps."""

    def __init__(self, replicas: int, measured: float, seed: int = 0) -> None:
        random = self._random = Random(seed)
        shared = [random.randrange(50_000) for _ in range(SHARED)]
        self.prompts = [[*shared, *random.choices(range(50_000), k=PROMPT - SHARED)] for _ in range(SESSIONS)]
        self.table, self.index, self.policy = ReplicaTable(), PrefixIndex(), routing_policy()
        self.meters = [ReplicaMeter() for _ in range(replicas)]
        self.slots = [self.table.add(meter) for meter in self.meters]
        self.held: list[HeldPrefixes] = []
        self._measured = [random.random() < measured for _ in range(replicas)]
        self._number = 0
        for slot, meter in zip(self.slots, self.meters, strict=True):
            meter.started(FACTS)
            self.held.append(self.index.enter(slot, FACTS))
            self._report(slot)
        for number, prompt in enumerate(self.prompts):
            keys = array("Q", PromptKeys(prompt, "", PAGE_TOKENS).upto(PROMPT)).tobytes()
            self.held[number % replicas].apply(PrefixChanges(keys, b"", False))

    def _report(self, slot: int) -> None:
        load = Load(self._random.randrange(8), 0, 0, 100, 8192, 0, 0, 0, 1, 0.0, 0.0, 0.0)
        if self._measured[slot]:
            load.prefill_ms_per_token, load.step_ms = 0.1 + self._random.random() / 50, 20.0
        self.meters[slot].report(load)

    def request(self, columns: bool) -> tuple[int, float]:
        """The chosen replica, and the seconds of the choice."""
        for slot in self._random.sample(self.slots, min(REPORTS, len(self.slots))):
            self._report(slot)
        prompt = self._random.choice(self.prompts)
        begun = time.perf_counter()
        keys = PromptKeys(prompt, "", PAGE_TOKENS)
        if columns:
            found = self.index.cached_tokens(keys)
            chosen = self.policy.choose(PROMPT, False, self.table.view(self.slots, found))
            held = found.at(chosen)
        else:
            each = [one.cached_tokens(keys) for one in self.held]
            candidates = [meter.candidate(tokens) for meter, tokens in zip(self.meters, each, strict=True)]
            chosen = self.policy.choose(PROMPT, False, candidates)
            held = each[chosen]
        self.meters[chosen].sent(self._number, PROMPT, held)
        seconds = time.perf_counter() - begun
        self._number += 1
        if self._number > 4 * len(self.slots):
            for meter in self.meters:
                meter.ended(self._number - 4 * len(self.slots) - 1)
        return chosen, seconds


def cost(replicas: int, columns: bool, measured: float, requests: int = 300) -> float:
    """Median seconds of a choice."""
    front = CostedFront(replicas, measured)
    return sorted(front.request(columns)[1] for _ in range(requests))[requests // 2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_cost", description="Cost of a routed request.")
    parser.add_argument("--replicas", type=int, action="append", help="may be repeated (default: 4, 64 and 1000)")
    parser.add_argument("--requests", type=int, default=300)
    asked = parser.parse_args(arguments)
    print(f"{'replicas':>8} {'measured':>9} {'every replica':>15} {'columns':>12}")
    for replicas in asked.replicas or (4, 64, 1000):
        for measured in (1.0, 0.9):
            slow, fast = (1e6 * cost(replicas, columns, measured, asked.requests) for columns in (False, True))
            print(f"{replicas:8} {measured:9.0%} {slow:12.0f} us {fast:9.0f} us")


if __name__ == "__main__":
    main()
