"""Mamba-2 with groups of heads computes the paper's formula: bodies, CPU kernels, the tape, and Triton's kernels."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bankfull.config import SchedConfig
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for, native
from bankfull.runtime import naive
from bankfull.runtime.device import Cpu
from bankfull.weights.source import open_model
from tests.kit import Bench
from tests.models import mamba2_formula as formula
from tests.tiny import VOCAB, folder_of

CPU = torch.device("cpu")
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(40)]


@lru_cache
def folder_with(groups: int) -> Path:
    """The tiny Mamba-2 with four heads in so many groups."""
    import atexit
    import shutil
    import tempfile

    if groups == 2:
        return folder_of("mamba2")
    folder = Path(tempfile.mkdtemp(prefix="bankfull-mamba2-groups-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(groups)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "tie_word_embeddings": False}
    config = transformers.Mamba2Config(**sizes, num_heads=4, head_dim=16, n_groups=groups, state_size=4)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "D")):
                weight.copy_(torch.randn_like(weight) * (3.0 if "lm_head" in name else 0.3))
    model.save_pretrained(folder)
    return folder


@lru_cache
def written_out(groups: int) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = folder_with(groups)
    return formula.tensors_of(folder), json.loads((folder / "config.json").read_text())


def model_with(groups: int, kit: Kit, dtype: torch.dtype) -> Decoder:
    files = open_model(folder_with(groups))
    return build_model(files.config, Build(files.source, kit, dtype, CPU))


def error(model: Decoder, groups: int, chunks: tuple[int, ...] = ()) -> float:
    prompt = PROMPT[: sum(chunks) or len(PROMPT)]
    expected = formula.logits(*written_out(groups), prompt)
    found = naive.logits(model, prompt, CPU, chunks).double().numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_bodies_compute_the_formula(groups: int) -> None:
    model = model_with(groups, kit_for("cpu", "torch"), torch.float64)
    assert error(model, groups) < 1e-7  # the formula's softplus and the weights are the float32 ones of the file
    assert error(model, groups, (17, 1, 1, 21)) < 1e-7


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_kernels_of_a_cpu_compute_the_formula(groups: int) -> None:
    kit = kit_for("cpu")
    model = model_with(groups, kit, torch.float32)
    assert all(kit.chosen[name]["native"] == 3 for name in ("ssd_scan", "gated_rms_norm", "causal_conv_silu"))
    assert error(model, groups) < 2e-5 and error(model, groups, (17, 1, 1, 21)) < 2e-5


@pytest.mark.parametrize("groups", [2, 4])
def test_the_kernels_of_a_gpu_compute_the_formula_in_the_interpreter(groups: int) -> None:
    model = model_with(groups, kit_for("cpu", "torch"), torch.float32)
    for block in model.blocks:
        mixer: Any = block.mixer
        for name in ("causal_conv_silu", "ssd_scan", "gated_rms_norm"):
            own = {"causal_conv_silu": "_conv", "ssd_scan": "_scan", "gated_rms_norm": "_norm"}[name]
            setattr(mixer, own, triton_provider(name))
    assert error(model, groups, (1, 5, 1)) < 2e-5


def triton_provider(name: str) -> Any:
    from bankfull.ops import OPERATIONS
    from bankfull.ops.triton import providers  # noqa: F401  (registers its providers)

    return OPERATIONS[name].providers["triton"].run


@pytest.mark.parametrize("groups", [2, 4])
def test_the_engine_says_the_formulas_tokens(groups: int) -> None:
    tensors, config = written_out(groups)
    expected = formula.greedy(tensors, config, PROMPT[:20], 8)
    kit = kit_for("cpu")
    bench = Bench(model_with(groups, kit, torch.float32), Cpu(), 0, SchedConfig(rows=2, step_tokens=16), kit=kit)
    bench.add("a", PROMPT[:20], 8)
    bench.run()
    assert bench.tokens["a", 0] == expected


def test_one_norm_over_all_groups_would_be_another_model() -> None:
    """What older versions of transformers compute: the case tells the two apart."""
    tensors, config = written_out(2)
    ours, older = (formula.logits(tensors, config, PROMPT, groups) for groups in (2, 1))
    assert np.abs(ours - older).max() > 0.1 * np.abs(ours).max()
    assert (ours.argmax(-1) != older.argmax(-1)).any()
