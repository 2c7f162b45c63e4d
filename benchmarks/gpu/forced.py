"""Gain of verifying trees of drafts whose acceptance is forced: python -m benchmarks.gpu.forced --help

The model has random weights of a real shape, but each token's best next token is known: the embeddings dominate the
hidden states, and the head's row of the next token is the embedding of the token. A strategy that knows this proposes
trees in which a path of drawn length is right and everything else is wrong. So acceptance is as wanted, and every
kernel of verification runs.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from bankfull.decode.candidate_tree import CandidateTree, best_tree
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Sampling, Scores, Strategy, Verdict, View
from bankfull.decode.verify import verify
from bankfull.layers.decoder import Decoder
from bankfull.ops.attention.body import TREE_TOKENS
from bankfull.synthetic.random_weights import RandomWeights
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.qtensor import QTensor
from benchmarks.gpu.engine import Session, Setup
from benchmarks.gpu.timeline import trace_decode

ACCEPTANCE = (0.8, 0.7, 0.6, 0.5)
"""Probability that the draft of each depth is right if those before it are."""
RANKS = tuple(tuple(chance * share for share in (0.85, 0.08, 0.04, 0.03)) for chance in ACCEPTANCE)
"""Frequencies from which the tree's shape is chosen."""
EMBEDDED = 100.0
"""Standard deviation of the embeddings: far above the sum of all layers' outputs, which is about 10."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TAIL = 2 * TREE_TOKENS
"""Tokens before the limit of an answer within which steps verify fewer drafts."""
TRACED = 8
"""Steps of a timeline."""
DRAWS = 4096
"""Right paths that are drawn once and used in turn."""


def next_tokens(vocab: int, tied: bool) -> Tensor:
    """(vocab) the best token after each token. A head tied to the embeddings repeats the token."""
    if tied:
        return torch.arange(vocab)
    return torch.randperm(vocab, generator=torch.Generator().manual_seed(0))


class KnownWeights(RandomWeights):
    """Random weights of a model whose best next tokens are `next_tokens`."""

    def get(self, name: str) -> QTensor:
        if name not in (EMBEDDING, HEAD):
            return super().get(name)
        self._read.add(name)
        rows = super().get(EMBEDDING).dequantize(self._dtype)
        if name == EMBEDDING:
            return QTensor.dense(rows * (EMBEDDED * rows.shape[1] ** 0.5))
        after = next_tokens(len(rows), False).to(rows.device)
        return QTensor.dense(torch.empty_like(rows).index_copy_(0, after, rows))


class KnownAnswer(Strategy):
    """Proposes a static tree in which one path, drawn with ACCEPTANCE, has the right tokens."""

    exact = True
    trees = True

    def __init__(self, tied: bool, drafts: int) -> None:
        self.tree: CandidateTree = best_tree(RANKS, drafts)
        self._tied = tied
        self._steps = 0

    def prepare(self, target: Decoder) -> None:
        device = target.head.build.device
        after = next_tokens(target.vocab, self._tied)
        chain = [after]
        for _ in ACCEPTANCE[1:]:
            chain.append(after[chain[-1]])
        self._vocab = target.vocab
        self._right = torch.stack(chain, 1)[:, torch.from_numpy(self.tree.heads)].to(device)
        """(vocab, drafts) the right token of each node after each newest token."""
        self._off = torch.from_numpy(self._wrong()).to(device)
        """(draws, drafts) what is added to the right tokens: 0 on the right path."""

    def _wrong(self) -> np.ndarray:
        random, tree = np.random.default_rng(0), self.tree
        off = np.tile(np.arange(1, len(tree) + 1), (DRAWS, 1))
        reached = np.cumprod((1.0, *ACCEPTANCE))
        for draw in range(DRAWS):
            # Multiples of the golden ratio are spread evenly: a few steps already have the wanted mean.
            depth = int((reached > (0.5 + draw * 0.6180339887498949) % 1).sum()) - 1
            node = random.choice(np.flatnonzero(tree.heads == depth - 1)) if depth else -1
            while node >= 0:
                off[draw, node], node = 0, tree.parents[node]
        return off

    @cached_property
    def expected(self) -> float:
        """Tokens per step."""
        return float(1 + np.cumprod(ACCEPTANCE).sum())

    def width(self, load: int) -> int:
        return len(self.tree)

    def propose(self, view: View) -> Draft | None:
        newest = view.tokens[view.rows, view.known[view.rows] - 1]
        first = self._steps % (DRAWS - 256)
        self._steps += len(view.host_rows)
        tokens = self._right[newest] + self._off[first : first + len(view.host_rows)]
        return Draft(tokens % self._vocab, self.tree.parents)

    def verify(self, scores: Scores, sampling: Sampling) -> Verdict:
        return verify(scores, sampling)


@dataclass(frozen=True, slots=True)
class Rate:
    """Medians over the repetitions, while all sequences decode."""

    tokens_per_s: float
    step_ms: float
    tokens_per_step: float
    """Tokens of one sequence per step."""


def measure(session: Session, batch: int, prompt: int, outputs: int, reps: int) -> Rate:
    """The last tokens of an answer are left out: steps near its limit verify fewer drafts."""
    found: list[tuple[float, float, float]] = []
    for rep in range(reps + 1):
        trace = session.run(session.prompts(batch, prompt), outputs + TAIL)
        counts, begin, end = Counter[int](), trace.all_started, trace.seconds
        for now, request, _ in trace.tokens:
            counts[request] += 1
            if counts[request] == outputs:
                end = min(end, now)
        tokens = sum(begin < now <= end for now, _, _ in trace.tokens)
        steps = len({now for now, _, _ in trace.tokens if begin < now <= end})
        if rep:  # the first is a warm-up
            found.append((tokens / (end - begin), 1e3 * (end - begin) / steps, tokens / steps / batch))
    return Rate(*(median(column) for column in zip(*found, strict=True)))


def check(session: Session, outputs: int = 16) -> None:
    """The model's answer is the known one."""
    tied = bool(shape_config(session.setup.shape)["tie_word_embeddings"])
    after = next_tokens(session.made.model.vocab, tied)
    prompt = session.prompt(8)
    expected, newest = [], prompt[-1]
    for _ in range(outputs):
        newest = int(after[newest])
        expected.append(newest)
    answer = session.run([prompt], outputs).ids
    if answer != expected:
        raise SystemExit(f"benchmarks.gpu.forced: the model answers {answer}, not {expected}.")


