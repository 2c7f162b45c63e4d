"""An EAGLE head in training: acceptance rises, the saved head proposes what was measured, and no token changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.decode.candidate_tree import chain_tree
from bankfull.familiar import configure
from bankfull.loading import load
from bankfull.models.eagle import build_eagle
from bankfull.train import loop
from bankfull.train.eagle import EagleTrainer
from bankfull.train.loop import Schedule
from bankfull.train.run import MakeTrainer, TrainingOptions, TrainingOutcome, run_training
from bankfull.train.states import HiddenStates
from bankfull.train.text import OwnAnswer, frequent_tokens
from bankfull.weights.eagle import WEIGHTS, read_eagle
from tests.decode.test_eagle import CountedEagle, Watching
from tests.train.looping import looping_folder
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
    assert len(after) == DEPTH and all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert measured[-1]["loss"] < measured[1]["loss"]
    acceptance = trained[1].acceptance
    assert acceptance is not None and acceptance.tokens_per_step(chain_tree(DEPTH)) > 2


def test_the_saved_head_proposes_what_was_measured(llm: LLM, trained: tuple[Path, TrainingOutcome]) -> None:
    """The engine's head and the trainer's predict the same features with true features, in spite of 8 bits."""
    folder, outcome = trained
    trainer, files = outcome.trainer, read_eagle(folder)
    assert isinstance(trainer, EagleTrainer) and files.fused and files.taps == trainer.taps
    assert files.acceptance is not None and outcome.acceptance is not None
    assert files.acceptance[0] == pytest.approx(outcome.acceptance.by_rank[0], abs=1e-5)
    one = OwnAnswer((5, 6, 7), tuple(range(40, 60)))
    examples = HiddenStates(llm.loaded, [one], None, 1 << 20, trainer.taps).examples([0])
    with torch.no_grad():
        expected = trainer._steps(trainer._padded(examples))[0][0]
    strategy = Watching(partial(build_eagle, files), depth=DEPTH)
    made = load(str(looping_folder()), *configure({"memory": "16MiB", "rows": 2})[:3], strategy=strategy)
    LLM(loaded=made).generate([[*one.prompt, *one.answer]], SamplingParams(max_tokens=1, temperature=0.0))
    got = torch.cat(strategy.followed)
    assert got.shape == expected.shape
    close = torch.cosine_similarity(got, expected)
    assert close.min() > 0.99, close


@pytest.mark.parametrize("tree", ("dynamic", "chain"))
@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_the_trained_head_saves_steps_and_changes_no_token(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tree: str, temperature: float
) -> None:
    strategy = CountedEagle(partial(build_eagle, read_eagle(trained[0])), DEPTH, tree)
    made = load(str(looping_folder()), *configure({"memory": "16MiB", "rows": 8})[:3], strategy=strategy)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    expected = [one.outputs[0].token_ids for one in llm.chat(chats, params)]
    assert [one.outputs[0].token_ids for one in LLM(loaded=made).chat(chats, params)] == expected
    assert strategy.accepted > strategy.verified, f"{strategy.accepted} drafts accepted in {strategy.verified} steps"


@pytest.mark.full
def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    folder, chosen = tmp_path / "head", Schedule.chosen
    for last in (7, 33):

        def stop(self: Schedule, step: int, count: int, last: int = last) -> list[int]:
            if step == last:
                raise Killed
            return chosen(self, step, count)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
            patch.setattr(Schedule, "chosen", stop)
            with pytest.raises(Killed):
                run(llm, folder)
    run(llm, folder)
    assert (folder / WEIGHTS).read_bytes() == (trained[0] / WEIGHTS).read_bytes()
