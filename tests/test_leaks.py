"""A server runs for months: whoever comes and goes leaves no memory behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from random import Random

import pytest

from bankfull import LLM, SamplingParams
from bankfull.frontend import Frontend
from tests.tiny import speaking_folder

STATM = Path("/proc/self/statm")
WARM, STEPS = 20_000, 100_000
"""Steps after which caches, arenas and allocators have their size; steps in all."""
MOST_BYTES = 2 << 20
"""Twenty-six bytes a step. Allocators breathe by less than that."""

PROMPTS = ["The river runs", "The river runs at the full capacity", "of its channel, and", '{"name": [1,', "true, 2.5"]


def resident() -> int:
    gc.collect()
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Visitors:
    """Short requests of many kinds, some of them given up; four are always there."""

    def __init__(self, front: Frontend) -> None:
        self.front = front
        self.random = Random(1)
        self.served = self.reused = 0

    def submit(self) -> None:
        draw = self.random
        # Most prompts come again and are found in the cache; some are new and push others out.
        prompt: str | list[int] = draw.choice(PROMPTS) * draw.randint(1, 3)
        if draw.random() < 0.3:
            prompt = [draw.randrange(3, 250) for _ in range(draw.randint(1, 40))]
        samples = draw.choice((1,) * 9 + (2,))
        self.front.submit(
            prompt,
            SamplingParams(
                n=samples,
                temperature=0.8 if samples > 1 else 0.0,
                max_tokens=draw.randint(1, 12),
                stop=["e"] if draw.random() < 0.1 else [],
                logprobs=2 if draw.random() < 0.05 else None,
            ),
        )

    def step(self) -> None:
        while len(self.front.pending) < 4:
            self.submit()
        self.front.step()
        if self.random.random() < 0.01:
            self.front.abort(self.random.choice(list(self.front.pending)))
        for request in [r for r, pending in self.front.pending.items() if pending.result.finished]:
            self.served += 1
            self.reused += self.front.take(request).metrics.cached_tokens

    def run_to(self, steps: int) -> None:
        while self.front.engine.totals.steps < steps:
            self.step()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not STATM.exists(), reason="this system does not tell a process its size in /proc")
def test_a_hundred_thousand_steps_leave_no_memory_behind() -> None:
    llm = LLM(str(speaking_folder()), device="cpu", quantize="int8", rows=8, memory="4MiB", page_tokens=8)
    visitors = Visitors(llm.loaded.frontend)
    visitors.run_to(WARM)
    warm = resident()
    visitors.run_to(STEPS)
    grown = resident() - warm
    assert visitors.served > 10_000 and visitors.reused > 10_000
    assert grown < MOST_BYTES, f"{grown / (STEPS - WARM):.0f} bytes a step are left behind"
