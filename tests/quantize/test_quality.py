"""What calibration is worth: a model trained here from unquantized weights, quantized to 4 and 3 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bankfull.quality.evaluate import dequantized, evaluate
from bankfull.quantize.awq import Awq
from bankfull.quantize.calibration import bundled_text, sequences_of
from bankfull.quantize.gptq import Gptq
from bankfull.quantize.grid import Grid
from bankfull.quantize.layered import ReplacedSource
from bankfull.quantize.method import LayerData, Method
from bankfull.quantize.walk import WalkOptions, walk
from bankfull.train.lm.run import LmTraining, train_lm
from bankfull.train.lm.tasks import TextWindows
from bankfull.train.lm.vocabulary import byte_tokenizer
from bankfull.weights.source import open_model

WINDOW = 128
CONFIG = {
    "model_type": "bankfull",
    "layers": "3 x attention(heads=4)",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


class ToNearest:
    """The baseline."""

    name, calibrated = "rtn", False

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def quantize(self, layer: LayerData) -> None:
        layer.quantized |= {name: self.grid.to_nearest(matrix) for name, matrix in layer.matrices.items()}


@contextmanager
def silent(what: str, total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    yield lambda done, note: None


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model of bytes, and its text; the last twentieth was not trained on."""
    folder = tmp_path_factory.mktemp("trained")
    ids = list(bundled_text().encode())
    task = TextWindows(torch.tensor(ids), WINDOW, 0, "bundled")
    how = LmTraining(400, 16, 3e-3, 0, 400, torch.device("cpu"), None, silent)
    train_lm(CONFIG, task, byte_tokenizer(), how, folder)
    return folder, ids


def loss(folder: Path, ids: list[int], method: Method) -> float:
    """The mean KL divergence on the held-out text."""
    border, files = len(ids) - len(ids) // 20, open_model(folder)
    text = sequences_of(ids[:border], length=WINDOW, most=8192)
    made = {name: tensor.dequantize() for name, tensor in walk(files, method, WalkOptions(text))}
    quantized = replace(files, source=ReplacedSource(files.source, made))
    reference = dequantized(open_model(folder))
    return evaluate(dequantized(quantized), reference, [ids[border:]], window=WINDOW).kl_mean


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 3])
def test_calibrated_methods_lose_less_than_rounding_to_nearest(trained: tuple[Path, list[int]], bits: int) -> None:
    grid = Grid(bits, 128)
    nearest, gptq, awq = (loss(*trained, method) for method in (ToNearest(grid), Gptq(grid), Awq(grid)))
    print(f"{bits} bits, KL: rtn {nearest:.5f}, gptq {gptq:.5f}, awq {awq:.5f}")
    assert gptq < nearest and awq < nearest
    assert min(gptq, awq) <= 0.65 * nearest
