"""Denoising gives the tokens of a plain sampler that computes the whole sequence in every step, without a cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bankfull.config import DiffusionChoice, SchedConfig, StateConfig
from bankfull.decode.diffusion import Denoising
from bankfull.errors import ConfigError, RequestError
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for
from bankfull.ops.attention.body import WHOLE_SEQUENCE
from bankfull.runtime import naive
from bankfull.sample.params import SamplingParams
from bankfull.weights.source import open_model
from tests.kit import GREEDY, Bench, device_of
from tests.models.diffusion import MASK, make

CPU = torch.device("cpu")
NEW = 14


@lru_cache
def files_of(kind: str) -> Path:
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix=f"bankfull-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make(kind, folder, spread=0.3)
    return folder


@lru_cache
def model_of(kind: str, providers: str = "auto", dtype: torch.dtype = torch.float32) -> tuple[Decoder, Kit]:
    files, kit = open_model(files_of(kind)), kit_for("cpu", providers)
    return build_model(files.config, Build(files.source, kit, dtype, CPU)), kit


def bench_of(kind: str, options: str, *, providers: str = "auto", depth: int = 0, rows: int = 3, **more: int) -> Bench:
    model, kit = model_of(kind, providers, torch.float64 if providers == "torch" else torch.float32)
    frames, page = more.pop("frames", 120), more.pop("page", 4)
    return Bench(
        model,
        device_of(depth, seed=depth),
        depth,
        SchedConfig(rows=rows, step_tokens=more.pop("step_tokens", 96)),
        StateConfig(page_tokens=page, prefix_cache=kind == "sdar"),
        Denoising(DiffusionChoice.parse(options)),
        frames=frames,
        kit=kit,
    )


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(6)
    return [[rng.randrange(3, 50) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def confidences(logits: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.double().clone()
    logits[:, MASK] = -torch.inf
    best, token = logits.softmax(-1).max(-1)
    return token, best


def sampler(
    model: Decoder, prompt: Sequence[int], new: int, choice: DiffusionChoice, *, max_len: int = 128
) -> list[int]:
    """From the papers: a canvas of masks after the prompt, blocks from left to right, in each step one pass over all
    tokens. Greedy; fixes the most confident predictions."""
    assert model.diffusion is not None
    whole = model.diffusion.block == WHOLE_SEQUENCE
    own = model.diffusion.block
    block = choice.block or (32 if whole else own)
    begin, limit = (len(prompt) if whole else 0), len(prompt) + new
    tokens = list(prompt)
    while len(tokens) < limit:
        known = len(tokens)
        end = begin + ((known - begin) // block + 1) * block
        if whole:
            canvas = min(len(prompt) + ((known - len(prompt)) // max(block, choice.length) + 1) * choice.length, limit)
        else:
            canvas = min((known // own + 1) * own, max_len)
        end = min(end, canvas)
        text = tokens + [MASK] * (canvas - known)
        while MASK in text[known:end]:
            token, confidence = confidences(naive.logits(model, text, CPU))
            if model.diffusion.shifted:
                token, confidence = token.roll(1), confidence.roll(1)
            left = [p for p in range(known, end) if text[p] == MASK]
            ordered = sorted(left, key=lambda p: (-float(confidence[p]), p))
            above = [p for p in left if choice.threshold is not None and float(confidence[p]) > choice.threshold]
            for place in {*ordered[: choice.tokens], *above}:
                text[place] = int(token[place])
        tokens = text[:end]
    return tokens[len(prompt) : limit]


ONE = "threshold=1"
WAYS = [ONE, "threshold=0.3", "threshold=1,tokens=3", "threshold=0.5,tokens=2"]


@pytest.mark.few(2)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    ("kind", "more"), [("llada", "block=6,length=12"), ("dream", "block=5,length=10"), ("sdar", "")]
)
def test_tokens_equal_those_of_the_plain_sampler(kind: str, more: str, options: str) -> None:
    """In float64 bodies, batched, with preemption, chunked prompts and a prefix cache where there is one."""
    way = f"{options},{more}" if more else options
    bench = bench_of(kind, way, providers="torch", step_tokens=40)
    prompts = prompts_of(5)
    for i, prompt in enumerate(prompts):
        bench.add(i, prompt, NEW)
    bench.run(preempt=random.Random(2))
    model = model_of(kind, "torch", torch.float64)[0]
    for i, prompt in enumerate(prompts):
        assert bench.tokens[i, 0] == sampler(model, prompt, NEW, DiffusionChoice.parse(way)), (i, way)
    bench.manager.check()


@pytest.mark.parametrize("depth", (0, 1))
@pytest.mark.parametrize("kind", ["llada", "dream", "sdar"])
def test_batches_depths_and_the_tape_change_nothing(kind: str, depth: int) -> None:
    """In float32 kernels: alone, together, and one step behind."""
    way = "threshold=0.4" + ("" if kind == "sdar" else ",block=6,length=12")
    prompts = prompts_of(4)
    together = bench_of(kind, way, depth=depth)
    for i, prompt in enumerate(prompts):
        together.add(i, prompt, NEW)
    together.run()
    for i, prompt in enumerate(prompts):
        alone = bench_of(kind, way)
        alone.add(0, prompt, NEW)
        alone.run()
        assert together.tokens[i, 0] == alone.tokens[0, 0]
        assert together.finish[i, 0] == "length"


@pytest.mark.parametrize("order", ["confidence", "random"])
@pytest.mark.parametrize("kind", ["llada", "sdar"])
def test_sampling_is_repeatable_and_survives_preemption(kind: str, order: str) -> None:
    way = f"order={order},tokens=2" + ("" if kind == "sdar" else ",block=6,length=12")
    params, prompts, found = SamplingParams(temperature=1.3), prompts_of(4), []
    for preempt in (None, random.Random(1)):
        bench = bench_of(kind, way)
        for i, prompt in enumerate(prompts):
            bench.add(i, prompt, NEW, params=params, seed=40 + i, n=2)
        bench.run(preempt=preempt)
        found.append(dict(bench.tokens))
    assert found[0] == found[1]
    assert all(found[0][i, 0] != found[0][i, 1] for i in range(4))


def test_a_finished_block_comes_as_one_output_and_ends_at_a_stop_token() -> None:
    bench = bench_of("sdar", ONE)
    bench.add(0, prompts_of(1)[0][:6], 14)
    sizes = []
    while bench.engine.busy:
        for output in bench.engine.step():
            sizes.append(len(output.tokens))
            bench.take([output])
    assert sizes == [2, 4, 4, 4] and bench.finish[0, 0] == "length"  # the prompt ends within a block
    tokens = bench.tokens[0, 0]
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    ended = bench_of("sdar", ONE)
    ended.add(0, prompts_of(1)[0][:6], 14, stop=[stop])
    ended.run()
    assert ended.finish[0, 0] == "stop"
    assert ended.tokens[0, 0] == tokens[: tokens.index(stop) + 1]


def test_each_step_of_a_block_computes_the_open_block_only() -> None:
    """Known blocks are computed once, together with the first step of the next block."""
    bench = bench_of("sdar", ONE)
    shapes: list[tuple[int, int]] = []
    bench.engine.on_launch.append(lambda plan: shapes.extend((w.start, w.count + w.drafts) for w in plan.work))
    bench.add(0, [7, 8, 9, 10, 11], 11)
    bench.run()
    first = [(0, 8), (4, 4), (4, 4)]  # four known tokens are final after the first step; three are denoised
    second = [(4, 8), (8, 4), (8, 4), (8, 4)]
    third = [(8, 8), (12, 4), (12, 4), (12, 4)]
    assert shapes == first + second + third


def test_the_prefix_cache_serves_whole_blocks() -> None:
    prompt = prompts_of(5)[2]
    prompt = (prompt * 4)[:23]
    bench = bench_of("sdar", "threshold=0.4")
    for name in range(2):
        bench.add(name, prompt, NEW)
        bench.run()
    assert bench.cached[1] == 20 and bench.tokens[0, 0] == bench.tokens[1, 0]


@pytest.mark.parametrize("refresh", [0, 1, 3])
@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_a_lossy_cache_computes_less_and_refreshing_each_step_is_exact(kind: str, refresh: int) -> None:
    way = "threshold=1,block=4,length=12"
    prompts, computed, tokens = prompts_of(3), [], []
    for more in ("", f",cache=block,refresh={refresh}"):
        bench = bench_of(kind, way + more)
        for i, prompt in enumerate(prompts):
            bench.add(i, prompt, 12)
        bench.run()
        computed.append(bench.engine.totals.tokens)
        tokens.append(dict(bench.tokens))
    if refresh == 1:
        assert computed[0] == computed[1] and tokens[0] == tokens[1]
    else:
        assert computed[1] < computed[0]
        assert all(len(found) == 12 for found in tokens[1].values())


def test_more_tokens_per_step_take_fewer_steps() -> None:
    steps = []
    for way in (ONE, "threshold=1,tokens=2", "threshold=0"):
        bench = bench_of("sdar", way)
        bench.add(0, prompts_of(1)[0][:8], 16)
        bench.run()
        steps.append(bench.engine.totals.steps)
    assert steps == [16, 8, 4]


def test_what_can_never_run_is_refused() -> None:
    bench = bench_of("llada", ONE, step_tokens=30)
    with pytest.raises(RequestError, match="computes all of them in each step"):
        bench.add(0, [5] * 20, 11)
    with pytest.raises(RequestError, match="only generates"):
        bench.add(1, [5] * 20, 5, generates=False)
    tight = bench_of("sdar", ONE, frames=9, page=2)
    with pytest.raises(RequestError, match="last block"):
        tight.add(0, [5] * 10, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed=3", "no option"),
        ("threshold=2", "from 0 to 1"),
        ("threshold=nan", "from 0 to 1"),
        ("tokens=0", "whole number from 1"),
        ("block=9999999", "whole number"),
        ("order=left", "confidence or random"),
        ("cache=dual", "none or block"),
        ("order=random,threshold=0.9", "no threshold"),
    ],
)
def test_wrong_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DiffusionChoice.parse(text)


@pytest.mark.parametrize(
    ("kind", "text", "message"), [("sdar", "block=3", "divide"), ("sdar", "cache=block", "sees blocks")]
)
def test_options_that_the_model_has_no_use_for_are_refused(kind: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Denoising(DiffusionChoice.parse(text)).prepare(model_of(kind)[0])


def test_a_model_that_predicts_the_next_token_is_refused() -> None:
    from tests.tiny import model_of as causal

    with pytest.raises(ConfigError, match="needs a diffusion model"):
        Denoising(DiffusionChoice.parse("")).prepare(causal("llama"))


def test_a_failing_model_ends_its_request_only() -> None:
    bench = bench_of("sdar", ONE)
    prompts = prompts_of(2)
    for i, prompt in enumerate(prompts):
        bench.add(i, prompt, 8, params=GREEDY)
    head = bench.model.head
    row_of_first = 0

    class Broken:
        def __call__(self, hidden: Tensor) -> Tensor:
            logits = head(hidden)
            if len(logits) > 4:
                logits[row_of_first] = torch.nan
            return logits

        best = head.best

    bench.runner.model = type("Wrapped", (), {"head": Broken(), "vocab": bench.model.vocab})()
    bench.run()
    assert sorted(bench.finish.values()) == ["error", "length"]
