"""Workloads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from bankfull.bench.load.workloads import (
    BLOCK_TOKENS,
    RecordedTrace,
    ShareGpt,
    Synthetic,
    TextPrompts,
    TokenIdPrompts,
    parse_lengths,
    pool,
    prompt_generator,
)
from bankfull.errors import ConfigError


class Letters:
    """A server whose tokens are letters."""

    def tokenize(self, text: str) -> list[int] | None:
        return [ord(letter) for letter in text] or None


class Silent:
    def tokenize(self, text: str) -> list[int] | None:
        return None


IDS = TokenIdPrompts(Letters(), range(100, 200))


def test_lengths_are_fixed_even_or_log_normal() -> None:
    numbers = random.Random(0)
    assert {parse_lengths("512").draw(numbers) for _ in range(20)} == {512}
    even = [parse_lengths("100-300").draw(numbers) for _ in range(20_000)]
    assert (min(even), max(even)) == (100, 300) and fmean(even) == pytest.approx(200, rel=0.02)
    skewed = [parse_lengths("400~0.8").draw(numbers) for _ in range(40_000)]
    assert fmean(skewed) == pytest.approx(400, rel=0.03)
    assert pstdev(skewed) / fmean(skewed) == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("bad", ["", "0", "-3", "9-5", "many", "5-", "1.5", "10~20", "99999999", "5~x", "7 8"])
def test_bad_lengths_are_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(bad)


def test_synthetic_prompts_have_their_lengths_and_never_repeat() -> None:
    made = Synthetic(parse_lengths("20-40"), parse_lengths("7")).make(200, 1, IDS)
    turns = [conversation.turns[0] for conversation in made]
    assert all(len(turn.prompt) == turn.tokens and 20 <= len(turn.prompt) <= 40 for turn in turns)
    assert {turn.max_tokens for turn in turns} == {7}
    assert len({tuple(turn.prompt) for turn in turns}) == 200
    again = Synthetic(parse_lengths("20-40"), parse_lengths("7")).make(200, 1, IDS)
    assert made == again != Synthetic(parse_lengths("20-40"), parse_lengths("7")).make(200, 2, IDS)


def test_shared_prefixes_are_few_and_the_same_for_every_seed() -> None:
    workload = Synthetic(parse_lengths("5"), parse_lengths("1"), prefixes=3, prefix_tokens=32)
    first, second = (workload.make(60, seed, IDS) for seed in (1, 2))
    heads = {tuple(one.turns[0].prompt[:32]) for one in first}
    assert len(heads) == 3 and heads == {tuple(one.turns[0].prompt[:32]) for one in second}
    assert {one.turns[0].tokens for one in first} == {37}
    assert len({tuple(one.turns[0].prompt[32:]) for one in first}) == 60


def test_turns_follow_and_only_the_first_has_the_prefix() -> None:
    workload = Synthetic(parse_lengths("4"), parse_lengths("2"), prefixes=1, prefix_tokens=8, turns=3)
    assert [len(turn.prompt) for turn in workload.make(1, 0, IDS)[0].turns] == [12, 4, 4]


def test_text_is_as_many_tokens_as_the_server_counts_on_average() -> None:
    words, numbers = TextPrompts(Letters()), random.Random(3)
    lengths = [len(words.take(numbers, 2000)) for _ in range(20)]
    assert fmean(lengths) == pytest.approx(2000, rel=0.05)
    assert TextPrompts().count("x" * 400) == 100, "four characters per token without a tokenizer"


def test_prompts_are_ids_if_the_server_tokenizes_and_text_otherwise() -> None:
    assert isinstance(prompt_generator(Letters()), TokenIdPrompts)
    assert isinstance(prompt_generator(Letters(), "text"), TextPrompts)
    assert isinstance(prompt_generator(Silent()), TextPrompts)
    assert len(pool()) > 500
    with pytest.raises(ConfigError, match="no /tokenize"):
        prompt_generator(Silent(), "ids")
    with pytest.raises(ConfigError, match="use auto, ids or text"):
        prompt_generator(Letters(), "runes")


TALKS = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi there"},
            {"from": "human", "value": "And?"},
            {"from": "gpt", "value": "No more"},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "Alone"}]},
    {"id": "c", "messages": [{"role": "user", "content": "Why"}, {"role": "assistant", "content": "Because"}]},
    {"id": "d", "conversations": []},
]


def test_sharegpt_files_give_questions_and_the_lengths_of_their_answers(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(TALKS))
    words = TextPrompts(Letters())
    made = ShareGpt(path, turns=2).make(2, 0, words)
    found = {tuple((turn.prompt, turn.max_tokens) for turn in one.turns) for one in made}
    assert found == {(("Hello", 8), ("And?", 7)), (("Why", 7),)}
    assert {len(one.turns) for one in ShareGpt(path).make(2, 0, words)} == {1}
    assert {one.turns[0].max_tokens for one in ShareGpt(path, parse_lengths("5")).make(9, 0, words)} == {5}, "in turn"


def test_a_mooncake_trace_keeps_times_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]},
        {"timestamp": 3000, "input_length": 1030, "output_length": 2, "hash_ids": [7, 8, 10]},
        {"timestamp": 3500, "input_length": 40, "output_length": 0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    made = RecordedTrace(path, speed=2.0).make(10, 0, IDS)
    assert [one.at for one in made] == [0.0, 0.25, 1.0]
    first, short, last = (one.turns[0] for one in made)
    assert [len(turn.prompt) for turn in (first, short, last)] == [1030, 40, 1100]
    assert [turn.max_tokens for turn in (first, short, last)] == [2, 1, 3]
    shared = 2 * BLOCK_TOKENS
    assert first.prompt[:shared] == last.prompt[:shared] and first.prompt[shared:] != last.prompt[shared:1030]
    assert len(RecordedTrace(path).make(2, 0, IDS)) == 2


def test_an_azure_trace_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    made = RecordedTrace(path).make(10, 0, IDS)
    assert [one.at for one in made] == [0.0, pytest.approx(4.314579, abs=1e-5)]
    assert [(len(one.turns[0].prompt), one.turns[0].max_tokens) for one in made] == [(374, 44), (396, 109)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", "{", "Line 1 of the trace"),
        ("a.jsonl", '{"timestamp": 1}', "input_length"),
        ("a.jsonl", "", "contains no request"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}', "a request of 0 "),
        ("a.csv", "x,y\n1,2\n", "lacks TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,2\n", "Line 2"),
    ],
)
def test_bad_traces_are_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        RecordedTrace(tmp_path / name).make(5, 0, IDS)


@pytest.mark.parametrize("text", ["{", "{}", '[{"conversations": 3}]', "[]", "\xff"])
def test_bad_conversations_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        ShareGpt(tmp_path / "bad.json").make(5, 0, TextPrompts())


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for workload in (ShareGpt(tmp_path / "none"), RecordedTrace(tmp_path / "none")):
        with pytest.raises(ConfigError, match="cannot be read"):
            workload.make(5, 0, IDS)


@pytest.mark.parametrize("bad", [{"prefixes": 2}, {"prefix_tokens": 9}, {"turns": 0}, {"prefixes": -1}])
def test_workloads_that_make_no_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Synthetic(parse_lengths("5"), parse_lengths("5"), **bad)
    with pytest.raises(ConfigError):
        RecordedTrace(Path("x"), speed=0.0)