def main(arguments: Sequence[str] | None = None) -> int:
    about = "Tokens per second with drafts of forced acceptance, beside plain decoding, with random weights."
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.forced", description=about)
    parser.add_argument("--shape", default="llama-3-8b", help="shape of the model, as for bankfull make-model")
    parser.add_argument("--batch", default="1,8", help="sequences that decode together, comma-separated")
    parser.add_argument("--drafts", default="31", help="draft tokens of the tree, comma-separated")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=384, help="tokens of an answer")
    parser.add_argument("--reps", type=int, default=3, help="repetitions, after a warm-up")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the weights")
    parser.add_argument("--timeline", action="store_true", help="show what runs in a step, kernel by kernel")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args(arguments)
    batches = [int(number) for number in asked.batch.split(",")]
    setup = Setup(
        asked.shape,
        dtype=asked.dtype,
        rows=max(batches),
        step_tokens=2048,
        max_len=asked.prompt + asked.outputs + TAIL + 8,
    )
    tied = bool(shape_config(asked.shape)["tie_word_embeddings"])
    strategies: list[Strategy] = [Plain(), *(KnownAnswer(tied, int(number)) for number in asked.drafts.split(","))]
    plain: dict[int, Rate] = {}
    report: list[dict[str, object]] = []
    for strategy in strategies:
        session = Session(setup, asked.device, strategy=strategy, weights=KnownWeights)
        print(f"start: {session.phases}", flush=True)
        check(session)
        for batch in batches:
            rate = measure(session, batch, asked.prompt, asked.outputs, asked.reps)
            before = plain.setdefault(batch, rate)
            drafts = strategy.width(0)
            gain, cost = rate.tokens_per_s / before.tokens_per_s, rate.step_ms / before.step_ms
            report.append({"drafts": drafts, "batch": batch, "gain": gain, "step_cost": cost, **asdict(rate)})
            print(
                f"{asked.shape} batch {batch}, {drafts:2} drafts: {rate.tokens_per_s:8.1f} tok/s, {rate.step_ms:6.3f} "
                f"ms a step, {rate.tokens_per_step:.3f} tokens a step; gain {gain:.2f}x, step {cost:.2f}x",
                flush=True,
            )
            if asked.timeline:
                prompts = session.prompts(batch, asked.prompt)
                print("\n".join(trace_decode(session, prompts, asked.outputs, TRACED, drafts > 0).lines()), flush=True)
        del session
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
