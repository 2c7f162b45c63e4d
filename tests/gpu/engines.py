"""Engines of tiny models on the device that is tested, and requests for them."""

from __future__ import annotations

import random

import numpy as np
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.sample.params import SamplingParams
from tests.gpu.place import the_device
from tests.kit import Bench
from tests.tiny import VOCAB, kit_of, model_of

LOGPROBS = SamplingParams(temperature=0.0, logprobs=5)


def logprobs_of(bench: Bench, request: object) -> list[tuple[float, ...]]:
    """Of every token of a request that asked for them: what shows differences that tokens hide."""
    return [
        (line.logprob, *line.top_logprobs) for extra in bench.extras.get((request, 0), ()) for line in extra.logprobs
    ]


def bench_of(
    shape: str,
    dtype: torch.dtype = torch.float32,
    *,
    rows: int = 4,
    step_tokens: int = 64,
    frames: int = 400,
    max_len: int = 128,
    strategy: Strategy | None = None,
    page: int = 16,
    prefix_cache: bool = True,
) -> Bench:
    device = the_device()
    return Bench(
        model_of(shape, dtype, "auto"),
        device,
        device.depth,
        SchedConfig(rows=rows, step_tokens=step_tokens),
        StateConfig(page_tokens=page, prefix_cache=prefix_cache),
        strategy or Plain(),
        frames=frames,
        max_len=max_len,
        kit=kit_of(shape, dtype, "auto"),
    )


def random_prompts(count: int, length: int | None = None, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length or draw.randint(1, 40))] for _ in range(count)]


class Echo(Strategy):
    """Proposes that the last token comes again, and again: a guess that is made without leaving the device."""

    exact = True

    def __init__(self, width: int = 3) -> None:
        self._width = width

    def width(self, load: int) -> int:
        return self._width

    def propose(self, view: View) -> Draft | None:
        last = view.tokens[view.rows, view.known[view.rows] - 1]
        return Draft(last[:, None].expand(-1, self._width).contiguous())

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)


class EchoTree(Echo):
    """The last token again in three branches, of which the longest has the smallest and the largest indices."""

    trees = True
    parents = np.array([-1, -1, 1, 0, -1, 3, 5])

    def __init__(self) -> None:
        super().__init__(len(self.parents))

    def propose(self, view: View) -> Draft | None:
        last = view.tokens[view.rows, view.known[view.rows] - 1]
        other = torch.tensor([0, 1, 0, 0, 2, 0, 0], device=last.device)
        return Draft((last[:, None] + other) % VOCAB, self.parents)
