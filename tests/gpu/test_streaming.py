"""Speculative Streaming on the device: streams change no token, nothing waits for the device, and training learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull import LLM
from tests.gpu.place import DEVICE, no_waiting, require_device

require_device()

from bankfull.decode.plain import Plain  # noqa: E402
from bankfull.decode.strategy import Draft, View  # noqa: E402
from bankfull.decode.streaming import StreamDrafter, Streaming, TreeStreaming  # noqa: E402
from bankfull.train.states import HiddenStates  # noqa: E402
from bankfull.train.streaming import StreamTrainer  # noqa: E402
from bankfull.train.text import OwnText, OwnTextOptions, frequent_tokens  # noqa: E402
from bankfull.weights.streams import read_streams  # noqa: E402
from tests.decode.test_streaming import random_streams  # noqa: E402
from tests.gpu.engines import bench_of, random_prompts  # noqa: E402
from tests.train.looping import looping_folder  # noqa: E402
from tests.train.test_streaming import PROMPTS, RECIPE, run  # noqa: E402


class Unwaiting(Streaming):
    """Proposes without waiting for the device."""

    proposals = 0

    def propose(self, view: View) -> Draft | None:
        self.proposals += 1
        if self.proposals < 4:  # kernels are compiled
            return super().propose(view)
        with no_waiting():
            return super().propose(view)


class UnwaitingTrees(TreeStreaming):
    proposals = 0

    def propose(self, view: View) -> Draft | None:
        self.proposals += 1
        if self.proposals < 4:
            return super().propose(view)
        with no_waiting():
            return super().propose(view)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(looping_folder()), device=str(DEVICE), dtype="float32", rows=8, memory="16MiB")


@pytest.mark.parametrize("shape", ("llama", "gemma"))
@pytest.mark.parametrize("kind", (Unwaiting, UnwaitingTrees))
def test_streams_change_no_token_and_never_wait(shape: str, kind: type[StreamDrafter]) -> None:
    found = []
    for strategy in (Plain(), kind(random_streams(1), 7)):  # type: ignore[arg-type,call-arg]
        bench = bench_of(shape, rows=2, strategy=strategy)
        for i, prompt in enumerate(random_prompts(4, seed=2)):
            bench.add(i, prompt, 12)
        bench.run()
        found.append(bench.tokens)
    assert found[0] == found[1]


def test_acceptance_rises(llm: LLM, tmp_path: Path) -> None:
    outcome = run(llm, tmp_path / "streams")
    before, after = (outcome.progress.measured[i]["acceptance"] for i in (0, -1))
    assert outcome.progress.step == RECIPE.steps
    assert all(b < 0.2 < 0.5 < a for a, b in zip(after, before, strict=True)), (before, after)
    assert read_streams(tmp_path / "streams").count == 2


def test_an_optimizer_step_does_not_wait_for_the_device(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OwnTextOptions(PROMPTS, 5, 0.7, 24))
    text.write(llm, None, lambda done, note: None)
    answers, _ = text.split(4)
    trainer = StreamTrainer(llm.loaded, 2, 1, 16, frequent_tokens(answers, 96, llm.loaded.model.vocab), {})
    states = HiddenStates(llm.loaded, answers, None, 1 << 30, trainer.taps)
    states.examples(range(len(answers)))  # computed and kept
    parameters = list(trainer.parameters().values())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(chosen: list[int]) -> torch.Tensor:
        loss = trainer.loss(states.examples(chosen))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss

    for number in range(2):
        step([number, 4])  # kernels are compiled, and the optimizer has its state
    with no_waiting():
        for number in range(3):
            loss = step([number, 4])
    assert bool(loss.isfinite())
