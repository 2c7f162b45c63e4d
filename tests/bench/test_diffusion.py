"""The benchmark of denoising: exact caches diverge by nothing, lossy ones by something, and speed has its price."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bankfull.bench.diffusion import DiffusionBench, kl_divergence
from bankfull.errors import ConfigError
from bankfull.llm import LLM
from tests.models.diffusion import make
from tests.tiny import speaking_folder


def model_with_text(kind: str, folder: Path) -> Path:
    make(kind, folder, spread=0.3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (speaking_folder() / name).exists():
            shutil.copy(speaking_folder() / name, folder)
    return folder


PROMPTS = [[7, 9, 11, 30, 31], [5] * 9]


@pytest.mark.parametrize(
    ("kind", "more"), [("sdar", ""), ("llada", ",block=4,length=12"), ("dream", ",block=4,length=12")]
)
def test_exact_ways_diverge_by_nothing(kind: str, more: str, tmp_path: Path) -> None:
    bench = DiffusionBench(LLM(str(model_with_text(kind, tmp_path))), PROMPTS, 12, reps=1)
    one, fast = bench.run("threshold=1" + more), bench.run("threshold=0" + more)
    assert one.equal == 1.0 and one.tokens_per_pass == pytest.approx(1.0, rel=0.2)
    assert fast.tokens_per_pass > 2 * one.tokens_per_pass
    assert one.divergence < 1e-9 and fast.divergence < 1e-9
    assert not one.lossy and one.rate > 0


def test_a_lossy_cache_reports_its_divergence(tmp_path: Path) -> None:
    bench = DiffusionBench(LLM(str(model_with_text("llada", tmp_path))), PROMPTS, 12, reps=1)
    never = bench.run("threshold=1,block=4,length=12,cache=block,refresh=0")
    always = bench.run("threshold=1,block=4,length=12,cache=block,refresh=1")
    assert never.lossy and never.divergence > 1e-3 > always.divergence
    assert always.equal == 1.0


def test_the_options_of_the_engine_come_back(tmp_path: Path) -> None:
    llm = LLM(str(model_with_text("sdar", tmp_path)), diffusion="threshold=0.5")
    before = llm.loaded.engine.scheduler.canvas
    DiffusionBench(llm, PROMPTS, 5, reps=1).run("threshold=1,block=2")
    assert llm.loaded.engine.strategy.choice.threshold == 0.5  # type: ignore[attr-defined]
    assert llm.loaded.engine.scheduler.canvas == before


def test_a_causal_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a diffusion model"):
        DiffusionBench(LLM(str(speaking_folder())), PROMPTS, 5)


def test_divergence_is_that_of_the_definition() -> None:
    a, b = torch.randn(3, 7), torch.randn(3, 7)
    a[:, 2] = b[:, 2] = -torch.inf
    want = [
        float(torch.nn.functional.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="none").nansum())
        for x, y in zip(a, b, strict=True)
    ]
    assert kl_divergence(a, b).tolist() == pytest.approx(want, rel=1e-5)
