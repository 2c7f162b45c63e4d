"""llama.cpp reads the GGUF files that are written here, and computes the same with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull import LLM, SamplingParams
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.save import save_quantized
from bankfull.runtime.naive import logits
from bankfull.synthetic.gguf_file import write_gguf
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.source import ModelFiles, open_model
from tests.llamacpp.conftest import Ask
from tests.quantize.models import random_folder, recipe_of
from tests.quantize.test_gguf_files import FAMILIES, SCALED

pytestmark = pytest.mark.full

CPU = torch.device("cpu")
PROMPT = "the river runs at the full capacity of its channel"
TOKENS = torch.randint(0, 500, (90,), generator=torch.Generator().manual_seed(5)).tolist()
"""More than the window of the tiny models."""
ROUNDED = 0.05
"""Most part of the logits' size that they may differ by: llama.cpp rounds activations to 8 bits where weights are in
blocks. A matrix in a wrong place, or rows in another order, make it about one."""
EXACT = 2e-4
"""The same in float32."""
WITH_EXPERTS = ("gpt-oss-20b", "mixtral-8x7b", "olmoe-1b-7b", "qwen3-30b-a3b")


def own_logits(files: ModelFiles, tokens: list[int]) -> Tensor:
    """In float32, by the bodies of the operations."""
    build = Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU, expand=True)
    return logits(build_model(files.config, build), tokens, CPU)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Relative, of the median token: a rounded activation may send a token to another expert."""
    return float(((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).median())


@pytest.mark.parametrize("bits", ["8", "4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_model_has_the_same_logits(family: str, bits: str, tmp_path: Path, ask: Ask) -> None:
    folder = random_folder(tmp_path / "m", **FAMILIES[family])
    saved = save_quantized(open_model(folder), recipe_of("rtn", bits, "32", form="gguf"), tmp_path / "q")
    found = ask(saved.path, PROMPT)
    error = difference(own_logits(open_model(saved.path), found.tokens), found.logits)
    assert error < ROUNDED


def saved_by_gptq(folder: Path, target: Path) -> Path:
    recipe = recipe_of("gptq", "4", "64", symmetric=False, form="gguf")
    return save_quantized(open_model(folder), recipe, target, sequences=[TOKENS]).path


def saved_as(block: str, folder: Path, target: Path) -> Path:
    return save_quantized(open_model(folder), recipe_of("rtn", form="gguf", block=block, tables=True), target).path


@pytest.mark.parametrize("block", ["q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "gptq"])
def test_every_type_of_blocks_means_the_same_numbers(block: str, tmp_path: Path, ask: Ask) -> None:
    folder = random_folder(tmp_path / "m", hidden_size=256, intermediate_size=256, vocab_size=600)
    made = saved_by_gptq(folder, tmp_path / "q") if block == "gptq" else saved_as(block, folder, tmp_path / "q")
    error = difference(own_logits(open_model(made), TOKENS), ask(made, TOKENS).logits)
    assert error < ROUNDED


def test_the_same_text_becomes_the_same_tokens_and_continues_with_the_same_ones(tmp_path: Path, ask: Ask) -> None:
    folder = random_folder(tmp_path / "m", **SCALED, num_key_value_heads=4)
    saved = save_quantized(open_model(folder), recipe_of("rtn", "8", "32", form="gguf"), tmp_path / "q")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [result] = LLM(str(saved.path), dtype="float32").generate([PROMPT], greedy)
    found = ask(saved.path, PROMPT, 8)
    assert found.tokens == list(result.prompt_token_ids) and found.found == list(result.outputs[0].token_ids)


@pytest.mark.parametrize(("kind", "bound"), [("f32", EXACT), ("q8_0", ROUNDED), ("mxfp4", ROUNDED)])
@pytest.mark.parametrize("shape", WITH_EXPERTS)
def test_a_random_model_with_experts_is_the_same_model(
    shape: str, kind: str, bound: float, tmp_path: Path, ask: Ask
) -> None:
    config: dict[str, Any] = shape_config(f"{shape}-tiny")
    made = write_gguf("m", config, tmp_path / "m", kind).path
    error = difference(own_logits(open_model(made), TOKENS), ask(made, TOKENS).logits)
    assert error < bound
