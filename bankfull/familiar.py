"""Options by the names of other libraries (transformers, vLLM, SGLang, llama.cpp), translated to bankfull's.

A name with an equivalent is translated. A value that asks for what this engine always does is dropped. Any other is
refused in one sentence: nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import BankfullError, ConfigError, RequestError
from bankfull.scheduling import readers

Own = dict[str, Any]
Reading = Callable[[str, Any], Own]
"""Translates a name and its value to bankfull's options; raises a ValueError with the reason and the alternative."""

CHOSEN_BY_DEVICE = ("rows", "step_tokens")
"""Options whose default depends on the device."""

DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "float": "float32",
    "fp32": "float32",
    "bf16": "bfloat16",
    "double": "float64",
    "fp64": "float64",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
}


def engine_options(given: Mapping[str, Any]) -> Own:
    """The options of an `LLM` under bankfull's names."""
    return _translated(given, ENGINE, ConfigError)


def configure(given: Mapping[str, Any]) -> tuple[RunConfig, SchedConfig, StateConfig, int | None]:
    """The options of an `LLM`, sorted into the configurations that own them; last, `max_model_len`."""
    options = engine_options(given)
    max_len = options.pop("max_model_len", None)
    owned: list[set[str]] = [{field.name for field in fields(owner)} for owner in (RunConfig, SchedConfig, StateConfig)]
    sorted_out: list[Own] = [{}, {}, {}]
    for name, value in options.items():
        if name in CHOSEN_BY_DEVICE and not value:
            if value is None:
                continue
            raise ConfigError(
                f"{name}={value!r} must be a whole number of at least 1; leave it out for the device's default."
            )
        for names, part in zip(owned, sorted_out, strict=True):
            if name in names:
                part[name] = value
                break
        else:
            known = sorted(set().union(*owned, ENGINE, ["max_model_len"]))
            raise ConfigError(f"Option {name!r} is unknown; known are {', '.join(known)}.")
    _refuse_unread(sorted_out[1])
    return RunConfig(**sorted_out[0]), SchedConfig(**sorted_out[1]), StateConfig(**sorted_out[2]), max_len


def _refuse_unread(scheduling: Own) -> None:
    """Options of scheduling that the chosen policy or gate would not read."""
    usual = SchedConfig()
    for name, owner, reading in readers():
        if name in scheduling and scheduling.get(owner, getattr(usual, owner)) not in reading:
            raise ConfigError(
                f"{name}={_shown(scheduling[name])} has no effect here; it needs {owner}={' or '.join(reading)}."
            )


def _weights(name: str, value: Any) -> Own:
    """Weights of tenants, as a dict or as pairs."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise ValueError("is no weights of API keys; give a dict such as {'alice': 2.0}")
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError("is no weights of API keys; give a dict such as {'alice': 2.0}")
    return {"weights": tuple((tenant, weight) for tenant, weight in pairs)}


def sampling_options(given: Mapping[str, Any]) -> Own:
    """The options of a `SamplingParams` under bankfull's names."""
    if given.get("do_sample") is True and given.get("temperature") == 0:
        raise RequestError("do_sample=True samples, but temperature=0 is greedy; give a temperature above 0.")
    return _translated(given, SAMPLING, RequestError)


def _translated(given: Mapping[str, Any], table: Mapping[str, Reading], error: type[BankfullError]) -> Own:
    options: Own = {}
    by: dict[str, str] = {}
    for name, value in given.items():
        try:
            meant = table[name](name, value) if name in table else {name: value}
        except ValueError as problem:
            raise error(f"{name}={_shown(value)} {problem}.") from None
        for own, what in meant.items():
            if own in options and options[own] != what:
                raise error(
                    f"{by[own]}={_shown(given[by[own]])} and {name}={_shown(value)} both set {own}; give one of them."
                )
            options[own], by[own] = what, name
    return options


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- translations


def _is(own: str) -> Reading:
    return lambda name, value: {own: value}


def _if_given(own: str) -> Reading:
    return lambda name, value: {} if value is None else {own: value}


def _ranks(axis: str) -> Reading:
    def read(name: str, value: Any) -> Own:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError("is no number of ranks; give a whole number, as in parallel='tp=2'")
        return {} if value == 1 else {"parallel": f"{axis}={value}"}

    return read


def _only(*values: object, else_: str) -> Reading:
    """These values ask for what the engine always does."""

    def read(name: str, value: Any) -> Own:
        if any(value is one or (value == one and not isinstance(value, bool)) for one in values):
            return {}
        raise ValueError(else_)

    return read


