"""Greedy text equals llama.cpp's, as far as the best token leads."""

from __future__ import annotations

from pathlib import Path

from bankfull import LLM, SamplingParams
from tests.real.conftest import LlamaCpp

PROMPTS = [
    "The river Rhine rises in",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "class Stack:\n    def __init__(self):\n",
    "Once upon a time there was a miller who",
    "SELECT name, COUNT(*) FROM orders",
    "The three laws of thermodynamics are",
    "import numpy as np\n\ndef softmax(x):\n",
    "Die Hauptstadt von Frankreich ist",
    "In 1969, Neil Armstrong",
    "<html>\n<head>\n<title>",
    "# A function that checks whether a number is prime\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 2, 4, 8, 16,",
    "To make bread you need",
    '{"name": "Ada", "age": 36, "city":',
    "La mer est",
    "A binary search tree is",
    "for (int i = 0; i < n; i++) {\n",
    "The capital of Japan is Tokyo. The capital of Italy is",
]
NEW = 48
NOISE = 0.6
"""Logits by which the two may disagree about two tokens: both compute with 4-bit weights, and llama.cpp rounds
activations to 8 bits."""
FEWEST = 0.35
"""Share of all tokens that must be compared before the first near tie of their prompt."""


def test_greedy_text_equals_llama_cpps_as_far_as_the_best_token_leads(file: Path) -> None:
    llm = LLM(str(file), dtype="float32", speculative="off", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    ours = llm.generate(PROMPTS, params)
    theirs = LlamaCpp(file, 512)
    compared = 0
    try:
        for prompt, output in zip(PROMPTS, ours, strict=True):
            found = output.outputs[0]
            other = theirs.greedy(output.prompt_token_ids, NEW)
            assert found.logprobs is not None
            for at, (own, token) in enumerate(zip(found.token_ids, other.tokens, strict=False)):
                if own != token:
                    first, second = sorted((line.logprob for line in found.logprobs[at].values()), reverse=True)[:2]
                    lead = min(first - second, other.leads[at])
                    assert lead < NOISE, f"{prompt!r}, token {at}: {own} and {token}, although one leads by {lead:.2f}"
                    break
                compared += 1
    finally:
        theirs.close()
    assert compared > FEWEST * NEW * len(PROMPTS), f"only {compared} tokens before the first near ties"
