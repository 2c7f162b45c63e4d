"""Diffusion models trained here: a block-diffusion model through the engine, and Diffusion-LM's sampler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bankfull.bench.diffusion import DiffusionBench
from bankfull.llm import LLM
from bankfull.runtime import naive
from bankfull.train.block_diffusion import (
    BlockDiffusionShape,
    TrainableBlockDiffusion,
    train_block_diffusion,
    training_mask,
)
from bankfull.train.diffusion_lm import DiffusionLMShape, train_diffusion_lm
from tests.tiny import speaking_folder

LETTERS, LENGTH, BLOCK = 11, 24, 4
SHAPE = BlockDiffusionShape(LETTERS + 1, LETTERS, BLOCK, hidden_size=48, intermediate_size=96)


def counting(random: torch.Generator, length: int) -> object:
    """Texts that count upwards in steps of 1 or 2, from any letter: two tokens determine all others."""

    def make(count: int) -> Tensor:
        first = torch.randint(LETTERS, (count, 1), generator=random)
        step = torch.randint(1, 3, (count, 1), generator=random)
        return (first + step * torch.arange(length)) % LETTERS

    return make


def test_a_noisy_block_sees_itself_and_clean_blocks_before_it() -> None:
    seen = training_mask(6, 2)
    assert seen[2].int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0]
    assert seen[6 + 3].int().tolist() == [0] * 6 + [1, 1, 1, 1, 0, 0]


def test_the_trained_model_is_the_served_one(tmp_path: Path) -> None:
    """The same logits from a saved model, under the mask of inference."""
    from bankfull.layers.build import Build
    from bankfull.models.registry import build_model
    from bankfull.ops import kit_for
    from bankfull.weights.source import open_model

    torch.manual_seed(0)
    made = TrainableBlockDiffusion(SHAPE)
    made.save(tmp_path)
    tokens = torch.randint(LETTERS + 1, (18,))
    at = torch.arange(18) // BLOCK
    with torch.inference_mode():
        want = made(tokens[None], torch.arange(18), at[:, None] >= at)[0]
    files = open_model(tmp_path)
    model = build_model(files.config, Build(files.source, kit_for("cpu"), torch.float32, torch.device("cpu")))
    assert float((naive.logits(model, tokens.tolist(), torch.device("cpu")) - want).abs().max()) < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    texts = counting(torch.Generator().manual_seed(1), LENGTH)
    model, losses = train_block_diffusion(SHAPE, texts, steps=120, batch=32)  # type: ignore[arg-type]
    assert sum(losses[-20:]) < 0.5 * sum(losses[:20])
    folder = tmp_path_factory.mktemp("counting")
    model.save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(speaking_folder() / name, folder)
    return LLM(str(folder))


@pytest.mark.full
def test_a_confident_model_gives_several_tokens_per_forward_and_the_same_ones(trained: LLM) -> None:
    prompts = [[(first + step * i) % LETTERS for i in range(8)] for first in (0, 4, 9) for step in (1, 2)]
    bench = DiffusionBench(trained, prompts, 12, reps=1)
    one, fast = bench.run("threshold=1"), bench.run("threshold=0.8")
    assert one.tokens_per_pass == pytest.approx(1.0, rel=0.05)
    assert fast.tokens_per_pass > 1.8 and fast.equal > 0.9
    assert one.divergence < 1e-9 and fast.divergence < 1e-9
    right = sum(
        token == (prompt[-1] + (prompt[1] - prompt[0]) * (i + 1)) % LETTERS
        for prompt, tokens in zip(prompts, one.runs[-1].tokens, strict=True)
        for i, token in enumerate(tokens)
    )
    assert right > 0.9 * one.runs[-1].count


@pytest.mark.full
def test_diffusion_lm_learns_a_distribution() -> None:
    random = torch.Generator().manual_seed(2)
    shape = DiffusionLMShape(vocab=8, length=6, hidden=128, noise_steps=60)

    def texts(count: int) -> Tensor:
        return (torch.randint(8, (count, 1), generator=random) + torch.arange(6)) % 8

    model = train_diffusion_lm(shape, texts, steps=400)
    for clamp in (True, False):
        found = model.sample(200, clamp=clamp)
        valid = ((found[:, 1:] - found[:, :-1]) % 8 == 1).all(1)
        assert float(valid.float().mean()) > (0.9 if clamp else 0.6)
        assert len(found[valid][:, 0].unique()) == 8  # every text occurs
    assert torch.equal(model.sample(5, seed=3), model.sample(5, seed=3))


def test_diffusion_lm_samples_the_same_texts_for_a_seed() -> None:
    random = torch.Generator().manual_seed(2)
    shape = DiffusionLMShape(vocab=8, length=6, hidden=32, noise_steps=20)
    model = train_diffusion_lm(shape, lambda count: torch.randint(8, (count, 6), generator=random), steps=5)
    found = model.sample(5, seed=3)
    assert found.shape == (5, 6) and 0 <= int(found.min()) <= int(found.max()) < 8
    assert torch.equal(found, model.sample(5, seed=3))