def _never(why: str) -> Reading:
    return _only(None, else_=why)


def _rounding(own: str) -> Reading:
    """load_in_8bit and load_in_4bit."""

    def read(name: str, value: Any) -> Own:
        if value is None or value is False:
            return {}
        if value is not True:
            raise ValueError("must be True or False")
        return {"quantize": own}

    return read


def _gigabytes(own: str) -> Reading:
    """A size in GiB; 0 = none."""

    def read(name: str, value: Any) -> Own:
        if value is None or value == 0:
            return {}
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ValueError("must be a number of GiB")
        return {own: int(value * 2**30)}

    return read


def _quantization_config(name: str, value: Any) -> Own:
    """transformers' BitsAndBytesConfig, or a dict of the same names."""
    if value is None:
        return {}
    chosen = [
        own
        for key, own in (("load_in_8bit", "llm.int8"), ("load_in_4bit", "int4"))
        if (value.get(key) if isinstance(value, Mapping) else getattr(value, key, None))
    ]
    if len(chosen) != 1:
        raise ValueError("is not supported; give quantize='int8' or quantize='int4'")
    return {"quantize": chosen[0]}


STORED = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "hqq": "hqq",
    "gguf": "gguf",
}
"""Values of `quantization` that name the format of a quantized checkpoint."""


def _quantization(name: str, value: Any) -> Own:
    if value is None:
        return {}
    if value == "fp8":
        return {"quantize": "fp8"}
    if value in ("int8", "int4"):
        return {"quantize": value}
    if isinstance(value, str) and value in STORED:
        return {"stored": STORED[value]}
    raise ValueError(
        f"is not supported: leave it out, or name the format of a quantized checkpoint ({', '.join(STORED)}); to "
        "quantize another one at load, give quantize='int8', 'int4' or 'fp8'"
    )


def _dtype(own: str) -> Reading:
    def read(name: str, value: Any) -> Own:
        if value is None:
            return {}
        text = str(value).removeprefix(
            "torch."
        )  # a torch.dtype is identified by its name, so that torch is not imported
        return {own: DTYPES.get(text, text)}

    return read


def _device(name: str, value: Any) -> Own:
    return {} if value is None else {"device": _device_name(value)}


def _device_map(name: str, value: Any) -> Own:
    if isinstance(value, Mapping):
        places = {_device_name(place) for place in value.values()}
        if len(places) != 1 or places == {"disk"}:
            raise ValueError(
                "splits a model across devices, but one device runs the whole model; give device='cuda', or "
                "parallel='tp=2' for two GPUs"
            )
        value = places.pop()
    if value in ("balanced", "balanced_low_0", "sequential"):
        raise ValueError(
            "splits a model across devices by layers, but one device runs the whole model; give device='cuda', or "
            "parallel='pp=2' for two GPUs"
        )
    return _device(name, value)


