"""Names of transformers, vLLM and others mean here what they mean there, or are refused in one sentence."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError, RequestError
from bankfull.familiar import configure, engine_options, sampling_options
from bankfull.runtime.refused import refuse_other_format
from bankfull.speculation import SpeculativeChoice
from bankfull.weights.source import ModelFiles
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
        ({"n_gpu_layers": 99, "n_ctx": 0, "n_batch": 64, "n_threads": 2}, {"step_tokens": 64, "threads": 2}),
        ({"n_gpu_layers": 999, "main_gpu": 1, "use_mmap": True, "verbose": False}, {"device": "cuda:1"}),
        ({"device_map": {"model.layers.0": 0, "lm_head": 0}}, {"device": "cuda:0"}),
        ({"quantization": "awq"}, {"stored": "awq"}),
        ({"quantization": "gptq_marlin"}, {"stored": "gptq"}),
        ({"quantization": "int4"}, {"quantize": "int4"}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
            {"speculative": "ngram,width=5,most=4"},
        ),
        (
            {"speculative_config": {"model": "org/small", "num_speculative_tokens": 3}},
            {"speculative": "draft:org/small,depth=3"},
        ),
        ({"speculative_config": {"method": "eagle3", "model": "heads"}}, {"speculative": "eagle:heads"}),
        (
            {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 1}},
            {"speculative": "mtp,width=1"},
        ),
        (
            {"speculative_config": {"method": "suffix"}, "cpu_offload_gb": 0, "enable_lora": False},
            {"speculative": "suffix"},
        ),
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
        ({"quantization": "squeezellm"}, "name the format of a quantized checkpoint (awq,"),
        ({"cpu_offload_gb": 8}, "give quantize='int8' or 'int4', or device='cpu'"),
        ({"enable_lora": True}, "merge them into the checkpoint"),
        ({"chat_format": "chatml"}, "the chat template comes with the model"),
        ({"type_k": 8}, "give kv_dtype"),
        ({"n_gpu_layers": 33}, "give -1 for the GPU or 0 for the CPU"),
        ({"n_gpu_layers": True}, "give -1 for the GPU or 0 for the CPU"),
        ({"tensor_split": [1, 1]}, "one device runs the whole model"),
        ({"speculative_config": {"method": "mlp_speculator", "model": "x"}}, "names an unknown method"),
        (
            {"speculative_config": {"method": "ngram", "disable_by_batch_size": 4}},
            "has 'disable_by_batch_size', which ngram",
        ),
        ({"speculative_config": {"method": "draft_model"}}, "names no model to draft with"),
        ({"speculative_config": {"method": "mtp", "model": "x"}}, "the module of the model itself"),
        ({"speculative_config": "ngram"}, "is no dict"),
        ({"device_map": "balanced"}, "device_map='balanced' splits a model across devices"),
        ({"device_map": {"layers.0": 0, "layers.1": 1}}, "give device='cuda', or parallel='tp=2'"),
        ({"device": "cpu", "device_map": "cuda"}, "device='cpu' and device_map='cuda' both set device"),
        ({"n_gpu_layers": 12}, "splits a model between CPU and GPU"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "both set parallel"),
        ({"tensor_parallel_size": True}, "no number of ranks"),
        ({"enforce_eager": True}, "steps are captured wherever the device supports it"),
        ({"attn_implementation": "flash_attention_2"}, "chosen automatically"),
        ({"trust_remote_code": True}, "is never run"),
        ({"speculative_config": {"model": "x" * 500, "why": 1}}, "has 'why'"),
    ],
)
def test_what_has_no_meaning_here_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_options(given)
    said = str(caught.value)
    assert sentence in said and said.endswith(".") and len(said) < 300 and "\n" not in said


@pytest.mark.parametrize(("method", "config"), [("awq", {"quant_method": "gptq"}), ("gptq", None), ("gguf", None)])
def test_a_named_format_is_checked_against_the_checkpoint(method: str, config: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(speaking_folder(), tmp_path / "model")
    if config is not None:
        told = json.loads((folder / "config.json").read_text())
        quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
        (folder / "config.json").write_text(json.dumps({**told, "quantization_config": quantized}))
    said = "is quantized with gptq" if config else "is not quantized"
    with pytest.raises(ConfigError, match=f"'model' {said}, not with {method}: leave quantization out"):
        LLM(str(folder), quantization=method)


def test_the_checkpoints_own_format_may_be_named() -> None:
    files = ModelFiles(Path("m"), "hf", {}, None, {}, {}, "awq, 4 bits, groups of 128")  # type: ignore[arg-type]
    refuse_other_format(files, configure({"quantization": "awq_marlin"})[0].stored)
    refuse_other_format(replace(files, kind="gguf", quantization=None), "gguf")


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


def test_translated_speculation_is_one_that_can_be_chosen() -> None:
    for given in (
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        {"model": "org/small", "num_speculative_tokens": 3},
        {"method": "eagle", "model": "heads", "num_speculative_tokens": 3},
        {"method": "medusa", "model": "heads", "num_speculative_tokens": 3},
        {"method": "mtp", "num_speculative_tokens": 1},
        {"method": "suffix", "num_speculative_tokens": 8},
    ):
        SpeculativeChoice.parse(configure({"speculative_config": given})[0].speculative)
