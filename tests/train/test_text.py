"""Prompts, and the text that the model writes: complete, repeatable, and continued after an interruption."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError, RequestError
from bankfull.train.prompts import TASKS, TOPICS, own_prompts, read_prompts, repeated
from bankfull.train.text import DATA, OwnAnswer, OwnText, OwnTextOptions, frequent_tokens

PROMPTS = own_prompts(9, seed=1)
OPTIONS = OwnTextOptions(PROMPTS, seed=3, temperature=0.8, answer_tokens=12)


def ignore(done: int, note: str) -> None:
    pass


def lines(folder: Path) -> dict[int, tuple[list[int], list[int]]]:
    records = [json.loads(line) for line in (folder / DATA).read_text().splitlines()]
    assert len({record["index"] for record in records}) == len(records)
    return {record["index"]: (record["prompt"], record["answer"]) for record in records}


def test_own_prompts_are_all_different_until_all_have_occurred() -> None:
    pairs = len(TASKS) * len(TOPICS)
    found = own_prompts(pairs + 5, seed=2)
    assert len(set(found[:pairs])) == pairs and found[pairs:] == found[:5]
    assert own_prompts(20, seed=2) == found[:20] != own_prompts(20, seed=3)
    assert all("{" not in prompt for prompt in found)


def test_the_model_answers_every_prompt_with_its_own_seed(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OPTIONS)
    seen: list[int] = []
    assert text.missing == list(range(9))
    assert text.write(llm, None, lambda done, note: seen.append(done)) and text.missing == []
    assert seen == list(range(1, 10))
    found = lines(tmp_path)
    for index in (0, 5):
        params = SamplingParams(temperature=0.8, max_tokens=12, seed=(3 << 32) + index)
        expected = llm.chat([{"role": "user", "content": PROMPTS[index]}], params)[0]
        assert found[index] == (expected.prompt_token_ids, expected.outputs[0].token_ids)
    assert not llm.loaded.frontend.pending and llm.loaded.frontend.engine.scheduler.sealed


def test_an_interrupted_text_is_continued_with_what_is_missing(llm: LLM, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    OwnText(whole, OPTIONS).write(llm, None, ignore)
    written = (whole / DATA).read_bytes().splitlines(keepends=True)
    (cut / DATA).write_bytes(b"".join(written[:4]) + written[4][:20])  # as kill -9 may leave it
    text = OwnText(cut, OPTIONS)
    assert len(text.missing) == 5
    assert text.write(llm, None, ignore)
    assert lines(cut) == lines(whole)
    assert OwnText(cut, OPTIONS).split(4) == OwnText(whole, OPTIONS).split(4)


def test_a_slice_continues_the_answers_that_the_last_one_had_begun(llm: LLM, tmp_path: Path) -> None:
    whole, slices = tmp_path / "whole", tmp_path / "slices"
    whole.mkdir(), slices.mkdir()
    OwnText(whole, OPTIONS).write(llm, None, ignore)
    runs = 0
    while (text := OwnText(slices, OPTIONS)).missing:
        ticks = itertools.count()
        with pytest.MonkeyPatch.context() as patch:  # a clock of steps: each slice is a few of them
            patch.setattr("bankfull.train.text.time", SimpleNamespace(monotonic=lambda ticks=ticks: float(next(ticks))))
            text.write(llm, 6.0, ignore)
        runs += 1
        assert runs < 40
    assert runs > 3 and lines(slices) == lines(whole)


def test_no_answer_is_begun_after_the_deadline(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OPTIONS)
    assert not text.write(llm, time.monotonic() - 1, ignore)
    assert text.missing == list(range(9)) and not llm.loaded.frontend.engine.busy


def test_a_prompt_is_held_out_or_trained_on(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"index": i, "prompt": [1, i % 23], "answer": [5] * (2 + i % 5)} for i in range(69)
    ]
    (tmp_path / DATA).write_text("".join(json.dumps(record) + "\n" for record in records))
    options = OwnTextOptions([str(i % 23) for i in range(69)], 0, 0.7, 12)
    train, held = OwnText(tmp_path, options).split(3)
    assert {one.prompt for one in train}.isdisjoint(one.prompt for one in held)
    assert len({one.prompt for one in held}) == 1 < len(held), "all answers to one prompt of the first twenty"
    assert len(held) + len(train) == sum(len(record["answer"]) >= 3 for record in records)
    assert all(len(one.answer) >= 3 for one in (*train, *held))


def test_one_prompt_is_too_few(tmp_path: Path) -> None:
    (tmp_path / DATA).write_text(json.dumps({"index": 0, "prompt": [1], "answer": [5, 6, 7]}) + "\n")
    with pytest.raises(ConfigError, match="Only 1 different prompts have an answer of 2 tokens or more"):
        OwnText(tmp_path, OwnTextOptions(["a"], 0, 0.7, 12)).split(2)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / DATA).write_text('{"index": 0, "prompt": [1], "answer": [2]}\n{"index": 99}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*data\.jsonl is damaged"):
        OwnText(tmp_path, OPTIONS)


def test_a_prompt_that_the_model_cannot_take_is_named(llm: LLM, tmp_path: Path) -> None:
    text = OwnText(tmp_path, OwnTextOptions(["short", "long " * 500], 0, 0.7, 12))
    with pytest.raises(RequestError, match="Prompt 2: The prompt has"):
        text.write(llm, None, ignore)
    assert not llm.loaded.frontend.engine.busy


def test_frequent_tokens_come_first_and_low_ids_fill_up() -> None:
    answers = [OwnAnswer((9,), (5, 5, 7, 7, 7, 3)), OwnAnswer((9,), (7, 8))]
    assert frequent_tokens(answers, 2, 20) == [5, 7]
    assert frequent_tokens(answers, 3, 20) == [3, 5, 7]
    assert frequent_tokens(answers, 6, 20) == [0, 1, 3, 5, 7, 8]
    assert frequent_tokens(answers, 99, 10) == list(range(10))


def test_prompts_are_read_from_lines_and_from_json(tmp_path: Path) -> None:
    plain, records = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\n\n  two \n")
    records.write_text('{"prompt": "one"}\n{"prompt": "two", "id": 4}\n')
    assert read_prompts(plain) == ["one", "  two "] and read_prompts(records) == ["one", "two"]
    assert repeated(["a", "b"], 3) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", b"", "holds no prompts"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": 3}\n', 'Line 1 of .* is not a JSON object with a "prompt"'),
        ("a.jsonl", b"[1]\n", "Line 1 of"),
        ("a.txt", b"x" * 70_000, "more than 65536 characters"),
    ],
)
def test_bad_files_of_prompts_are_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        read_prompts(tmp_path / name)


def test_a_missing_file_of_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.txt cannot be read"):
        read_prompts(tmp_path / "gone.txt")
