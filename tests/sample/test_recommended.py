"""The sampling that applies where a request leaves it open: from the files, by the model's name, or the general one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bankfull.errors import ModelError
from bankfull.sample.recommended import GENERAL, recommended

SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
LLAMA3 = {"temperature": 0.6, "top_p": 0.9}


@dataclass
class Files:
    path: Path = Path("/models/some-model")
    config: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("generation", "values"),
    [
        ({}, GENERAL),
        ({"eos_token_id": 2, "temperature": None}, GENERAL),
        ({"temperature": 0.6, "top_k": 20, "eos_token_id": 2}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": True, "top_p": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "min_p": 0.1}, {"temperature": 0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1, "temperature": 0}),
        ({"top_k": 5}, {**GENERAL, "top_k": 5}),
        ({"top_p": 0.5}, {**GENERAL, "top_p": 0.5}),
    ],
)
@pytest.mark.parametrize("chats", [True, False])
def test_values_of_generation_config_count_and_the_rest_is_general(
    generation: dict[str, Any], values: dict[str, float], chats: bool
) -> None:
    assert recommended(Files(generation=generation), chats=chats) == values


@pytest.mark.parametrize(
    ("files", "values"),
    [
        (Files(metadata={"general.name": "Smollm2 135M 8k Lc100K Mix1 Ep2"}), SMOLLM2),
        (Files(metadata={"general.basename": "smollm2"}), SMOLLM2),
        (Files(config={"_name_or_path": "HuggingFaceTB/SmolLM2-360M-Instruct"}), SMOLLM2),
        (Files(Path("/cache/models--HuggingFaceTB--SmolLM2-1.7B-Instruct/snapshots/0a1b")), SMOLLM2),
        (Files(Path("/models/SmolLM2_135M_Instruct.Q4_0.gguf")), SMOLLM2),
        (Files(Path("/smollm2/another-model.gguf")), GENERAL),
        (Files(metadata={"general.name": 7, "general.basename": ["smollm2"]}), GENERAL),
        (Files(metadata={"general.name": "Meta Llama 3.1 8B Instruct"}), LLAMA3),
        (Files(Path("Llama-3.2-1B-Instruct-Q4_0.gguf")), LLAMA3),
        (Files(metadata={"general.name": "Llama 2 7B chat"}), GENERAL),
        (Files(Path("Qwen3-0.6B-Q8_0.gguf")), {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (Files(Path("Qwen3-4B-Instruct-2507")), {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        (Files(Path("gemma-3-1b-it.gguf")), {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    ],
)
def test_a_chat_model_gets_what_its_authors_publish(files: Files, values: dict[str, float]) -> None:
    assert recommended(files, chats=True) == values
    assert recommended(files, chats=False) == GENERAL


def test_the_keys_of_a_gguf_file_count_before_its_name() -> None:
    metadata = {
        "general.name": "SmolLM2",
        "general.sampling.temp": 0.6000000238418579,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert recommended(Files(metadata=metadata), chats=True) == {
        "temperature": 0.6,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    some = Files(metadata={"general.name": "SmolLM2", "general.sampling.top_k": 3})
    assert recommended(some, chats=True) == {**SMOLLM2, "top_k": 3}


@pytest.mark.parametrize("files", [Files(generation={"top_p": 3}), Files(metadata={"general.sampling.temp": "hot"})])
def test_files_that_recommend_nonsense_are_refused_by_name(files: Files) -> None:
    with pytest.raises(ModelError, match=r"some-model.*(top_p|temperature)"):
        recommended(files, chats=True)
