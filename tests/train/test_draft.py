"""A trained draft model: a checkpoint whose acceptance rises, of a size for the machine, and no token changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams
from bankfull.limits.meter.step_limit import StepLimit, step_limit_of
from bankfull.ops.cost import Rates
from bankfull.state.spec import Paged, joined_states, layout_of
from bankfull.train import loop
from bankfull.train.draft import WEIGHTS, DraftTrainer
from bankfull.train.draft_size import DraftSize, assumed_acceptance, best_size, size_of
from bankfull.train.loop import Schedule
from bankfull.train.prompts import own_prompts
from bankfull.train.recipe import TrainingRecipe, digest_of, shape_of_run
from bankfull.train.report import report_of
from bankfull.train.run import TrainingOptions, TrainingOutcome, run_training
from bankfull.train.states import Examples
from bankfull.train.text import OwnAnswer
from tests.train.looping import looping_folder

PROMPTS = own_prompts(16, seed=5)
SHAPE = {"layers": 1, "width": 64, "depth": 3}
RECIPE = TrainingRecipe("draft", "tiny", "float32", 5, 16, digest_of(PROMPTS), 0.7, 24, 60, 2, 0.01, SHAPE)


@contextmanager
def quiet(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    yield lambda count, note: None


OPTIONS = TrainingOptions(None, 20, 1 << 30, quiet)


def run(llm: LLM, folder: Path, options: TrainingOptions = OPTIONS) -> TrainingOutcome:
    def make(loaded: object, answers: object) -> DraftTrainer:
        size = size_of(llm.loaded.model, SHAPE["layers"], SHAPE["width"])
        return DraftTrainer(llm.loaded, llm.tokenizer, size, SHAPE["depth"], RECIPE.seed, {})

    return run_training(llm, RECIPE, PROMPTS, folder, make, 4, options)


@pytest.fixture(scope="module")
def trained(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingOutcome]:
    folder = tmp_path_factory.mktemp("trained") / "draft"
    return folder, run(llm, folder)


def test_acceptance_rises_on_text_that_was_held_out(trained: tuple[Path, TrainingOutcome]) -> None:
    outcome = trained[1]
    measured = outcome.progress.measured
    assert [one["step"] for one in measured] == [0, 20, 40, 60]
    before, after = measured[0]["acceptance"], measured[-1]["acceptance"]
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert measured[-1]["loss"] < measured[1]["loss"]
    report = report_of(outcome, None, trees=False)
    assert [(one.kind, one.nodes) for one in report.choices] == [("chain", 1), ("chain", 2), ("chain", 3)]
    assert 1.5 < report.best.tokens <= 4


def test_the_checkpoint_is_the_model_that_was_trained(llm: LLM, trained: tuple[Path, TrainingOutcome]) -> None:
    """Another implementation reads it and computes what the trainer does."""
    folder, outcome = trained
    trainer = outcome.trainer
    assert isinstance(trainer, DraftTrainer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one, other = OwnAnswer((5, 6, 7), tuple(range(40, 60))), OwnAnswer((9,), (8, 30, 12))
    states = torch.zeros(len(one) + len(other), llm.loaded.model.hidden)
    with torch.no_grad():
        ours = trainer._scores(trainer.hidden(Examples([one, other], states))).view(2, len(one), -1)
        for line, sequence in enumerate((one, other)):
            theirs = model(torch.tensor([[*sequence.prompt, *sequence.answer]])).logits[0]
            assert torch.allclose(ours[line, : len(sequence)], theirs, atol=1e-3)
        ranks = trainer.ranks(Examples([one], states))
        theirs = model(torch.tensor([[*one.prompt, *one.answer]])).logits[0, 2:-1]
    expected = [int((line > line[token]).sum()) for line, token in zip(theirs, one.answer, strict=True)]
    assert ranks.tolist() == [[min(rank, 10) for rank in expected[i : i + 3]] for i in range(len(one.answer) - 2)]


@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_the_draft_model_saves_steps_and_changes_no_token(
    llm: LLM, trained: tuple[Path, TrainingOutcome], temperature: float
) -> None:
    choice = f"draft:{trained[0]},depth=3,adaptive=false"
    drafted = LLM(str(looping_folder()), rows=8, memory="16MiB", speculative=choice)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True)
    prompts = [[20 + i, 40 + 2 * i] for i in range(4)]
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert [one.outputs[0].token_ids for one in drafted.generate(prompts, params)] == expected
    accepted = sum(drafted.loaded.engine.totals.accepted)
    assert accepted > 40, f"{accepted} of 240 tokens were drafted"
    groups = drafted.loaded.layout.paged
    assert len(groups) == 1, "both models keep keys and values in the same pages"
    assert groups[0].page_tokens == llm.loaded.layout.paged[0].page_tokens


def test_keys_of_another_size_would_coarsen_the_prefix_cache(llm: LLM) -> None:
    """Why the draft model has the target's key heads."""
    target = llm.loaded.model.states()
    alone = layout_of(target, 16)
    (state,) = target[0]
    assert isinstance(state, Paged)
    lighter = Paged(tuple(replace(part, shape=(1, *part.shape[1:])) for part in state.tensors))
    longest = {
        name: max(group.page_tokens for group in layout_of(joined_states(target, [(own,)]), 16).paged)
        for name, own in (("same", state), ("lighter", lighter))
    }
    assert longest["same"] == max(group.page_tokens for group in alone.paged) == 16 < longest["lighter"]


