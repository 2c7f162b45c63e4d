"""Names of transformers, vLLM and others mean here what they mean there, or are refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError, RequestError
from bankfull.familiar import configure, engine_options, sampling_options
from tests.tiny import speaking_folder


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"load_in_8bit": True}, {"quantize": "llm.int8"}),
        ({"load_in_4bit": True, "load_in_8bit": False}, {"quantize": "int4"}),
        ({"quantization_config": SimpleNamespace(load_in_8bit=True, load_in_4bit=False)}, {"quantize": "llm.int8"}),
        ({"quantization_config": {"load_in_4bit": True}}, {"quantize": "int4"}),
        ({"quantization": "fp8"}, {"quantize": "fp8"}),
        ({"device_map": "auto"}, {"device": "auto"}),
        ({"device_map": "cpu"}, {"device": "cpu"}),
        ({"device_map": {"": 0}}, {"device": "cuda:0"}),
        ({"device_map": torch.device("cpu")}, {"device": "cpu"}),
        ({"device_map": None, "device": "cpu"}, {"device": "cpu"}),
        ({"n_gpu_layers": 0}, {"device": "cpu"}),
        ({"n_gpu_layers": -1}, {}),
        ({"torch_dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "auto"}, {"dtype": "auto"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": torch.float32, "torch_dtype": "float"}, {"dtype": "float32"}),
        ({"n_ctx": 512}, {"max_model_len": 512}),
        ({"max_seq_len": None}, {}),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 64}, {"rows": 3, "step_tokens": 64}),
        ({"gpu_memory_utilization": 0.5}, {"memory": 0.5}),
        ({"kv_cache_dtype": torch.bfloat16}, {"kv_dtype": "bfloat16"}),
        ({"tensor_parallel_size": 2}, {"parallel": "tp=2"}),
        ({"pipeline_parallel_size": 2}, {"parallel": "pp=2"}),
        ({"tensor_parallel_size": 1, "enforce_eager": False, "trust_remote_code": False, "swap_space": 0.0}, {}),
        ({"use_safetensors": True, "low_cpu_mem_usage": True, "attn_implementation": None}, {}),
        ({"rows": 2, "anything": 1}, {"rows": 2, "anything": 1}),
    ],
)
def test_an_engines_option_is_what_it_means_here(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert engine_options(given) == meant


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "load_in_8bit=True and load_in_4bit=True both set"),
        ({"quantize": "q4_k", "load_in_8bit": True}, "quantize='q4_k' and load_in_8bit=True both set"),
        ({"load_in_8bit": "yes"}, "load_in_8bit='yes' must be True or False"),
        ({"quantization_config": SimpleNamespace(bits=3)}, "give quantize='int8' or quantize='int4'"),
        ({"quantization": "awq"}, "is detected"),
        ({"device_map": "balanced"}, "device_map='balanced' splits a model across devices"),
        ({"device_map": {"layers.0": 0, "layers.1": 1}}, "give 'auto', 'cpu' or 'cuda'"),
        ({"device": "cpu", "device_map": "cuda"}, "device='cpu' and device_map='cuda' both set device"),
        ({"n_gpu_layers": 12}, "give device='cuda' or 'cpu'"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "both set parallel"),
        ({"tensor_parallel_size": True}, "no number of ranks"),
        ({"enforce_eager": True}, "steps are captured wherever the device supports it"),
        ({"attn_implementation": "flash_attention_2"}, "chosen automatically"),
        ({"trust_remote_code": True}, "is never run"),
        ({"speculative_config": {"model": "x" * 500}}, "use speculative, such as 'suffix'"),
    ],
)
def test_what_has_no_meaning_here_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_options(given)
    said = str(caught.value)
    assert sentence in said and said.endswith(".") and len(said) < 300 and "\n" not in said


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Option 'depht' is unknown; known are .*load_in_8bit.*max_model_len"):
        configure({"depht": 1})


def test_a_model_loaded_by_other_names_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANKFULL_CACHE", str(tmp_path))  # the calibrated columns are kept there
    small = {"memory": "1MiB", "page_tokens": 4}
    llm = LLM(
        str(speaking_folder()),
        load_in_8bit=True,
        device_map="cpu",
        torch_dtype=torch.float32,
        max_seq_len=96,
        max_num_seqs=2,
        **small,
    )
    own = LLM(
        str(speaking_folder()), quantize="llm.int8", device="cpu", dtype="float32", max_model_len=96, rows=2, **small
    )
    assert llm.max_model_len == 96 and llm.loaded.sizes.rows == 2
    said = [
        one.generate("The river", params)[0].outputs[0].token_ids
        for one, params in (
            (llm, SamplingParams(max_new_tokens=6, do_sample=False)),  # type: ignore[call-arg]
            (own, SamplingParams(max_tokens=6, temperature=0)),
        )
    ]
    assert said[0] == said[1] and len(said[0]) <= 6


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": None, "max_tokens": 3}, {"max_tokens": 3}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.7}, {"temperature": 0.7}),
        ({"num_return_sequences": 2, "min_new_tokens": 1}, {"n": 2, "min_tokens": 1}),
        ({"stop_strings": ["x"], "suppress_tokens": [3]}, {"stop": ["x"], "banned_token_ids": [3]}),
        (
            {"num_beams": 1, "length_penalty": 1.0, "no_repeat_ngram_size": 0, "repetition_penalty": 1.1},
            {"repetition_penalty": 1.1},
        ),
    ],
)
def test_a_samplers_option_is_what_it_means_here(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert sampling_options(given) == meant
    assert SamplingParams(**given) == SamplingParams(**meant)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens=5 and max_tokens=6 both set max_tokens"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample=False and temperature=0.7 both set"),
        ({"do_sample": True, "temperature": 0}, "give a temperature above 0"),
        ({"num_beams": 4}, "there is no beam search"),
        ({"max_length": 40}, "includes the prompt; give max_tokens"),
        ({"max_new_tokens": -1}, "max_tokens is -1"),
        ({"temprature": 1}, "SamplingParams has no 'temprature'; it has allowed_token_ids,"),
    ],
)
def test_what_sampling_cannot_do_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given)
    assert sentence in str(caught.value)
