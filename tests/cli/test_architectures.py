"""`bankfull roofline --architectures` from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull.limits.model.architectures import architectures
from tests.cli.conftest import Cli


def test_the_command_prints_json_and_draws_files(cli: Cli, tmp_path: Path) -> None:
    made = cli("roofline", "--architectures", "--device", "l4", "--context", "512", "--json", "--charts", tmp_path)
    assert [one["name"] for one in made.json["architectures"]] == [one.name for one in architectures()]
    assert all(point["seconds_per_token"] > 0 for one in made.json["architectures"] for point in one["points"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["architectures-state.svg", "architectures-time.svg"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm3"], "leave the model and its options out"),
        (["--quantize", "int4"], "leave the model and its options out"),
        (["--batch", "1,2"], "takes one batch size"),
        (["--context", "9999999"], "contexts up to 1048576 tokens"),
        (["--context", "0"], "cannot run 1 tokens"),
    ],
    ids=["model", "option", "batches", "long", "empty"],
)
def test_wrong_input_is_refused_in_one_sentence(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli("roofline", "--architectures", "--device", "h200", *arguments).sentence
