"""Streams in training: the engine's streams, acceptance that rises, and runs that end with the same bytes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull import LLM, SamplingParams
from bankfull.assembly import Assembled, assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.decode.strategy import Draft, View
from bankfull.familiar import configure
from bankfull.loading import load
from bankfull.train import loop, streaming
from bankfull.train.loop import Schedule
from bankfull.train.prompts import own_prompts
from bankfull.train.recipe import TrainingRecipe, digest_of
from bankfull.train.run import MakeTrainer, TrainingOutcome, run_training
from bankfull.train.states import HiddenStates
from bankfull.train.streaming import StreamTrainer
from bankfull.train.text import OwnAnswer, frequent_tokens
from bankfull.train.trainer import Acceptance
from bankfull.weights.source import open_model
from bankfull.weights.streams import STREAMS, read_streams
from tests.decode.test_streaming import (
    ObservedStreaming,
    ObservedTreeStreaming,
    PlainLlama,
    ask,
    bench_of,
    random_streams,
)
from tests.tiny import VOCAB, folder_of
from tests.train.looping import looping_folder
from tests.train.test_training import OPTIONS

PROMPTS = own_prompts(16, seed=5)
SHAPE = {"streams": 2, "layers": 1, "rank": 16, "vocabulary": 96}
RECIPE = TrainingRecipe("streaming", "tiny", "float32", 5, 16, digest_of(PROMPTS), 0.7, 24, 60, 2, 0.02, SHAPE)
make: MakeTrainer = lambda loaded, answers: StreamTrainer(  # noqa: E731
    loaded, 2, 1, 16, frequent_tokens(answers, 96, loaded.model.vocab), {}
)


def run(llm: LLM, folder: Path) -> TrainingOutcome:
    return run_training(llm, RECIPE, PROMPTS, folder, make, 4, OPTIONS)


@pytest.fixture(scope="module")
def trained(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainingOutcome]:
    folder = tmp_path_factory.mktemp("trained") / "streams"
    return folder, run(llm, folder)


@pytest.mark.full
def test_acceptance_rises_on_text_that_was_held_out(trained: tuple[Path, TrainingOutcome]) -> None:
    progress = trained[1].progress
    assert [one["step"] for one in progress.measured] == [0, 20, 40, 60]
    before, after = progress.measured[0]["acceptance"], progress.measured[-1]["acceptance"]
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert progress.measured[-1]["loss"] < progress.measured[1]["loss"]


def assembled(shape: str) -> Assembled:
    run = RunConfig(device="cpu", dtype="float32")
    return assemble(open_model(folder_of(shape)), run, SchedConfig(rows=2), StateConfig(memory="4MiB"))


def answers(count: int) -> list[OwnAnswer]:
    rng = random.Random(4)

    def drawn(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(4, most)))

    return [OwnAnswer(drawn(9), drawn(20)) for _ in range(count)]


def with_values(trainer: StreamTrainer, seed: int = 1) -> StreamTrainer:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in trainer.parameters().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return trainer


def test_the_trainer_computes_the_streams_of_the_plain_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position of padded sequences at once, with the same result as one after the other."""
    made, texts = assembled("llama"), answers(3)
    trainer = with_values(StreamTrainer(made, 3, 2, 4, list(range(0, VOCAB, 2)), {}))
    states = HiddenStates(made, texts, None, 1 << 30, trainer.taps)
    # Rounded states would hide small mistakes.
    monkeypatch.setattr(Tensor, "to", exact(Tensor.to))
    examples = states.examples(range(3))
    assert examples.states.dtype == torch.float32
    grid, _, hidden, tokens = trainer._run(examples)
    streams = random_streams(count=3)
    parts = {name: tensor.detach() for name, tensor in trainer.parameters().items()}
    reference = PlainLlama(
        type(streams)(
            parts["embeddings"],
            (parts["entry.down"], parts["entry.up"]),
            (parts["exit.down"], parts["exit.up"]),
            trainer._maps(parts),
            streams.vocabulary,
            VOCAB,
        )
    )
    found = hidden.detach().unflatten(0, grid.newest.shape)
    for i, one in enumerate(texts):
        known = [*one.prompt, *one.answer]
        assert tokens[i * grid.length : i * grid.length + len(known)].tolist() == known
        for position in range(len(one.answer) - 1):
            newest = len(one.prompt) + position
            assert int(grid.newest[i, position]) == newest
            expected = reference.hidden(known[: newest + 1])
            torch.testing.assert_close(found[i, position].double(), expected, rtol=1e-3, atol=1e-3)


