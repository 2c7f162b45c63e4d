"""`bankfull make-model` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.weights.known_shapes import shape_names
from tests.cli.conftest import Cli


def test_a_shape_becomes_a_model_that_other_commands_take(cli: Cli, tmp_path: Path) -> None:
    made = cli(
        "make-model", "smollm2-135m", "-o", tmp_path / "m", "--scale", "tiny", "--layers", 1, "--dtype", "float32"
    )
    assert made.code == 0 and made.out.strip() == str(tmp_path / "m") and "random parameters written" in made.err
    info = cli("info", tmp_path / "m", "--json").json
    assert (info["layers"], info["architecture"], info["chat_template"]) == (1, "llama", True)
    assert list(info["bytes_by_scheme"]) == ["f32"]


def test_a_gguf_file_is_written_instead_of_a_directory(cli: Cli, tmp_path: Path) -> None:
    made = cli("make-model", "qwen3-8b", "-o", tmp_path / "m", "--scale", "tiny", "--gguf", "Q4_0")
    assert made.out.strip() == str(tmp_path / "m" / "qwen3-8b-tiny.Q4_0.gguf")
    assert cli("info", tmp_path / "m", "--json").json["architecture"] == "qwen3"


def test_shapes_are_listed_with_their_families(cli: Cli) -> None:
    shown = cli("make-model", "--list").out.splitlines()
    assert [line.split()[0] for line in shown] == shape_names() and shown[0].split()[1] == "llama"
    assert cli("make-model").out.splitlines() == shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm2-135m"], "needs a directory for the model: give -o DIR"),
        (["nothing-like-it", "-o", "x"], "There is no shape 'nothing-like-it'"),
        (["smollm2-135m", "-o", "x", "--scale", "huge"], "--scale 'huge' is unknown; use real or tiny"),
        (["smollm2-135m", "-o", "x", "--layers", "31"], "--layers 31 must be from 1 to 30"),
        (["smollm2-135m", "-o", "x", "--dtype", "int3"], "dtype='int3' is unknown"),
        (["smollm2-135m", "-o", "x", "--gguf", "q9"], "--gguf 'q9' is not a type of matrices"),
    ],
    ids=["output", "shape", "scale", "layers", "dtype", "gguf"],
)
def test_wrong_input_is_refused_in_one_sentence(
    cli: Cli, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli("make-model", *arguments).sentence
    assert not list(tmp_path.iterdir())
