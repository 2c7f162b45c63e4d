"""Tasks of small language models: what a batch holds, and that a training continues as if it had never stopped."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError
from bankfull.train.lm.run import LmReport, LmTraining, train_lm
from bankfull.train.lm.tasks import HELD_OUT, IGNORED, CopyTask, RecallTask, TextWindows
from bankfull.train.lm.vocabulary import byte_tokenizer, encoded_text, word_tokenizer
from bankfull.weights.drafter_files import read_tensors
from tests.models.composed import SIZES
from tests.quick import examples


@examples(30)
@given(st.integers(1, 6), st.integers(0, 9), st.integers(13, 40), st.integers(0, 1 << 41))
def test_every_query_asks_for_the_value_of_its_pair(pairs: int, more: int, vocab: int, number: int) -> None:
    task = RecallTask(vocab, 4 * pairs + more, pairs, seed=3)
    made = task.batch(number, 5)
    assert made.tokens.shape == made.targets.shape == (5, 4 * pairs + more)
    for line, targets in zip(made.tokens.tolist(), made.targets.tolist(), strict=True):
        known = dict(zip(line[: 2 * pairs : 2], line[1 : 2 * pairs : 2], strict=True))
        assert len(known) == pairs and all(1 <= k <= task.keys < v <= 2 * task.keys for k, v in known.items())
        asked = {place: target for place, target in enumerate(targets) if target != IGNORED}
        assert {line[place]: target for place, target in asked.items()} == known and min(asked) >= 2 * pairs
        assert all(token == 0 for place, token in enumerate(line[2 * pairs :], 2 * pairs) if place not in asked)


def test_batches_differ_and_repeat() -> None:
    task = RecallTask(33, 32, 4, seed=1)
    first, again, other = task.batch(0, 8), task.batch(0, 8), task.batch(HELD_OUT, 8)
    assert torch.equal(first.tokens, again.tokens) and not torch.equal(first.tokens, other.tokens)


def test_a_copy_repeats_its_symbols() -> None:
    made = CopyTask(9, 11, seed=0).batch(4, 3)
    assert torch.equal(made.tokens[:, :5], made.tokens[:, 6:]) and (made.tokens[:, 5] == 0).all()
    counted = made.targets != IGNORED
    assert counted.sum(1).tolist() == [5] * 3 and torch.equal(made.targets[counted].view(3, 5), made.tokens[:, :5])


def test_text_is_cut_into_windows_and_its_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(200)) + b"\xff" * 20)
    text = encoded_text(tmp_path / "text", None, 256)
    task = TextWindows(text.ids, 9, seed=0, digest=text.digest)
    made = task.batch(0, 50)
    assert torch.equal(made.targets, made.tokens + 1), "the next byte, and nothing of the end"
    assert (task.batch(HELD_OUT, 5).tokens >= 200).all()
    assert byte_tokenizer() == text.tokenizer


def report_of(folder: Path, config: dict[str, object], steps: int, deadline: float | None = None) -> LmReport:
    task = RecallTask(33, 24, 3, seed=0)
    how = LmTraining(
        steps, 8, 3e-3, 0, 4, torch.device("cpu"), deadline, lambda *_: nullcontext(lambda count, note: None)
    )
    return train_lm(config, task, word_tokenizer(task.words()), how, folder)


@pytest.mark.full
def test_a_continued_training_is_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**SIZES, "vocab_size": 33, "layers": "attention, mamba(4, feed=none)"}
    whole = report_of(tmp_path / "whole", config, 10)
    assert whole.finished and whole.loss < whole.measured[0]["held_out_loss"]
    past = iter([False] * 6 + [True] * 9)
    with monkeypatch.context() as patched:
        patched.setattr("bankfull.train.loop._past", lambda deadline: next(past))
        half = report_of(tmp_path / "parts", config, 10, deadline=0.0)
    assert half.steps == 6 and not half.finished
    parts = report_of(tmp_path / "parts", config, 10)
    assert (parts.accuracy, parts.loss) == (whole.accuracy, whole.loss)
    first, second = (read_tensors(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: RecallTask(9, 64, 5, 0), "--pairs 5 needs as many keys"),
        (lambda: RecallTask(33, 11, 3, 0), "give 12"),
        (lambda: CopyTask(2, 9, 0), "vocabulary of 3"),
        (lambda: CopyTask(9, 8, 0), "must be odd"),
        (lambda: TextWindows(torch.arange(30), 20, 0, ""), "needs 42"),
    ],
)
def test_a_task_that_cannot_be_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()  # type: ignore[operator]
