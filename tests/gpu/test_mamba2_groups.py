"""Mamba-2 with groups of heads on the device: the paper's formula, written out, and the tokens of a CPU.

transformers is no oracle here: its versions differ in the gated norm of models with groups, of which older ones take a
mean over all channels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from bankfull.runtime import naive
from tests.gpu.place import DEVICE, require_device
from tests.models import mamba2_formula as formula
from tests.tiny import VOCAB, folder_of, model_of, reference_of

require_device()

from tests.gpu.engines import bench_of  # noqa: E402

PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(40)]
NEW = 8


@pytest.mark.parametrize("chunks", [(), (1, 16, 1, 1, 21)], ids=["at once", "in pieces"])
def test_logits_are_those_of_the_formula(chunks: tuple[int, ...]) -> None:
    folder = folder_of("mamba2")
    config = json.loads((folder / "config.json").read_text())
    assert config["n_groups"] == 2
    expected = formula.logits(formula.tensors_of(folder), config, PROMPT)
    found = naive.logits(model_of("mamba2", torch.float32, "auto"), PROMPT, DEVICE, chunks).double().cpu().numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_tokens_are_those_of_the_formula_and_of_a_cpu() -> None:
    folder = folder_of("mamba2")
    config = json.loads((folder / "config.json").read_text())
    expected = formula.greedy(formula.tensors_of(folder), config, PROMPT[:20], NEW)
    assert naive.generate(reference_of("mamba2"), PROMPT[:20], NEW, torch.device("cpu"))[0] == expected
    bench = bench_of("mamba2", torch.float32)
    bench.add("a", PROMPT[:20], NEW)
    bench.run()
    assert bench.tokens["a", 0] == expected
