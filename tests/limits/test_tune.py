"""Tuning: the fastest correct plan wins, on the model's real shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bankfull.cli.app import run_command
from bankfull.cli.tune import ROWS, as_json, parse_rows, timings_table
from bankfull.errors import ConfigError
from bankfull.limits.tune import ShapeTiming, shapes_of, timings_of
from bankfull.synthetic.random_weights import random_model
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.source import open_model
from tests.tiny import folder_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Named:
    name: str


class Fakes:
    """Plans with given times: one computes wrongly, one supports few rows only, one is the default."""

    CANDIDATES: Sequence[Named] = tuple(map(Named, ("usual", "few", "wrong", "best")))
    COST: dict[str, float] = {"usual": 3.0, "few": 1.0, "wrong": 0.1, "best": 2.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.used: set[int] = set()

    def heuristic(self, rows: int, outer: int, inner: int, dtype: torch.dtype, device: torch.device) -> Named:
        return self.CANDIDATES[0]

    def run_plan(self, plan: Named, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.last = plan.name
        self.used.add(weight.data_ptr())
        if plan.name == "few" and len(x) > 2:
            raise RuntimeError("out of resources")
        return torch.nn.functional.linear(x, weight, bias) * (1.1 if plan.name == "wrong" else 1.0)

    def timer(self, work: Callable[[int], Tensor], copies: int) -> float:
        for copy in range(copies):
            work(copy)
        return self.COST[self.last]


def timings(rows: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[list[ShapeTiming | None], Fakes]:
    fakes = Fakes()
    return list(timings_of([(24, 16), (8, 16)], rows, dtype, CPU, fakes, fakes.timer, 4096)), fakes


def test_the_fastest_plan_that_runs_and_is_right_wins() -> None:
    found, _ = timings([1, 2, 8])
    assert [timing.entry.plan for timing in found if timing] == ["few", "few", "best"] * 2
    assert [timing.gain for timing in found if timing] == [3.0, 3.0, 1.5] * 2
    first = found[0]
    assert first is not None and first.usual == "usual"
    assert (first.entry.rows, first.entry.outer, first.entry.inner, first.entry.dtype) == (1, 24, 16, "float32")
    assert first.bytes == 4 * (24 * 16 + 24 + 16)


def test_weights_take_turns_so_that_the_cache_does_not_hold_them() -> None:
    _, fakes = timings([1])
    assert len(fakes.used) >= 3 * 4096 // (24 * 16 * 4)


def test_no_plan_at_all_is_no_timing() -> None:
    fakes = Fakes()
    fakes.CANDIDATES = (Named("wrong"),)
    assert list(timings_of([(8, 16)], [1], torch.float32, CPU, fakes, fakes.timer, 4096)) == [None]


def test_shapes_are_those_of_the_stacked_layers_and_of_the_head() -> None:
    files = random_model("8b", shape_config("llama-3-8b"), torch.bfloat16, torch.device("meta"))
    found = shapes_of(files)
    assert set(found) == {(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)}
    assert found[0] == (28672, 4096)


def test_a_model_without_attention_has_shapes_too() -> None:
    assert shapes_of(open_model(folder_of("mamba")))


@pytest.mark.parametrize("text", ("", "0", "1,", "1,1", "a", "-3", "1.5", "99999999", "1" * 5000, "²"))
def test_rows_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a list of distinct numbers"):
        parse_rows(text)


def test_rows_are_sorted_numbers() -> None:
    assert parse_rows("8, 1,512") == [1, 8, 512] and len(parse_rows(ROWS)) == 10


def test_timings_are_shown_and_told() -> None:
    found = [timing for timing in timings([1, 8])[0] if timing]
    assert timings_table(found).row_count == 4
    told = as_json(found[0])
    assert told["plan"] == "few" and told["gain"] == 3.0 and told["microseconds"] == 1e6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["tune", "-m", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "there is none here" in shown and shown.count("\n") == 1