def exact(to: object) -> object:
    """`Tensor.to` that rounds nothing to bfloat16."""

    def kept(self: Tensor, *args: object, **more: object) -> Tensor:
        return self.clone() if torch.bfloat16 in args else to(self, *args, **more)  # type: ignore[operator,no-any-return]

    return kept


class Kept(ObservedStreaming):
    """Keeps the drafts of every proposal, by the tokens that they follow."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.drafts: dict[tuple[int, ...], list[int]] = {}

    def propose(self, view: View) -> Draft | None:
        draft = super().propose(view)
        for row, line in zip(view.host_rows, [] if draft is None else draft.tokens.tolist(), strict=True):
            self.drafts[tuple(view.tokens[row, : int(view.known[row])].tolist())] = line
        return draft


@pytest.mark.parametrize("shape", ("llama", "gemma"))
def test_the_engine_proposes_what_the_trainer_ranks(shape: str, tmp_path: Path) -> None:
    """Sliding windows and norms of heads included: where the trainer says that a stream is right, the draft is."""
    made = assembled(shape)
    trainer = with_values(StreamTrainer(made, 3, 2, 4, list(range(VOCAB)), {}))
    trainer.save(tmp_path, Acceptance(torch.zeros(1, 3)))
    strategy = Kept(read_streams(tmp_path), 3, "chain")
    bench = ask(bench_of(strategy, shape), {str(i): SamplingParams(temperature=1.0) for i in range(4)})
    bench.run()
    texts = [OwnAnswer(tuple(bench.prompts[name]), tuple(found)) for (name, _), found in bench.tokens.items()]
    ranks = trainer.ranks(HiddenStates(made, texts, None, 1 << 30, trainer.taps).examples(range(4)))
    positions = [(one, i) for one in texts for i in range(len(one.answer) - 3)]
    assert len(ranks) == len(positions)
    alike, right = [], 0
    for (one, i), line in zip(positions, ranks.tolist(), strict=True):
        drafts = strategy.drafts.get((*one.prompt, *one.answer[: i + 1]))
        for j, rank in enumerate(line if drafts is not None else ()):
            assert drafts is not None
            alike.append((rank == 0) == (drafts[j] == one.answer[i + 1 + j]))
            right += rank == 0
            if rank:
                break  # later drafts follow another token
    assert right >= 2 and sum(alike) >= 0.97 * len(alike) > 40, "bfloat16 in the file may swap two candidates"


@pytest.mark.parametrize("kind", (ObservedStreaming, ObservedTreeStreaming))
@pytest.mark.parametrize("temperature", (0.0, 0.7))
def test_trained_streams_save_steps_and_change_no_token(
    llm: LLM, trained: tuple[Path, TrainingOutcome], kind: type[ObservedStreaming], temperature: float
) -> None:
    strategy = kind(read_streams(trained[0]), 6)
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

    folder, chosen = tmp_path / "streams", Schedule.chosen
    for last in (7, 33):

        def until(self: Schedule, step: int, count: int, last: int = last) -> list[int]:
            if step == last:
                raise Killed
            return chosen(self, step, count)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Schedule, "chosen", until)
            patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0 if last == 33 else 1e9)
            run(llm, folder)
    assert run(llm, folder).progress.step == 60
    for name in (STREAMS, "tree.json"):
        assert (folder / name).read_bytes() == (trained[0] / name).read_bytes()


def test_long_answers_train_some_of_their_positions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(streaming.POSITIONS, "cpu", 5)
    trainer = StreamTrainer(llm.loaded, 2, 1, 4, list(range(96)), {})
    texts = [OwnAnswer((1, 2, 3), tuple(range(5, 5 + n))) for n in (4, 6, 23, 24)]
    newest = [trainer._newest(one.prompt, one.answer) for one in texts]
    assert [len(each) <= 5 for each in newest] == [True] * 4
    assert newest[0].tolist() == [3, 4, 5] and newest[1].tolist() == [3, 4, 5, 6, 7]
    assert all(each.min() >= 3 and each.max() < len(one) - 1 for one, each in zip(texts, newest, strict=True))
    examples = HiddenStates(llm.loaded, texts, None, 1 << 30, trainer.taps).examples(range(4))
    assert len(trainer.ranks(examples)) == sum(
        int(place) + 2 < len(one) for one, each in zip(texts, newest, strict=True) for place in each
    )
    trainer.loss(examples).backward()
    missing = [name for name, tensor in trainer.parameters().items() if tensor.grad is None]
    assert not missing, "every parameter gets a gradient"
