"""`bankfull quantize` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bankfull.quantize.gptq import Gptq
from bankfull.quantize.method import LayerData
from tests.cli.conftest import Cli
from tests.quantize.models import random_folder
from tests.tiny import CORPUS, speaking_folder

SMALL = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}


def test_a_model_is_quantized_and_the_last_line_runs_it(cli: Cli, tmp_path: Path) -> None:
    done = cli("quantize", speaking_folder(), "--group", 32, "-o", tmp_path / "q")
    assert done.code == 0 and done.out.strip() == f"bankfull chat --model {tmp_path / 'q'}"
    # The matrices of 48 columns fit no group.
    assert "4.50 bits per weight in 12 matrices" in done.err and "2 matrices fit no group" in done.err
    answer = cli("run", "the river", "--model", tmp_path / "q", "--max-tokens", 4)
    assert answer.code == 0 and answer.out
    info = cli("info", tmp_path / "q", "--json").json
    assert "int4_g32" in info["bytes_by_scheme"]


def test_json_has_every_number(cli: Cli, tmp_path: Path) -> None:
    found = cli("quantize", random_folder(tmp_path / "m"), "--bits", 8, "-o", tmp_path / "q", "--json").json
    assert found["path"] == str(tmp_path / "q") and found["command"] == f"bankfull chat --model {tmp_path / 'q'}"
    assert found["bits_per_weight"] < 8.3 and found["bytes_after"] < found["bytes_before"] and found["kept"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("gptq", "--group", 32),
        ("awq", "--group", 64, "--asymmetric"),
        ("smoothquant", "--alpha", 0.6),
        ("int8",),
        ("fp8", "--activations", "static"),
        ("awq", "--group", 32, "--ablate", "0.02:weights"),
        ("mixed", "--bits", 5.5),
        ("sparsegpt", "--sparsity", "2:4"),
        ("wanda", "--sparsity", "2:4", "--format", "safetensors"),
        ("wanda", "--sparsity", "50%"),
        ("qat", "--bits", 2, "--group", 32, "--steps", 1),
    ],
    ids=["gptq", "awq", "smoothquant", "int8", "fp8", "ablate", "mixed", "sparsegpt", "wanda-zeros", "wanda", "qat"],
)
def test_calibrated_methods_take_a_text(arguments: tuple[object, ...], cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(CORPUS)
    folder = random_folder(tmp_path / "m", num_hidden_layers=1, **SMALL)
    made = cli("quantize", folder, "--method", *arguments, "--calibration", tmp_path / "text.txt", "-o", tmp_path / "q")
    assert made.code == 0, made.err
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert ("quantization_config" in config) != bool({"--ablate", "50%", "safetensors"} & set(arguments))
    assert config["made_with"]["method"] == arguments[0]
    assert cli("run", "the river", "--model", tmp_path / "q", "--max-tokens", 2).code == 0
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m", "q", "text.txt"]


def test_saved_outliers_answer_as_load_in_8bit_does(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path / "cache"))
    folder = random_folder(tmp_path / "m", num_hidden_layers=1, **SMALL)
    told = cli("quantize", folder, "--method", "int8", "-o", tmp_path / "q", "--json").json
    assert 8.0 < told["bits_per_weight"] < 9.5 and told["quantized"] == 7 and told["kept"] == 0
    assert len(list((tmp_path / "cache").glob("outliers-*.json"))) == 1, "the next load is not calibrated again"
    assert cli("info", tmp_path / "q", "--json").json["quantization"].startswith("bankfull-int8")
    answers = [
        cli("run", "the river", "--max-tokens", 8, "--temperature", 0, *options).out
        for options in (("--model", tmp_path / "q"), ("--model", folder, "--quantize", "llm.int8"))
    ]
    assert answers[0] == answers[1]


def test_removed_neurons_save_their_bytes_and_zeros_save_none(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(CORPUS)
    folder = random_folder(tmp_path / "m", num_hidden_layers=1, **SMALL | {"intermediate_size": 256})
    made = {
        method: cli(
            *("quantize", folder, "--method", method, "--sparsity", "50%", "-o", tmp_path / method),
            *("--calibration", tmp_path / "text.txt"),
        )
        for method in ("neurons", "wanda")
    }
    assert "a step reads fewer bytes" in made["neurons"].err and "as large as before" in made["wanda"].err
    config = json.loads((tmp_path / "neurons" / "config.json").read_text())
    assert config["intermediate_size"] == 128
    whole, smaller, zeros = (
        cli("info", path, "--json").json["bytes_by_scheme"]["f32"]
        for path in (folder, tmp_path / "neurons", tmp_path / "wanda")
    )
    assert whole - smaller == 3 * 128 * 64 * 4 and zeros == whole
    assert cli("run", "the river", "--model", tmp_path / "neurons", "--max-tokens", 2).code == 0


def test_an_interrupted_tuning_continues(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(CORPUS)
    folder = random_folder(tmp_path / "m", num_hidden_layers=1, **SMALL)
    command = ["quantize", folder, "--method", "qat", "--steps", 2, "--calibration", tmp_path / "text.txt"]
    with monkeypatch.context() as patch:
        patch.setattr("bankfull.quantize.save.save_quantized", interrupted)
        assert cli(*command, "-o", tmp_path / "q").code == 130
    assert [item.name.split("-")[0] for item in tmp_path.glob(".q*")] == [".q.tuning"]
    monkeypatch.setattr("bankfull.train.qat.QatModel.loss", interrupted)  # nothing is left to compute
    made = cli(*command, "-o", tmp_path / "q")
    assert made.code == 0 and "2 steps of tuning lower the loss of rounding" in made.err
    assert not list(tmp_path.glob(".q*"))


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_calibration_keeps_its_layers(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(CORPUS)
    folder = random_folder(tmp_path / "m", **SMALL)
    command = ["quantize", folder, "--method", "gptq", "--group", 32, "--calibration", tmp_path / "text.txt"]
    seen: list[int] = []
    real = Gptq.quantize

    def quantize(self: Gptq, layer: LayerData) -> None:
        seen.append(layer.number)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        real(self, layer)

    monkeypatch.setattr(Gptq, "quantize", quantize)
    assert cli(*command, "-o", tmp_path / "q").code == 130
    assert cli(*command, "-o", tmp_path / "q").code == 0
    assert seen == [0, 1, 1], "the first layer is not done again"
    assert not list(tmp_path.glob(".q*")), "finished layers are kept until the model is whole, and no longer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs a directory for the model: give -o DIR"),
        (("-o", "x.gguf"), "must be a directory, in which the .gguf file appears"),
        (("-o", "x", "--bits", 5), "--bits '5' is not offered; use 8, 4, 3 or 2"),
        (("-o", "x", "--group", 48), "--group '48' is not offered; use 32, 64, 128 or row"),
        (("-o", "x", "--group", "row"), "--group row is for 8 bits; with --bits 4 use 32, 64 or 128"),
        (("-o", "x", "--method", "magic"), "--method 'magic' is unknown; use one of rtn, awq, gptq, fp8, int8"),
        (("-o", "x", "--format", "onnx"), "--format 'onnx' is unknown; use compressed-tensors, gguf or safetensors"),
        (
            ("-o", "x", "--format", "safetensors"),
            "--format safetensors stores weights with their zeros, for --method wanda",
        ),
        (("-o", "x", "--clip", "hard"), "--clip 'hard' is unknown"),
        (("-o", "x", "--method", "gptq", "--clip", "mse"), "--clip has no use with --method gptq"),
        (("-o", "x", "--method", "rtn", "--device", "cuda"), "--device cuda has no use with --method rtn"),
        (("-o", "x", "--method", "mixed", "--bits", "3.5", "--device", "cuda"), "has no use with --method mixed"),
        (("-o", "x", "--method", "gptq", "--device", "toaster"), "toaster"),
        (("-o", "x", "--method", "fp8", "--bits", 4), "--method fp8 makes 8-bit weights"),
        (("-o", "x", "--method", "smoothquant", "--group", 32), "has one scale per row; leave --group 32 out"),
        (("-o", "x", "--method", "awq", "--bits", 8, "--group", "row"), "--method awq needs groups"),
        (("-o", "x", "--bits", 8, "--asymmetric"), "--asymmetric is for 4, 3 and 2 bits"),
        (("-o", "x", "--alpha", 0.5), "--alpha 0.5 is for --method smoothquant"),
        (("-o", "x", "--activations", "int8"), "--activations int8 needs one scale per row"),
        (("-o", "x", "--activations", "static"), "does not go with --method rtn; use float or int8"),
        (("-o", "x", "--ablate", "0.01"), "--ablate is an experiment for --method awq"),
        (("-o", "x", "--method", "awq", "--ablate", "2"), "--ablate '2' is not a share of channels"),
        (("-o", "x", "--tables"), "--tables is for --format gguf"),
        (("-o", "x", "--format", "gguf", "--bits", 3), "has no 3-bit groups; use --type q3_k instead of --bits"),
        (("-o", "x", "--format", "gguf", "--method", "fp8"), "A GGUF file has no fp8"),
        (("-o", "x", "--type", "q4_k"), "--type is for --format gguf"),
        (("-o", "x", "--format", "gguf", "--type", "q9_k"), "--type 'q9_k' is unknown; use one of q8_0, "),
        (("-o", "x", "--method", "mixed"), "Mixed bits need one budget: --bits 3.5, --size 4GiB or --kl 0.02"),
        (("-o", "x", "--method", "mixed", "--bits", "few"), "--bits 'few' is not a number"),
        (("-o", "x", "--method", "mixed", "--kl", -1), "--kl -1.0 is no budget"),
        (("-o", "x", "--method", "mixed", "--size", "50%"), "--size '50%' is not a size of a model"),
        (("-o", "x", "--method", "mixed", "--bits", 4, "--format", "gguf"), "--method mixed writes a model directory"),
        (("-o", "x", "--size", "1GiB"), "--size and --kl are budgets of --method mixed"),
        (("-o", "x", "--method", "wanda"), "--sparsity is the pattern of --method wanda and sparsegpt"),
        (("-o", "x", "--method", "neurons", "--sparsity", "2:4"), "--sparsity 2:4 is no share of neurons"),
        (("-o", "x", "--method", "neurons", "--sparsity", "50%"), "which is not made of blocks of 64 neurons"),
        (("-o", "x", "--method", "qat", "--bits", 8), "--method qat is for 4, 3 and 2 bits"),
        (("-o", "x", "--method", "qat", "--format", "gguf"), "--method qat writes a model directory"),
        (("-o", "x", "--steps", 5), "--steps 5 is for --method qat"),
        (("-o", "x", "--method", "wanda", "--sparsity", "3:2"), "--sparsity '3:2' is no pattern"),
        (("-o", "x", "--method", "wanda", "--sparsity", "2:4", "--bits", 4), "keeps the width of weights"),
        (("-o", "x", "--method", "gptq", "--calibration", "no.txt"), "The calibration text 'no.txt' cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments: tuple[object, ...], message: str, cli: Cli) -> None:
    assert message in cli("quantize", speaking_folder(), *arguments).sentence