def _device_name(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"cuda:{value}"
    return str(value)


ALL_LAYERS = 99
"""Layers on the GPU from which on llama.cpp's users mean all of them."""


def _gpu_layers(name: str, value: Any) -> Own:
    if value is None or value == -1:
        return {}
    if isinstance(value, int) and not isinstance(value, bool):
        if value == 0:
            return {"device": "cpu"}
        if value >= ALL_LAYERS:
            return {}  # as there, the CPU where there is no GPU
    raise ValueError(
        "splits a model between CPU and GPU, but one device runs the whole model; give -1 for the GPU or 0 for the CPU"
    )


def _main_gpu(name: str, value: Any) -> Own:
    if value is None or value == 0:
        return {}
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("is no number of a GPU; give device='cuda:1'")
    return {"device": f"cuda:{value}"}


def _context(name: str, value: Any) -> Own:
    """llama.cpp: 0 = the model's."""
    return {} if value is None or (value == 0 and value is not False) else {"max_model_len": value}


_LOOKUP_KEYS = {
    "num_speculative_tokens": "width",
    "prompt_lookup_min": "least",
    "prompt_lookup_max": "most",
}
_DRAFTERS = {
    "draft_model": ("draft", "depth"),
    "eagle": ("eagle", "depth"),
    "eagle3": ("eagle", "depth"),
    "medusa": ("medusa", "nodes"),
    "mtp": ("mtp", "width"),
    "deepseek_mtp": ("mtp", "width"),
}
"""vLLM's methods with a model: the way here, and its option for the number of draft tokens."""


def _speculative_config(name: str, value: Any) -> Own:
    """vLLM's dict: a method, a model, and how many tokens."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("is no dict; give speculative, such as 'suffix', 'eagle' or 'draft:MODEL'")
    method, model = value.get("method"), value.get("model")
    if method is None:
        method = "ngram" if model in (None, "ngram", "[ngram]") else "draft_model"
    if method in ("ngram", "suffix"):
        keys = {key: own for key, own in _LOOKUP_KEYS.items() if method == "ngram" or own == "width"}
        way, model = method, None
    elif method in _DRAFTERS:
        way, number = _DRAFTERS[method]
        keys = {"num_speculative_tokens": number}
        if model is not None and way == "mtp":
            raise ValueError(
                "names a model, but method mtp drafts with the module of the model itself; leave model out"
            )
        if model is None and way == "draft":
            raise ValueError("names no model to draft with; give speculative='draft:MODEL'")
    else:
        raise ValueError("names an unknown method; give speculative, such as 'suffix', 'eagle' or 'draft:MODEL'")
    unread = sorted(str(key) for key in value.keys() - keys.keys() - {"method", "model"})
    if unread:
        raise ValueError(
            f"has {unread[0]!r}, which {method} has not here; give speculative={way!r} with its own options"
        )
    if model is not None and (not isinstance(model, str) or "," in model):
        raise ValueError("names a model that is no path without commas; give speculative='draft:MODEL'")
    options = [f"{own}={value[key]}" for key, own in keys.items() if value.get(key) is not None]
    return {"speculative": ",".join((way if model is None else f"{way}:{model}", *options))}


def _do_sample(name: str, value: Any) -> Own:
    if value is None or value is True:
        return {}
    if value is not False:
        raise ValueError("must be True or False")
    return {"temperature": 0.0}


_ONE_DEVICE = "is not supported: one device runs the whole model; leave it out, and start one server for each device"
_NO_DRAFTS = "is not supported: use speculative, such as 'suffix', 'eagle' or 'draft:MODEL'"
_NO_ADAPTERS = "is not supported: adapters cannot be loaded yet; merge them into the checkpoint, and leave it out"
_NO_BEAMS = "is not supported: there is no beam search; ask for several samples with n and a temperature above 0"
_KERNELS = "is not supported: the fastest kernels for this machine are chosen automatically; leave it out"
_CHUNKS = "is not supported: long prompts are always split into chunks; leave it out"
_CAPTURED = "is not supported: steps are captured wherever the device supports it; leave it out"
_TOKENIZER = "is not supported: the tokenizer comes with the model; leave it out"
_TEMPLATE = "is not supported: the chat template comes with the model; leave it out"
_READ_ONCE = "is not supported: weights are read into memory once and stay there; leave it out"
_PAGES = "is not supported: give kv_dtype, such as 'int8', for keys and values alike"
_NO_CODE = "is not supported: code from a checkpoint is never run; leave it out"

ENGINE: dict[str, Reading] = {
    "dtype": _dtype("dtype"),
    "torch_dtype": _dtype("dtype"),
    "device": _device,
    "device_map": _device_map,
    "n_gpu_layers": _gpu_layers,
    "gpu_layers": _gpu_layers,
    "main_gpu": _main_gpu,
    "split_mode": _never(_ONE_DEVICE),
    "tensor_split": _never(_ONE_DEVICE),
    "load_in_8bit": _rounding("llm.int8"),
    "load_in_4bit": _rounding("int4"),
    "quantization_config": _quantization_config,
    "quantization": _quantization,
    "max_seq_len": _if_given("max_model_len"),
    "max_seq_length": _if_given("max_model_len"),
    "context_length": _if_given("max_model_len"),
    "n_ctx": _context,
    "n_batch": _if_given("step_tokens"),
    "n_ubatch": _if_given("step_tokens"),
    "n_seq_max": _if_given("rows"),
    "n_threads": _if_given("threads"),
    "n_threads_batch": _if_given("threads"),
    "max_num_seqs": _is("rows"),
    "max_running_requests": _is("rows"),
    "max_num_batched_tokens": _is("step_tokens"),
    "chunked_prefill_size": _is("step_tokens"),
    "block_size": _is("page_tokens"),
    "page_size": _is("page_tokens"),
    "enable_prefix_caching": _if_given("prefix_cache"),
    "gpu_memory_utilization": _is("memory"),
    "mem_fraction_static": _is("memory"),
    "kv_cache_memory_bytes": _is("memory"),
    "scheduling_policy": _is("policy"),
    "schedule_policy": _is("policy"),
    "weights": _weights,
    "kv_cache_dtype": _dtype("kv_dtype"),
    "tensor_parallel_size": _ranks("tp"),
    "pipeline_parallel_size": _ranks("pp"),
    "data_parallel_size": _only(1, else_=_ONE_DEVICE),
    "tp_size": _ranks("tp"),
    "pp_size": _ranks("pp"),
    "dp_size": _only(1, else_=_ONE_DEVICE),
    "trust_remote_code": _only(False, None, else_=_NO_CODE),
    "enable_chunked_prefill": _only(True, None, else_=_CHUNKS),
    "enforce_eager": _only(False, None, else_=_CAPTURED),
    "attn_implementation": _never(_KERNELS),
    "attention_backend": _never(_KERNELS),
    "low_cpu_mem_usage": _only(True, None, else_="is not supported: weights are never loaded twice; leave it out"),
    "use_safetensors": _only(True, None, else_="is not supported: pickled weights are never read; leave it out"),
    "tokenizer": _never(_TOKENIZER),
    "tokenizer_mode": _only("auto", None, else_=_TOKENIZER),
    "load_format": _only("auto", None, else_="is not supported: the format is detected automatically; leave it out"),
    "enable_lora": _only(False, None, else_=_NO_ADAPTERS),
    "lora_path": _never(_NO_ADAPTERS),
    "speculative_config": _speculative_config,
    "speculative_model": _never(_NO_DRAFTS),
    "num_speculative_tokens": _never(_NO_DRAFTS),
    "draft_model": _never(_NO_DRAFTS),
    "assistant_model": _never(_NO_DRAFTS),
    "chat_format": _never(_TEMPLATE),
    "chat_template": _never(_TEMPLATE),
    "flash_attn": _only(True, None, else_=_KERNELS),
    "use_mmap": _only(True, None, else_=_READ_ONCE),
    "use_mlock": _only(False, None, else_=_READ_ONCE),
    "offload_kqv": _only(True, None, else_="is not supported: the KV cache lies where the model runs; leave it out"),
    "type_k": _never(_PAGES),
    "type_v": _never(_PAGES),
    "logits_all": _only(False, None, else_="is not supported: ask for logprobs or prompt_logprobs in SamplingParams"),
    "embedding": _only(True, False, None, else_="must be True or False"),
    "verbose": _only(False, None, else_="is not supported: a load prints one line at most; leave it out"),
    "disable_log_stats": _only(True, None, else_="is not supported: `bankfull serve` has metrics; leave it out"),
    "distributed_executor_backend": _only(
        "mp", "uni", None, else_="is not supported: give parallel, and ray=HOST:PORT"
    ),
    "enable_expert_parallel": _only(False, None, else_="is not supported: give parallel, as in parallel='tp=2,ep=2'"),
    "download_dir": _never("is not supported: set the environment's BANKFULL_CACHE to a directory"),
    "cache_dir": _never("is not supported: set the environment's BANKFULL_CACHE to a directory"),
    "limit_mm_per_prompt": _never("is not supported: only text is; leave it out"),
    "max_loras": _never(_NO_ADAPTERS),
    "max_lora_rank": _never(_NO_ADAPTERS),
    "swap_space": _gigabytes("kv_host"),
    "hicache_size": _gigabytes("kv_host"),
    "kv_offloading_size": _gigabytes("kv_host"),
    "cpu_offload_gb": _only(
        0,
        None,
        else_="is not supported: all weights stay on the device; give quantize='int8' or 'int4', or device='cpu'",
    ),
}

SAMPLING: dict[str, Reading] = {
    "max_new_tokens": _if_given("max_tokens"),
    "max_completion_tokens": _if_given("max_tokens"),
    "min_new_tokens": _if_given("min_tokens"),
    "num_return_sequences": _if_given("n"),
    "do_sample": _do_sample,
    "stop_strings": _if_given("stop"),
    "suppress_tokens": _if_given("banned_token_ids"),
    "max_length": _never("includes the prompt; give max_tokens, which counts generated tokens only"),
    "num_beams": _only(1, None, else_=_NO_BEAMS),
    "use_beam_search": _only(False, None, else_=_NO_BEAMS),
    "length_penalty": _only(1.0, 1, None, else_=_NO_BEAMS),
    "no_repeat_ngram_size": _only(0, None, else_="is not supported; give repetition_penalty"),
    "eos_token_id": _never("is not supported: the model's end tokens are known; give stop_token_ids for more"),
    "pad_token_id": _never("is not supported: nothing is padded; leave it out"),
    "guided_decoding": _never("is not supported; give structured=StructuredOutput(json=...)"),
    "structured_outputs": _never("is not supported; give structured=StructuredOutput(json=...)"),
}
