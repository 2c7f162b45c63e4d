"""Offline benchmark of denoising: speed, and what the speed costs, in one line.

Each way of denoising generates from the same prompts. Beside tokens per second stand the tokens per forward pass of a
sequence, the share of tokens equal to those of one token per step without a cache, and the KL divergence of the
predictions from those of a pass over the whole sequence without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bankfull.config import DiffusionChoice
from bankfull.decode.diffusion import Denoising
from bankfull.errors import ConfigError
from bankfull.llm import LLM
from bankfull.runtime import naive
from bankfull.sample.params import SamplingParams
from bankfull.sched.canvas import Canvas

KL_PROMPTS = 2
"""Prompts whose predictions are compared with those without a cache."""
KL_PREDICTIONS = 256
"""Predictions that are compared, at most: each costs a pass over the whole sequence for its row and step."""


@dataclass(frozen=True, slots=True)
class DenoisedRun:
    """One repetition of one way."""

    tokens: list[list[int]]
    seconds: float
    passes: int
    """Steps of single sequences that predicted tokens."""

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


@dataclass(frozen=True, slots=True)
class DenoisingReport:
    way: str
    runs: list[DenoisedRun]
    equal: float
    """Share of tokens equal to those of one token per step without a cache."""
    divergence: float
    """Mean KL divergence of the predictions from those without a cache, in nats."""
    lossy: bool

    @property
    def rate(self) -> float:
        """Tokens per second, the median over the repetitions."""
        return median(run.count / run.seconds for run in self.runs)

    @property
    def tokens_per_pass(self) -> float:
        return self.runs[-1].count / max(1, self.runs[-1].passes)

    def as_json(self) -> dict[str, Any]:
        return {
            "diffusion": self.way,
            "tokens_per_s": self.rate,
            "tokens_per_forward": self.tokens_per_pass,
            "equal_share": self.equal,
            "kl": self.divergence,
            "lossy": self.lossy,
        }


class DiffusionBench:
    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], output_len: int, reps: int = 3) -> None:
        strategy = llm.loaded.engine.strategy
        if not isinstance(strategy, Denoising):
            raise ConfigError("This model predicts the next token: `bench diffusion` needs a diffusion model.")
        self._llm, self._strategy = llm, strategy
        self._prompts, self._reps = [list(prompt) for prompt in prompts], reps
        self._params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        self._plain: dict[str, DenoisedRun] = {}

    def run(self, way: str, advance: Callable[[], None] = lambda: None) -> DenoisingReport:
        choice = DiffusionChoice.parse(way)
        base = ",".join(["threshold=1", *(part for part in way.split(",") if part.startswith(("block=", "length=")))])
        if base not in self._plain:
            with self.denoising_by(base):
                self._plain[base] = self._generate()
        runs = []
        with self.denoising_by(way):
            self._generate()  # a warm-up
            for _ in range(self._reps):
                runs.append(self._generate())
                advance()
            divergence = self._divergence()
        pairs = list(zip(runs[-1].tokens, self._plain[base].tokens, strict=True))
        same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=True))
        return DenoisingReport(way, runs, same / max(1, runs[-1].count), divergence, choice.cache == "block")

    @contextmanager
    def denoising_by(self, way: str) -> Iterator[None]:
        """Denoise by these options; the engine has no requests meanwhile."""
        strategy, before = self._strategy, self._strategy.choice
        try:
            self._use(DiffusionChoice.parse(way))
            yield
        finally:
            strategy.watch = None
            self._use(before)

    def _use(self, choice: DiffusionChoice) -> None:
        loaded, strategy = self._llm.loaded, self._strategy
        strategy.choice = choice
        strategy.prepare(loaded.model)
        assert strategy.canvas is not None
        loaded.engine.scheduler.canvas = Canvas(strategy.canvas, loaded.sizes.max_len)

    def _generate(self, prompts: Sequence[list[int]] | None = None) -> DenoisedRun:
        passes = 0

        def count(plan: Any) -> None:
            nonlocal passes
            passes += sum(work.sample for work in plan.work)

        engine = self._llm.loaded.engine
        engine.scheduler.state.forget()  # prompts are computed in each repetition
        engine.on_launch.append(count)
        begun = time.perf_counter()
        try:
            done = self._llm.generate(list(self._prompts if prompts is None else prompts), self._params)
        finally:
            engine.on_launch.remove(count)
        return DenoisedRun([one.outputs[0].token_ids for one in done], time.perf_counter() - begun, passes)

    def _divergence(self) -> float:
        loaded, divergences = self._llm.loaded, list[float]()
        rows, canvas = loaded.engine.runner.rows, loaded.engine.scheduler.canvas
        assert canvas is not None
        shifted, mask = canvas.shape.shifted, self._strategy.mask

        def compare(host_rows: Sequence[int], places: Tensor, logits: Tensor) -> None:
            for row in dict.fromkeys(host_rows):
                if len(divergences) >= KL_PREDICTIONS:
                    return
                lines = [i for i, one in enumerate(host_rows) if one == row]
                at = places[lines]
                open_ = rows.tokens[row, at] == mask
                prompt_len = int(rows.prompt_len[row])
                end = canvas.canvas_end(int(rows.known[row]), prompt_len, prompt_len + self._params.max_tokens)  # type: ignore[operator]
                text = rows.tokens[row, :end].tolist()
                exact = naive.logits(loaded.model, text, loaded.device.torch)[at - int(shifted)].to(logits.dtype)
                exact[:, mask] = -torch.inf
                divergences.extend(kl_divergence(exact, logits[lines])[open_].tolist())

        self._strategy.watch = compare
        self._generate(self._prompts[:KL_PROMPTS])
        self._strategy.watch = None
        return sum(divergences) / max(1, len(divergences))


def kl_divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL of each line's softmax from the exact one, in nats."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    parts = p.exp() * (p - q)
    return torch.where(p.isfinite(), parts, 0.0).sum(-1).clamp_min(0.0)
