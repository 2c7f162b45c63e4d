"""Hidden states: those of the plain loop, wherever they are kept."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from bankfull.assembly import Assembled, assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.runtime import naive
from bankfull.train import states
from bankfull.train.states import HiddenStates
from bankfull.train.text import OwnAnswer
from bankfull.weights.source import open_model
from tests.tiny import VOCAB, folder_of


def assembled(shape: str) -> Assembled:
    files = open_model(folder_of(shape))
    return assemble(files, RunConfig(device="cpu"), SchedConfig(rows=2), StateConfig(memory="4MiB"))


def sequences(count: int) -> list[OwnAnswer]:
    rng = random.Random(4)

    def drawn(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, most)))

    return [OwnAnswer(drawn(30), drawn(20)) for _ in range(count)]


@pytest.mark.parametrize("shape", ("llama", "gemma", "mamba"))
def test_states_are_those_of_the_plain_loop(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(states.STEP_TOKENS, "cpu", 60)  # several passes of several sequences
    made, texts = assembled(shape), sequences(7)
    found = HiddenStates(made, texts, None, 1 << 30).examples([3, 0, 6, 1, 2])
    assert found.sequences == [texts[i] for i in (3, 0, 6, 1, 2)]
    expected = [
        naive.hidden_states(made.model, [*one.prompt, *one.answer], torch.device("cpu")) for one in found.sequences
    ]
    assert found.states.dtype == torch.bfloat16 and not found.states.is_inference()
    torch.testing.assert_close(found.states.double(), torch.cat(expected).double(), rtol=2e-2, atol=2e-2)


def test_states_are_the_same_wherever_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SHARD_SEQUENCES", 3)
    made, texts = assembled("llama"), sequences(8)
    total = sum(len(one) for one in texts) * made.model.hidden * 2
    order = [5, 7, 1, 0, 6, 4]
    expected = HiddenStates(made, texts, None, total).examples(order).states
    for most in (0, total // 2, total):
        folder = tmp_path / str(most)
        assert torch.equal(HiddenStates(made, texts, folder, most).examples(order).states, expected)
        kept = sum(file.stat().st_size for file in folder.glob("*")) if folder.exists() else 0
        assert kept <= most + 200 * len(list(folder.glob("*"))), "more was kept than allowed"
    assert len(list((tmp_path / str(total)).glob("*.safetensors"))) == 3


def test_files_of_an_earlier_run_are_read_and_damaged_ones_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, texts = assembled("llama"), sequences(5)
    expected = HiddenStates(made, texts, tmp_path, 1 << 30).examples(range(5)).states
    with monkeypatch.context() as patch:
        patch.setattr(HiddenStates, "_run", lambda self, group: pytest.fail("computed again"))
        assert torch.equal(HiddenStates(made, texts, tmp_path, 1 << 30).examples(range(5)).states, expected)
    file = tmp_path / "00000.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert torch.equal(HiddenStates(made, texts, tmp_path, 1 << 30).examples(range(5)).states, expected)
