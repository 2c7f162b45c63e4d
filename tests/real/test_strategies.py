"""Every strategy gives the tokens of plain decoding, on real text."""

from __future__ import annotations

from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from tests.real.models import REAL

PROMPTS = [
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    "Write the numbers from one to twenty in words: one, two, three,",
    "The river Danube flows through many countries:",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
]
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=64, ignore_eos=True)
STRATEGIES = ["auto", "suffix", "ngram", "lookahead", "jacobi", "draft"]


def tokens_of(file: Path, speculative: str) -> list[list[int]]:
    llm = LLM(str(file), dtype="float32", speculative=speculative, max_model_len=512)
    made = [llm.generate(PROMPTS, params) for params in (PARAMS, SAMPLED)]
    return [list(output.outputs[0].token_ids) for outputs in made for output in outputs]


@pytest.fixture(scope="module")
def plain(file: Path) -> list[list[int]]:
    return tokens_of(file, "off")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_changes_no_token(model: str, file: Path, plain: list[list[int]], strategy: str) -> None:
    if strategy == "draft":
        if model != "qwen2.5-coder-1.5b":
            pytest.skip("only the large Qwen has a small one with its vocabulary")
        strategy = f"draft:{REAL['qwen2.5-coder-0.5b'].path}"
    assert tokens_of(file, strategy) == plain
