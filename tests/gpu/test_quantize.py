"""Methods with a calibration text on the device: they make the model that they make on the CPU, but for rare ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.place import CPU, DEVICE, require_device

require_device()

from bankfull.quantize.neurons import remove_neurons  # noqa: E402
from bankfull.quantize.recipe import QuantizeRecipe  # noqa: E402
from bankfull.quantize.table import make_method  # noqa: E402
from bankfull.quantize.walk import WalkOptions, walk  # noqa: E402
from bankfull.weights.source import ModelFiles, open_model  # noqa: E402
from tests.quantize.models import random_folder, recipe_of  # noqa: E402

RECIPES = {
    "gptq": recipe_of("gptq", "4", "64"),
    "gptq, 8 bits": recipe_of("gptq", "8", "64"),
    "gptq with zero points": recipe_of("gptq", "3", "32", symmetric=False),
    "awq": recipe_of("awq", "4", "32"),
    "awq, ablated": recipe_of("awq", "4", "32", ablate="0.1"),
    "smoothquant": recipe_of("smoothquant"),
    "fp8, static": recipe_of("fp8", activations="static"),
    "wanda": recipe_of("wanda", sparsity="2:4"),
    "sparsegpt": recipe_of("sparsegpt", sparsity="50%"),
}
TEXT = torch.randint(0, 300, (4, 150), generator=torch.Generator().manual_seed(0)).tolist()


def changes(files: ModelFiles, recipe: QuantizeRecipe, device: torch.device) -> Tensor:
    """What the method changes, all tensors in a row. Every tensor must have come back to the CPU."""
    found = []
    for name, tensor in walk(files, make_method(recipe), WalkOptions(TEXT, device=device)):
        assert tensor.device == CPU, name
        if files.source.has(name):
            found.append((tensor.dequantize() - files.source.get(name).dequantize()).flatten())
    return torch.cat(found)


@pytest.mark.parametrize("name", RECIPES)
def test_a_method_makes_the_same_model_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    files = open_model(random_folder(tmp_path / "m"))
    here, there = (changes(files, RECIPES[name], device) for device in (CPU, DEVICE))
    assert float(here.norm()) > 0
    # A tie that falls to the other side moves a number by a whole step, and with GPTQ those after it, too.
    other = (here - there).abs() > 0.01 * here.abs().max()
    assert float(other.float().mean()) < 0.05


def test_the_same_neurons_go_as_on_a_cpu(tmp_path: Path) -> None:
    files = open_model(random_folder(tmp_path / "m"))
    here, there = (remove_neurons(files, 0.5, TEXT, block=32, device=device).source for device in (CPU, DEVICE))
    for name in here.names():
        torch.testing.assert_close(here.get(name).dequantize(), there.get(name).dequantize(), rtol=1e-3, atol=1e-3)
