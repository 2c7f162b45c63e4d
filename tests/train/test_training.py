"""Training: acceptance rises, an interrupted run ends with the bits of an uninterrupted one, and the result drafts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.decode.candidate_tree import best_tree, chain_tree
from bankfull.decode.medusa import MedusaStack
from bankfull.errors import ConfigError
from bankfull.familiar import configure
from bankfull.loading import load
from bankfull.train import loop
from bankfull.train.checkpoint import CHECKPOINT, load_checkpoint
from bankfull.train.loop import Schedule
from bankfull.train.medusa import MedusaTrainer
from bankfull.train.prompts import own_prompts
from bankfull.train.recipe import TrainingRecipe, digest_of
from bankfull.train.run import MakeTrainer, TrainingOptions, TrainingOutcome, run_training
from bankfull.train.states import Examples
from bankfull.train.text import DATA, OwnAnswer, frequent_tokens
from bankfull.train.trainer import RANKS
from bankfull.weights.medusa import WEIGHTS, read_heads
from tests.decode.test_medusa import CountedMedusa
from tests.train.looping import looping_folder

PROMPTS = own_prompts(16, seed=5)
RECIPE = TrainingRecipe(
    "medusa", "tiny", "float32", 5, 16, digest_of(PROMPTS), 0.7, 24, 60, 2, 0.02, {"heads": 2, "vocabulary": 96}
)


@contextmanager
def quiet(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    yield lambda count, note: None


OPTIONS = TrainingOptions(None, 20, 1 << 30, quiet)
make: MakeTrainer = lambda loaded, answers: MedusaTrainer(  # noqa: E731
    loaded, 2, 1, frequent_tokens(answers, 96, loaded.model.vocab), {}
)


def run(llm: LLM, folder: Path, recipe: TrainingRecipe = RECIPE, options: TrainingOptions = OPTIONS) -> TrainingOutcome:
    return run_training(llm, recipe, PROMPTS, folder, make, 4, options)


@pytest.fixture(scope="module")
def trained(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingOutcome]:
    folder = tmp_path_factory.mktemp("trained") / "heads"
    return folder, run(llm, folder)


def test_acceptance_rises_on_text_that_was_held_out(trained: tuple[Path, TrainingOutcome]) -> None:
    progress = trained[1].progress
    assert [one["step"] for one in progress.measured] == [0, 20, 40, 60]
    before, after = progress.measured[0]["acceptance"], progress.measured[-1]["acceptance"]
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert progress.measured[-1]["loss"] < progress.measured[1]["loss"]
    acceptance = trained[1].acceptance
    assert acceptance is not None and acceptance.by_position == after
    chain, tree = chain_tree(2), best_tree(acceptance.by_rank, 8)
    assert 1.5 < acceptance.tokens_per_step(chain) <= acceptance.tokens_per_step(tree) <= 3


def test_the_saved_heads_propose_what_was_measured(llm: LLM, trained: tuple[Path, TrainingOutcome]) -> None:
    """The engine's heads and the trainer's agree about the ranks of tokens, in spite of bfloat16 in the file."""
    folder, outcome = trained
    heads, trainer = read_heads(folder), outcome.trainer
    assert heads.acceptance is not None and outcome.acceptance is not None and isinstance(trainer, MedusaTrainer)
    assert heads.acceptance[0] == pytest.approx(outcome.acceptance.by_rank[0], abs=1e-5)
    one = OwnAnswer((5, 6, 7), tuple(range(40, 60)))
    states = torch.randn(len(one), heads.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    ranks = trainer.ranks(Examples([one], states))
    found = MedusaStack(llm.loaded.model.head, heads, 2).candidates(states[2:].float(), RANKS)
    assert len(ranks) == len(one.answer) - 2
    for position, line in enumerate(ranks.tolist()):
        for head, rank in enumerate(line):
            token = one.answer[position + 1 + head]
            proposed = found[position, head].tolist()
            assert (token in proposed) == (rank < RANKS) or rank >= RANKS - 1
            assert rank >= RANKS or abs(proposed.index(token) - rank) <= 1


@pytest.mark.parametrize("tree", ("sparse", "chain"))
@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_the_trained_heads_save_steps_and_change_no_token(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tree: str, temperature: float
) -> None:
    strategy = CountedMedusa(read_heads(trained[0]), tree=tree)
    made = load(str(looping_folder()), *configure({"memory": "16MiB", "rows": 8})[:3], strategy=strategy)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True)
    prompts = [[20 + i, 40 + 2 * i] for i in range(4)]
    expected = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert [one.outputs[0].token_ids for one in LLM(loaded=made).generate(prompts, params)] == expected
    assert strategy.accepted > 60, f"{strategy.accepted} of 240 tokens were drafted"


def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    folder = tmp_path / "heads"
    for last in (7, 33, 34, 59):
        chosen = Schedule.chosen

        def until(self: Schedule, step: int, count: int, last: int = last, chosen: object = chosen) -> list[int]:
            if step == last:
                raise Killed  # between a checkpoint and the next one
            return chosen(self, step, count)  # type: ignore[operator]

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Schedule, "chosen", until)
            patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0 if last == 33 else 1e9)
            run(llm, folder)
        assert not (folder / WEIGHTS).exists()
    assert run(llm, folder).progress.step == 60
    assert (folder / WEIGHTS).read_bytes() == (trained[0] / WEIGHTS).read_bytes()
    assert (folder / "tree.json").read_bytes() == (trained[0] / "tree.json").read_bytes()


def test_slices_end_with_the_same_result_and_leave_usable_heads(
    llm: LLM, trained: tuple[Path, TrainingOutcome], tmp_path: Path
) -> None:
    folder, states = tmp_path / "heads", 0
    outcome = run(llm, folder, options=replace(OPTIONS, deadline=time.monotonic() - 1))
    assert outcome.acceptance is None and outcome.answers == 0, "no time for a single answer"
    (folder / DATA).write_bytes((trained[0] / DATA).read_bytes())
    while outcome.progress.step < 60:
        outcome = run(llm, folder, options=replace(OPTIONS, deadline=time.monotonic() + 0.2, most_bytes=0))
        states += 1
        assert states < 60 and outcome.acceptance is not None
        assert len(read_heads(folder).blocks) == 2
    assert (folder / WEIGHTS).read_bytes() == (trained[0] / WEIGHTS).read_bytes()


SCRIPT = """
import sys
from bankfull.cli.app import run_command
sys.exit(run_command(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_killed_run_ends_with_the_same_files(tmp_path: Path) -> None:
    """kill -9 at two places, in a process of its own."""

    def start(folder: Path) -> subprocess.Popen[bytes]:
        options = "--count 8 --answer-tokens 16 --steps 120 --heads 2 --vocabulary 64 --measure-every 10 --threads 1"
        command = ["train", "medusa", str(looping_folder()), "-o", str(folder), *options.split()]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "BANKFULL_CACHE": str(tmp_path / "cache")}
        return subprocess.Popen([sys.executable, "-c", SCRIPT, *command], env=environment, **quiet)  # type: ignore[call-overload]

    for wanted in (DATA, CHECKPOINT):
        running = start(tmp_path / "killed")
        while not (tmp_path / "killed" / wanted).exists():
            assert running.poll() is None, "ended before it was killed"
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    for folder in ("killed", "whole"):
        assert start(tmp_path / folder).wait(200) == 0
    for name in (WEIGHTS, "tree.json", "config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted((tmp_path / "killed" / DATA).read_text().splitlines()) == sorted(
        (tmp_path / "whole" / DATA).read_text().splitlines()
    )


def test_every_epoch_passes_over_all_sequences_once() -> None:
    schedule = Schedule(100, 3, 0.1, 7, 10)
    seen = [index for step in range(20) for index in schedule.chosen(step, 10)]
    assert all(sorted(seen[i : i + 10]) == list(range(10)) for i in range(0, 60, 10))
    assert seen[:10] != seen[10:20]
    rates = [schedule.rate_at(step) for step in range(100)]
    assert max(rates) == 0.1 and rates[0] < rates[1] < rates[4] == 0.1 and rates[-1] < 0.001
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 6}, "a run with another seed"),
        ({"model": "other"}, "a run with another model"),
        ({"shape": {"heads": 3}}, r"another shape \(heads 2, vocabulary 96, now heads 3\)"),
    ],
)
def test_a_directory_of_another_run_is_refused(
    llm: LLM, trained: tuple[Path, TrainingOutcome], change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(llm, trained[0], replace(RECIPE, **change))  # type: ignore[arg-type]


def test_a_directory_with_other_files_is_refused(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds other files; give a new directory"):
        run(llm, tmp_path)


def test_a_damaged_checkpoint_is_refused(trained: tuple[Path, TrainingOutcome], tmp_path: Path) -> None:
    data = (trained[0] / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(data[: len(data) // 2])
    tensor = torch.zeros(2)
    with pytest.raises(ConfigError, match=r"cannot be read .*; delete it to train again"):
        load_checkpoint(tmp_path, {"0.weight": tensor}, torch.optim.AdamW([tensor]))
