"""EAGLE heads on the device: acceptance rises in training, nothing waits for the device, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull import LLM
from tests.gpu.place import DEVICE, no_waiting, require_device

require_device()

from bankfull.decode.plain import Plain  # noqa: E402
from bankfull.train.eagle import EagleTrainer  # noqa: E402
from bankfull.train.states import HiddenStates  # noqa: E402
from bankfull.train.text import OwnText, OwnTextOptions  # noqa: E402
from bankfull.weights.eagle import read_eagle  # noqa: E402
from tests.decode.test_eagle import WAYS, random_eagle, strategy_of  # noqa: E402
from tests.gpu.engines import bench_of, random_prompts  # noqa: E402
from tests.train.looping import looping_folder  # noqa: E402
from tests.train.test_eagle import DEPTH, RECIPE, make, run  # noqa: E402
from tests.train.test_training import PROMPTS  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(looping_folder()), device=str(DEVICE), dtype="float32", rows=8, memory="16MiB")


def test_acceptance_rises(llm: LLM, tmp_path: Path) -> None:
    outcome = run(llm, tmp_path / "head")
    before, after = (outcome.progress.measured[i]["acceptance"] for i in (0, -1))
    assert outcome.progress.step == RECIPE.steps
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert read_eagle(tmp_path / "head").fused


def test_an_optimizer_step_does_not_wait_for_the_device(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OwnTextOptions(PROMPTS, 5, 0.7, 24))
    text.write(llm, None, lambda done, note: None)
    answers, _ = text.split(DEPTH + 2)
    trainer = make(llm.loaded, answers)
    assert isinstance(trainer, EagleTrainer)
    states = HiddenStates(llm.loaded, answers, None, 1 << 30, trainer.taps)
    states.examples(range(len(answers)))  # computed and kept
    parameters = list(trainer.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(number: int) -> torch.Tensor:
        loss = trainer.loss(states.examples([number % 4, 4]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    for number in range(2):
        step(number)  # kernels are compiled, and the optimizer has its state
    with no_waiting():
        for number in range(3):
            loss = step(number)
    assert bool(loss.isfinite())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", (False, True), ids=("eagle-1", "eagle-3"))
def test_heads_change_no_token(fused: bool, way: str) -> None:
    found: list[Any] = []
    for strategy in (Plain(), strategy_of(random_eagle(1, fused=fused), **WAYS[way])):
        bench = bench_of("llama", rows=2, strategy=strategy)
        for i, prompt in enumerate(random_prompts(4, seed=2)):
            bench.add(i, prompt, 12)
        bench.run()
        found.append(bench.tokens)
    assert found[0] == found[1]
