"""The default model, whole: the file that a newcomer gets speaks as `transformers` says that it should."""

from __future__ import annotations

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams
from bankfull.serve.api.texts import Texts
from bankfull.weights.locate import locate

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by a river,",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of motion are",
    "To be, or not to be,",
    "Q: What is photosynthesis?\nA:",
    "Ein kurzer Satz auf Deutsch:",
)
NEW = 64


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=512, memory="256MiB")


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    path = locate("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def test_ten_prompts_give_the_oracles_64_tokens(llm: LLM, oracle: transformers.PreTrainedModel) -> None:
    """A token is checked against the arg-max of the oracle's own pass over everything before it: by induction that is
    the oracle's greedy decoding. A prompt counts up to the first position where the oracle itself hesitates."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    checked = 0
    for output in llm.generate(list(PROMPTS), params):
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(tokens) == NEW
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        for at in range(NEW):
            if best.values[at, 0] - best.values[at, 1] < 1e-3:
                break
            assert tokens[at] == best.indices[at, 0], f"{output.prompt!r}, token {at}"
            checked += 1
    assert checked >= 0.8 * NEW * len(PROMPTS), f"only {checked} tokens could be compared"


def test_it_answers_a_simple_question(llm: LLM) -> None:
    out = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0.0, max_tokens=30)
    )[0].outputs[0]
    assert "Paris" in out.text and out.finish_reason == "stop"


def test_everybody_samples_as_its_authors_recommend(llm: LLM) -> None:
    """Its file has no generation config, and greedy decoding makes it repeat one sentence for ever."""
    texts = Texts.open("smollm2")
    texts.close()
    assert texts.defaults == {"temperature": 0.2, "top_p": 0.9}
    assert llm.default_params() == SamplingParams(**texts.defaults)


def test_weights_stay_quantized_in_memory(llm: LLM) -> None:
    layer = llm.loaded.model.blocks[0].mixer
    assert layer.q.weight.scheme.name == "q4_1"  # type: ignore[attr-defined]
    assert layer.q.weight.parts["blocks"].dtype == torch.uint8  # type: ignore[attr-defined]


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", ("medusa", "eagle", "chain:eagle"))
def test_heads_of_their_own_package_draft_for_it(llm: LLM, heads: str) -> None:
    """The tokens stay the same, and far more first drafts are right than of untrained heads (below 3%)."""
    asked = [[{"role": "user", "content": text}] for text in ("Name three rivers.", "What is a leap year?")]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    drafted = LLM(
        "smollm2",
        dtype="float32",
        max_model_len=512,
        memory="256MiB",
        speculative=f"{heads},adaptive=false",
    )
    expected, found = (each.chat(asked, params) for each in (llm, drafted))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
    totals = drafted.loaded.engine.totals
    assert totals.accepted[0] / totals.drafted[0] > 0.15