def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    folder = tmp_path / "draft"
    for last in (7, 33, 59):
        chosen = Schedule.chosen

        def until(self: Schedule, step: int, count: int, last: int = last, chosen: object = chosen) -> list[int]:
            if step == last:
                raise Killed
            return chosen(self, step, count)  # type: ignore[operator]

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Schedule, "chosen", until)
            patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0 if last == 33 else 1e9)
            run(llm, folder)
        assert not (folder / WEIGHTS).exists()
    assert run(llm, folder).progress.step == 60
    for name in (WEIGHTS, "config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (trained[0] / name).read_bytes()


def test_a_run_that_continues_keeps_its_size(trained: tuple[Path, TrainingOutcome], tmp_path: Path) -> None:
    assert shape_of_run(trained[0], "draft") == SHAPE
    assert shape_of_run(trained[0], "medusa") is None and shape_of_run(tmp_path, "draft") is None


def test_the_size_suits_the_machine(llm: LLM) -> None:
    """The fewer bytes per second, the more a draft model must save; where arithmetic is scarce, drafts do not pay."""
    limit = step_limit_of(llm, measure=True)
    assert limit is not None
    model = replace(llm.loaded.model, hidden=4096)
    best = best_size(model, limit)
    for layers, width in ((1, 512), (4, 4096), (2, 1365 // 64 * 64)):
        assert best.gain >= _gain(model, limit, layers, width) - 1e-9
    slow = replace(limit, rates=Rates.flat(limit.peak / 1e4))
    assert best_size(model, slow).gain < best.gain


def _gain(model: object, limit: StepLimit, layers: int, width: int) -> float:
    from bankfull.train.draft_size import _candidates

    found = [one.gain for one in _candidates(model, limit) if (one.size.layers, one.size.width) == (layers, width)]  # type: ignore[arg-type]
    return max(found, default=0.0)


def test_a_size_costs_what_its_checkpoint_holds(trained: tuple[Path, TrainingOutcome]) -> None:
    trainer = trained[1].trainer
    assert isinstance(trainer, DraftTrainer)
    matrices = sum(value.numel() for value in trainer.parameters().values() if value.dim() == 2)
    assert trainer.size.pass_cost().read == 2 * matrices and trainer.size.pass_cost(3).flops == 6.0 * matrices
    assert trainer.draft_cost(4).read == 4 * trainer.size.pass_cost().read
    config = json.loads((trained[0] / "config.json").read_text())
    assert config["vocab_size"] == trainer.size.vocab and config["bankfull"]["acceptance"][0] > 0.5
    assert DraftSize(2, 64, 4, 2, 8, 97).layer_weights > DraftSize(1, 64, 4, 2, 8, 97).layer_weights
    layers, widths = (
        [assumed_acceptance(share, 1.0) for share in (0.001, 0.05, 0.1, 1.0)],
        [assumed_acceptance(1.0, width) for width in (0.1, 0.5, 1.0)],
    )
    assert layers == sorted(layers) and widths == sorted(widths) and layers[-1] == widths[-1] == layers[-2]
