"""Greedy tokens on the device, in float32 and through its kernels, are those of the bodies in float64 on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.gpu.place import CPU, DEVICE, require_device, the_device
from tests.kit import Bench
from tests.test_exact import SETTINGS, STRATEGIES, cases, check, other_cases

require_device()

from tests.models.cases import CASES, FAMILIES, LENGTH  # noqa: E402
from tests.models.oracle import saved  # noqa: E402

NEW = 12
MARGIN = 1e-3
"""By which the best token must beat the second: rounding in float32 is far below."""


@pytest.mark.parametrize(",".join(SETTINGS), list(cases()))
def test_every_combination_gives_the_tokens_of_a_plain_loop_on_the_host(
    shape: str,
    cache: str,
    chunk: int,
    depth: int,
    preempt: bool,
    mates: int,
    n: int,
    page: int,
    strategy: str,
    resumed: bool,
    tiers: str,
    policy: str,
) -> None:
    check(shape, cache, chunk, depth, preempt, mates, n, page, strategy, resumed, tiers, policy, torch.float32, "auto")


@pytest.mark.full
@pytest.mark.parametrize("shape", SETTINGS["shape"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_whole_product_on_the_device(shape: str, strategy: str) -> None:
    for case in other_cases(shape, strategy):
        check(*case, torch.float32, "auto")  # type: ignore[arg-type]


def built(name: str, dtype: torch.dtype, device: torch.device, providers: str) -> tuple[Decoder, Kit]:
    files = open_model(saved(name).path)
    kit = kit_for(device.type, providers)
    return build_model(files.config, Build(files.source, kit, dtype, device)), kit


@cache
def clear_prompts(name: str, wanted: int = 3) -> list[tuple[list[int], list[int]]]:
    """Prompts that the model does not hesitate behind, and what it says."""
    model, _ = built(name, torch.float64, CPU, "torch")
    draw, found = random.Random(name), []
    for _ in range(60):
        prompt = [draw.randrange(3, 50) for _ in range(draw.randint(1, LENGTH - NEW))]
        tokens, margins = naive.generate(model, prompt, NEW, CPU)
        if min(margins) > MARGIN:
            found.append((prompt, tokens))
        if len(found) == wanted:
            return found
    raise AssertionError(f"{name} hesitates behind every prompt")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.full) for name in CASES]
)
def test_every_architecture_says_on_the_device_what_it_says_on_the_host(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    model, kit = built(name, torch.float32, DEVICE, "auto")
    asked = clear_prompts(name)
    device = the_device()
    bench = Bench(
        model,
        device,
        device.depth,
        SchedConfig(rows=4, step_tokens=24),
        StateConfig(page_tokens=16),
        frames=100,
        max_len=LENGTH,
        kit=kit,
    )
    for i, (prompt, _) in enumerate(asked):
        bench.add(i, prompt, NEW)
    bench.run()
    for i, (_, expected) in enumerate(asked):
        assert bench.tokens[i, 0] == expected, f"prompt {i}"
    record_property("error", logit_error(name, model, asked[0]))


def logit_error(name: str, model: Decoder, answered: tuple[list[int], list[int]]) -> float:
    reference, _ = built(name, torch.float64, CPU, "torch")
    prompt, tokens = answered
    there = naive.logits(model, prompt + tokens, DEVICE).double().cpu()
    here = naive.logits(reference, prompt + tokens, CPU)
    return float((there - here).norm() / here.norm())
