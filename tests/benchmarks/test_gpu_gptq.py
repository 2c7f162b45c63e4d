"""The benchmark of GPTQ's time, as far as it runs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gptq
from benchmarks.gpu.gptq import QuantizeTime

SHAPE = "llama-3.1-8b-tiny"


@pytest.fixture
def deep(tmp_path: Path) -> str:
    """A tiny model of five layers."""
    from bankfull.synthetic.shapes import shape_config

    path = tmp_path / "deep.json"
    path.write_text(json.dumps({**shape_config(SHAPE), "num_hidden_layers": 5}))
    return str(path)


def test_each_layer_is_timed_and_the_whole_model_is_labelled_extrapolated(
    deep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    asked = ["--shape", deep, "--layers", "3", "--device", "cpu", "--tokens", "64", "--json", str(file)]
    assert gptq.main(asked) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert len(found["layers"]) == 3 and min(found["layers"]) > 0 and sum(found["layers"]) <= found["total"]
    assert found["extrapolated"] == pytest.approx(found["total"] + 2 * found["layers"][1])
    assert "whole model of 5 layers" in said and "extrapolated from 3 layers" in said and found["tokens"] == 64


def test_a_model_that_is_quantized_whole_is_not_extrapolated() -> None:
    whole = QuantizeTime("m", "CPU", 8, [3.0, 1.0, 2.0], 7.0, 3, None)
    assert whole.extrapolated == 7.0 and "7.0 s, measured" in whole.text() and "extrapolated" not in whole.text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--layers", "2", "--device", "cpu"], "--layers 2 is too few"),
        (["--layers", "4", "--device", "cpu", "--tokens", "0"], "--tokens 0 gives no calibration text"),
        (["--shape", "llama-9-8b", "--device", "cpu"], "There is no shape 'llama-9-8b'"),
        (["--layers", "9", "--device", "cpu", "--shape", SHAPE], "--layers 9 must be from 1 to"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gptq.main(options) == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run on the GPU")
def test_without_a_gpu_it_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gptq.main(["--shape", SHAPE]) == 2
    assert "not available" in capsys.readouterr().err
