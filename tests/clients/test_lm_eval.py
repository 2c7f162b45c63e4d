"""lm-evaluation-harness through /v1/completions: prompts as token ids, echoed with their log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import Server

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-clients")

QUESTIONS = [
    {"question": "The river runs", "choices": [" down", " up"], "answer": 0},
    {"question": "The channel is", "choices": [" full", " a bird"], "answer": 0},
    {"question": "Water is", "choices": [" wet", " the dry sand"], "answer": 0},
]


@pytest.fixture
def model(server: Server) -> Any:
    from lm_eval.api.registry import get_model

    return get_model("local-completions")(
        model="tiny",
        base_url=server.url + "/v1/completions",
        tokenizer=server.folder,
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        num_concurrent=1,
        max_retries=1,
        max_length=256,
    )


def test_a_multiple_choice_task_from_a_local_file(server: Server, model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = tmp_path / "rivers.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    task = {
        "task": "rivers",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    result = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    scored = result["samples"]["rivers"]
    assert len(scored) == len(QUESTIONS)
    for sample in scored:
        values = [float(one[0][0]) for one in sample["resps"]]
        assert all(math.isfinite(value) and value < 0 for value in values)
    best = [max(range(2), key=lambda place, one=sample: float(one["resps"][place][0][0])) for sample in scored]
    expected = sum(choice == 0 for choice in best) / len(best)
    assert result["results"]["rivers"]["acc,none"] == pytest.approx(expected)


def test_the_likelihood_of_a_text_is_the_product_of_its_parts(model: Any) -> None:
    """By the chain rule. Token boundaries match on both sides because the parts are whole words."""
    from lm_eval.api.instance import Instance

    def likelihood(context: str, rest: str) -> float:
        return float(model.loglikelihood([Instance("loglikelihood", {}, (context, rest), 0)])[0][0])

    whole = likelihood("The", " river runs")
    assert whole == pytest.approx(likelihood("The", " river") + likelihood("The river", " runs"), abs=1e-3)


def test_generation_until_a_stop_string(model: Any) -> None:
    from lm_eval.api.instance import Instance

    def written(until: list[str]) -> str:
        how = {"until": until, "max_gen_toks": 20, "temperature": 0}
        return str(model.generate_until([Instance("generate_until", {}, ("The river", how), 0)])[0])

    text = written([])
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    assert written([stop]) == text[: text.index(stop)]
