"""Training on the device: acceptance rises, no step waits for the device, and the heads draft in captured steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from bankfull import LLM
from tests.gpu.place import DEVICE, no_waiting, require_device

require_device()

from bankfull.decode.medusa import Medusa  # noqa: E402
from bankfull.decode.plain import Plain  # noqa: E402
from bankfull.train.draft import DraftTrainer  # noqa: E402
from bankfull.train.medusa import MedusaTrainer  # noqa: E402
from bankfull.train.states import HiddenStates  # noqa: E402
from bankfull.train.text import OwnAnswer, OwnText, OwnTextOptions, frequent_tokens  # noqa: E402
from bankfull.weights.medusa import read_heads  # noqa: E402
from tests.decode.test_medusa import random_heads  # noqa: E402
from tests.gpu.engines import bench_of, random_prompts  # noqa: E402
from tests.train.looping import looping_folder  # noqa: E402
from tests.train.test_draft import run as train_draft  # noqa: E402
from tests.train.test_training import PROMPTS, RECIPE, run  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(looping_folder()), device=str(DEVICE), dtype="float32", rows=8, memory="16MiB")


def test_acceptance_rises(llm: LLM, tmp_path: Path) -> None:
    outcome = run(llm, tmp_path / "heads")
    before, after = (outcome.progress.measured[i]["acceptance"] for i in (0, -1))
    assert outcome.progress.step == RECIPE.steps
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert len(read_heads(tmp_path / "heads").blocks) == 2


def test_an_optimizer_step_does_not_wait_for_the_device(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OwnTextOptions(PROMPTS, 5, 0.7, 24))
    text.write(llm, None, lambda done, note: None)
    answers, _ = text.split(4)
    states = HiddenStates(llm.loaded, answers, None, 1 << 30)
    states.examples(range(len(answers)))  # computed and kept
    trainer = MedusaTrainer(llm.loaded, 2, 1, frequent_tokens(answers, 96, llm.loaded.model.vocab), {})
    parameters = list(trainer.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    for step in itertools.count():
        loss = trainer.loss(states.examples([step % 4, 4]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step == 1:
            break  # kernels are compiled, and the optimizer has its state
    with no_waiting():
        for step in range(3):
            loss = trainer.loss(states.examples([step, 4]))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    assert bool(loss.isfinite())


def test_a_draft_model_learns_without_waiting_for_the_device(llm: LLM, tmp_path: Path) -> None:
    outcome = train_draft(llm, tmp_path / "draft")
    before, after = (outcome.progress.measured[i]["acceptance"] for i in (0, -1))
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    trainer = outcome.trainer
    assert isinstance(trainer, DraftTrainer)
    answers = [OwnAnswer((5, 6), tuple(range(20 + i, 40 + i))) for i in range(2)]
    examples = HiddenStates(llm.loaded, answers, None, 1 << 30).examples([0, 1])
    trainer.loss(examples).backward()
    with no_waiting():
        loss = trainer.loss(examples)
        loss.backward()
    assert bool(loss.isfinite())


@pytest.mark.parametrize("own", (False, True), ids=("compact", "published"))
def test_heads_change_no_token(own: bool) -> None:
    found = []
    for strategy in (Plain(), Medusa(random_heads(1, own=own), nodes=7)):
        bench = bench_of("llama", rows=2, strategy=strategy)
        for i, prompt in enumerate(random_prompts(4, seed=2)):
            bench.add(i, prompt, 12)
        bench.run()
        found.append(bench.tokens)
    assert found[0] == found[1]
