"""An EAGLE head in training: acceptance rises, the saved head proposes what was measured, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bankfull import LLM
from bankfull.decode.candidate_tree import chain_tree
from bankfull.train.eagle import EagleTrainer
from bankfull.train.run import MakeTrainer, TrainingOptions, TrainingOutcome, run_training
from bankfull.train.text import frequent_tokens
from tests.train.test_training import OPTIONS, PROMPTS
from tests.train.test_training import RECIPE as MEDUSA_RECIPE

DEPTH = 3
RECIPE = replace(MEDUSA_RECIPE, kind="eagle", rate=0.01, shape={"depth": DEPTH, "inner": 96, "vocabulary": 96})
make: MakeTrainer = lambda loaded, answers: EagleTrainer(  # noqa: E731
    loaded, DEPTH, 96, frequent_tokens(answers, 96, loaded.model.vocab), {}
)


def run(llm: LLM, folder: Path, options: TrainingOptions = OPTIONS) -> TrainingOutcome:
    return run_training(llm, RECIPE, PROMPTS, folder, make, DEPTH + 2, options)


@pytest.fixture(scope="module")
def trained(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingOutcome]:
    folder = tmp_path_factory.mktemp("trained") / "head"
    return folder, run(llm, folder)


def test_acceptance_rises_on_text_that_was_held_out(trained: tuple[Path, TrainingOutcome]) -> None:
    measured = trained[1].progress.measured
    before, after = measured[0]["acceptance"], measured[-1]["acceptance"]
    print(before, after, [one["loss"] for one in measured])
    assert len(after) == DEPTH and all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert measured[-1]["loss"] < measured[1]["loss"]
    acceptance = trained[1].acceptance
    assert acceptance is not None and acceptance.tokens_per_step(chain_tree(DEPTH)) > 2
