"""`train`: a drafter from a model and nothing else, in one run or in slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.weights.eagle import WEIGHTS as EAGLE_WEIGHTS
from bankfull.weights.eagle import read_eagle
from bankfull.weights.medusa import CONFIG, TREE, WEIGHTS, read_heads
from bankfull.weights.streams import STREAMS, read_streams
from tests.train.looping import looping_folder

from .conftest import Cli

SHORT = ("--count", 10, "--answer-tokens", 16, "--vocabulary", 64, "--heads", 2, "--rate", 0.02)


def test_heads_are_trained_and_reported(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    done = cli("train", "medusa", looping_folder(), "-o", out, *SHORT, "--steps", 40, "--measure-every", 20)
    assert done.code == 0, done.err
    assert "draft position" in done.out and "tokens per step" in done.out and "expected gain" in done.out
    assert "best: " in done.out and f"use: --speculative medusa:{out},nodes=" in done.out
    assert all(name in done.out for name in (WEIGHTS, TREE, CONFIG))
    heads = read_heads(out)
    assert len(heads.blocks) == 2 and heads.vocabulary is not None and len(heads.vocabulary) == 64

    asked = ("run", "The river", "-m", looping_folder(), "--temperature", 0, "--max-tokens", 12, "--no-limit")
    plain = cli(*asked, "--speculative", "off")
    for how in ("", ",nodes=3", ",tree=chain"):
        drafted = cli(*asked, "--speculative", f"medusa:{out}{how}")
        assert drafted.code == 0 and drafted.out == plain.out != ""

    again = cli("train", "medusa", looping_folder(), "-o", out, *SHORT, "--steps", 40, "--json")
    assert again.code == 0 and again.json["finished"] and again.json["steps"] == 40
    report = again.json
    assert report["acceptance_by_position"][0] > report["acceptance_before"][0]
    assert [one["step"] for one in report["measured"]] == [0, 20, 40]
    assert {one["kind"] for one in report["choices"]} == {"chain", "tree"}
    assert report["best"]["expected_gain"] == max(one["expected_gain"] for one in report["choices"])
    assert report["files"][WEIGHTS] == (out / WEIGHTS).stat().st_size


def test_a_draft_model_is_trained_and_reported(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "small"
    asked = ("train", "draft", looping_folder(), "-o", out, "--count", 10, "--answer-tokens", 16, "--rate", 0.01)
    done = cli(*asked, "--steps", 40, "--measure-every", 20, "--depth", 3)
    assert done.code == 0, done.err
    assert "a draft model of " in done.err and "before anything is measured" in done.err
    assert "draft position" in done.out and "best: chain of " in done.out and "tree" not in done.out
    assert f"use: --speculative draft:{out},depth=" in done.out and "model.safetensors" in done.out

    again = cli(*asked, "--steps", 40, "--depth", 3, "--json")
    assert again.code == 0 and again.json["finished"], "the size of the first run is kept"
    assert again.json["acceptance_by_position"][0] > again.json["acceptance_before"][0]

    run = ("run", "The river", "-m", looping_folder(), "--temperature", 0, "--max-tokens", 12, "--no-limit")
    plain = cli(*run, "--speculative", "off")
    drafted = cli(*run, "--speculative", f"draft:{out},depth=3")
    assert drafted.code == 0 and drafted.out == plain.out != ""
    assert "--width 100 is not a multiple of 64; give 128" in cli(*asked, "--width", 100).sentence


@pytest.mark.full
def test_streams_are_trained_and_draft(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "streams"
    short = ("--count", 10, "--answer-tokens", 16, "--vocabulary", 64, "--streams", 2, "--layers", 1, "--rank", 8)
    done = cli("train", "streaming", looping_folder(), "-o", out, *short, "--rate", 0.02, "--steps", 40)
    assert done.code == 0, done.err
    assert "draft position" in done.out and f"use: --speculative streaming:{out},nodes=" in done.out
    assert all(name in done.out for name in (STREAMS, TREE, CONFIG)) and read_streams(out).count == 2

    asked = ("run", "The river", "-m", looping_folder(), "--temperature", 0, "--max-tokens", 12, "--no-limit")
    plain = cli(*asked, "--speculative", "off")
    for choice in ("streaming", "tree-streaming"):
        for how in ("", ",nodes=3"):
            drafted = cli(*asked, "--speculative", f"{choice}:{out}{how}")
            assert drafted.code == 0 and drafted.out == plain.out != ""


def test_an_eagle_head_is_trained_and_drafts(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "head"
    short = ("--count", 10, "--answer-tokens", 16, "--vocabulary", 64, "--depth", 2, "--inner", 32, "--rate", 0.01)
    first = ("train", "eagle", looping_folder(), "-o", out, *short, "--steps", 30, "--measure-every", 15)
    done = cli(*first, "--minutes", 0.001, "--json")
    assert done.code == 0 and not done.json["finished"] and "the same command continues" in done.err
    done = cli(*first)
    assert done.code == 0, done.err
    assert f"use: --speculative eagle:{out}," in done.out and "expected gain" in done.out
    assert all(name in done.out for name in (EAGLE_WEIGHTS, TREE, CONFIG))
    assert read_eagle(out).acceptance is not None
    asked = ("run", "The river", "-m", looping_folder(), "--temperature", 0, "--max-tokens", 12, "--no-limit")
    plain = cli(*asked, "--speculative", "off")
    for how in ("", ",nodes=3,branch=2", ",tree=chain,depth=2"):
        drafted = cli(*asked, "--speculative", f"eagle:{out}{how}")
        assert drafted.code == 0 and drafted.out == plain.out != ""
    wrong = cli(*asked, "--speculative", f"eagle:{out},tree=sparse")
    assert "tree must be dynamic or chain" in wrong.sentence


@pytest.mark.full
def test_a_slice_that_ends_early_says_how_to_go_on(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    first = ("train", "medusa", looping_folder(), "-o", out, *SHORT, "--steps", 100_000)
    done = cli(*first, "--minutes", 0.05, "--json")
    assert done.code == 0 and not done.json["finished"] and "the same command continues" in done.err
    other = cli("train", "medusa", looping_folder(), "-o", out, *SHORT, "--steps", 5)
    assert "belongs to a run with another steps" in other.sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "Choose what to train: medusa, eagle, streaming"),
        (("medusa", "nowhere/at/all", "-o", "x"), "nowhere/at/all"),
        (("medusa", "MODEL"), "--output"),
        (("medusa", "MODEL", "-o", "x", "--prompts", "gone.txt"), "gone.txt cannot be read"),
        (("medusa", "MODEL", "-o", "x", "--heads", "99"), "--heads"),
        (("streaming", "MODEL", "-o", "x", "--layers", "2"), "Streams in 2 top layers are not possible"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [str(looping_folder()) if word == "MODEL" else word for word in arguments]
    assert sentence in cli("train", *given).sentence
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ("medusa", "has trained heads for SmolLM2-135M-Instruct only"),
        ("medusa:nowhere", "nowhere is not a directory of Medusa heads"),
        ("suffix:heads", "takes no model"),
        ("medusa:heads,width=3", "has no option 'width'; its options are nodes, tree"),
        ("streaming", "needs streams: streaming:PATH"),
        ("tree-streaming:nowhere", "nowhere is not a directory of streams"),
        ("tree-streaming:streams,tree=chain", "has no option 'tree'; its options are nodes"),
        ("medusa:heads,nodes=64", "nodes must be a whole number from 1 to 63"),
    ],
)
def test_a_wrong_choice_of_heads_is_refused(cli: Cli, choice: str, sentence: str) -> None:
    done = cli("run", "The river", "-m", looping_folder(), "--speculative", choice)
    assert sentence in done.sentence
