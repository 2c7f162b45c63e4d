"""Every kind of mixer in the engine: its greedy tokens are those of a plain loop over the torch bodies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull.llm import LLM
from bankfull.runtime import naive
from bankfull.sample.params import SamplingParams
from bankfull.train.lm.vocabulary import word_tokenizer
from bankfull.weights.drafter_files import write_json
from tests.models.composed import LAYERS, SIZES, served
from tests.train.test_lm_mixers import save, shaken

NEW = 12


@pytest.mark.few(6)
@pytest.mark.parametrize("case", LAYERS)
def test_the_engine_generates_the_tokens_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    model = shaken(case)
    save(model, tmp_path)
    write_json(tmp_path / "tokenizer.json", word_tokenizer([f"w{i}" for i in range(SIZES["vocab_size"])]))
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
    llm = LLM(str(tmp_path), dtype="float32", device="cpu", rows=2, step_tokens=7)
    done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=NEW))
    plain = served(tmp_path, torch.float64)
    for prompt, result in zip(prompts, done, strict=True):
        wanted, margins = naive.generate(plain, prompt, NEW, torch.device("cpu"))
        assert min(margins) > 1e-4, "the oracle itself hesitates"
        assert result.outputs[0].token_ids == wanted
