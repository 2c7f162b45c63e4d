"""Suggestions for options that do not exist: by meaning for options of other engines, by spelling for typing errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Options of vLLM, SGLang, llama.cpp and transformers that have another name here, with the value, if any.
SAME = {
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--max-completion-tokens": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--max-length": "--max-tokens",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "--n-ctx": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--max-context-len": "--max-model-len",
    "-c": "--max-model-len",
    "--max-num-seqs": "--rows",
    "--max-running-requests": "--rows",
    "--tensor-parallel-size": "--parallel tp=N",
    "--tensor-parallel": "--parallel tp=N",
    "--tp": "--parallel tp=N",
    "--tp-size": "--parallel tp=N",
    "--pipeline-parallel-size": "--parallel pp=N",
    "--pp-size": "--parallel pp=N",
    "--expert-parallel-size": "--parallel tp=N,ep=N",
    "--ep-size": "--parallel tp=N,ep=N",
    "--enable-expert-parallel": "--parallel tp=N,ep=N",
    "-np": "--rows",
    "--max-concurrent-requests": "--rows",
    "--max-num-batched-tokens": "--step-tokens",
    "--chunked-prefill-size": "--step-tokens",
    "--ubatch-size": "--step-tokens",
    "--batch-size": "--rows or --step-tokens",
    "--block-size": "--page-tokens",
    "--page-size": "--page-tokens",
    "--no-enable-prefix-caching": "--no-prefix-cache",
    "--disable-radix-cache": "--no-prefix-cache",
    "--kv-cache-dtype": "--kv-dtype",
    "--cache-type-k": "--kv-dtype",
    "--cache-type-v": "--kv-dtype",
    "--gpu-memory-utilization": "--memory",
    "--mem-fraction-static": "--memory",
    "--kv-cache-memory-bytes": "--memory",
    "--kv-cache-memory": "--memory",
    "--torch-dtype": "--dtype",
    "--data-type": "--dtype",
    "--half": "--dtype float16",
    "--bf16": "--dtype bfloat16",
    "--load-in-8bit": "--quantize int8",
    "--load-in-4bit": "--quantize int4",
    "--device-map": "--device",
    "--cpu": "--device cpu",
    "--gpu": "--device cuda",
    "--model-path": "--model",
    "--model-name-or-path": "--model",
    "--pretrained-model-name-or-path": "--model",
    "--hf-repo": "--model",
    "--model-id": "--model",
    "-hf": "--model",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt": "--system",
    "--num-return-sequences": "--n",
    "--num-samples": "--n",
    "--greedy": "--temperature 0",
    "--stop-strings": "--stop",
    "--reverse-prompt": "--stop",
    "--alias": "--served-model-name",
    "--api-key": "--api-key-file",
    "--ssl-certfile": "--tls-certificate",
    "--ssl-cert-file": "--tls-certificate",
    "--ssl-keyfile": "--tls-key",
    "--ssl-key-file": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
    "--allowed-origins": "--cors-origin",
    "--max-queued-requests": "--queue-requests",
    "--num-threads": "--threads",
    "--n-threads": "--threads",
    "--threads-batch": "--threads",
    "-t": "--threads",
}

_DRAFTS = "use --speculative NAME, such as suffix, eagle or draft:MODEL; `bankfull run --help` lists them"
_DRAFT_CONFIG = (
    "use --speculative ngram,width=4 for the method ngram with 4 tokens, or draft:MODEL,depth=4 for a draft model; "
    "`bankfull run --help` lists the others"
)
_DEVICES = "one device runs the whole model; start one server for each, with --device cuda:N, behind a load balancer"
_SPLIT = "one device runs the whole model; use --device cuda for all layers on the GPU, --device cpu for none"
_OFFLOADED = "all weights stay on the device; use --quantize int8 or int4, or --device cpu"
_BY_TEMPLATE = "the model's chat template decides, and /v1/models reports it; leave it out"
_OVER_THE_API = "it is a field of a request; send response_format or structured_outputs to `bankfull serve`"
_ADAPTERS = "adapters cannot be loaded yet; merge them into the checkpoint"
_KERNELS = "the fastest kernels for this machine are chosen automatically; leave it out"
_ALWAYS = "this engine always does that; leave it out"
#: Options with no equivalent, and the alternative.
ABSENT = {
    **dict.fromkeys(
        (
            "--draft",
            "--draft-max",
            "--draft-min",
            "--draft-model",
            "--model-draft",
            "-md",
            "--speculative-model",
            "--speculative-algorithm",
            "--speculative-draft-model-path",
            "--num-speculative-tokens",
            "--assistant-model",
            "--prompt-lookup-num-tokens",
            "--lookahead",
        ),
        _DRAFTS,
    ),
    **dict.fromkeys(
        (
            "--data-parallel-size",
            "--dp",
            "--dp-size",
            "--nnodes",
            "--tensor-split",
        ),
        _DEVICES,
    ),
    **dict.fromkeys(
        (
            "--n-gpu-layers",
            "--gpu-layers",
            "-ngl",
            "--split-mode",
            "--main-gpu",
            "--offload-folder",
        ),
        _SPLIT,
    ),
    **dict.fromkeys(
        (
            "--tool-call-parser",
            "--enable-auto-tool-choice",
            "--reasoning-parser",
            "--jinja",
            "--chat-template",
            "--enable-reasoning",
        ),
        _BY_TEMPLATE,
    ),
    **dict.fromkeys(("--grammar", "--json-schema", "--guided-decoding-backend", "--grammar-backend"), _OVER_THE_API),
    **dict.fromkeys(("--lora", "--enable-lora", "--lora-modules", "--lora-paths", "--adapter"), _ADAPTERS),
    **dict.fromkeys(
        (
            "--enable-prefix-caching",
            "--enable-chunked-prefill",
            "--cont-batching",
            "--flash-attn",
            "--mmap",
            "--metrics",
            "--enable-metrics",
            "--disable-log-requests",
            "--use-safetensors",
            "-fa",
        ),
        _ALWAYS,
    ),
    **dict.fromkeys(("--attention-backend", "--attn-implementation", "--sampling-backend"), _KERNELS),
    "--enforce-eager": "steps are captured wherever the device supports it; leave it out",
    "--trust-remote-code": "code from a checkpoint is never run; leave it out",
    "--do-sample": "use --temperature: above 0 samples, 0 is greedy",
    "--num-beams": "there is no beam search; use -n and --temperature for several samples",
    "--tokenizer": "the tokenizer comes with the model; leave it out",
    "--prompt": 'the prompt is an argument, as in bankfull run "What is a river?"',
    "-p": 'the prompt is an argument, as in bankfull run "What is a river?"',
    "--interactive": "that is the command bankfull chat",
    "--conversation": "that is the command bankfull chat",
    "-cnv": "that is the command bankfull chat",
    "--speculative-config": _DRAFT_CONFIG,
    "--cpu-offload-gb": _OFFLOADED,
    "--quantization": "the format of a quantized checkpoint is detected; use --quantize int8, int4 or fp8 to quantize "
    "another one at load",
    "-q": "the format of a quantized checkpoint is detected; use --quantize int8, int4 or fp8 to quantize another one "
    "at load",
    "--swap-space": "use --kv-host, with a unit: --kv-host 8GiB",
    "--hicache-size": "use --kv-host, with a unit: --kv-host 8GiB",
    "--kv-offloading-size": "use --kv-host, with a unit: --kv-host 8GiB",
    "--cache-ram": "use --kv-disk for prefixes that survive a restart; --memory sets the cache in memory",
    "--scheduling-policy": "the field `priority` of a request decides; leave it out",
    "--download-dir": "set the environment's BANKFULL_CACHE to a directory",
    "--cache-dir": "set the environment's BANKFULL_CACHE to a directory",
    "--mlock": "weights are read into memory and stay there; leave it out",
    "--no-mmap": "weights are read into memory and stay there; leave it out",
}


def about_unknown(option: str, own: Sequence[str], elsewhere: Mapping[str, Sequence[str]], command: str) -> str:
    """One sentence. `own`: the options of `command`; `elsewhere`: options of other commands, with these commands."""
    said = f"`{command}` has no option {option}"
    if option in ABSENT:
        return f"{said}: {ABSENT[option]}."
    if option in SAME:
        names = [word for word in SAME[option].split() if word.startswith("-")]
        if all(name in own for name in names):
            return f"{said}: use {SAME[option]}."
        if all(name in elsewhere for name in names):
            return f"{said}: the equivalent {SAME[option]} is an option of {_commands(elsewhere[names[0]])}."
    if option in elsewhere:
        return f"{said}: it is an option of {_commands(elsewhere[option])}."
    near = sorted((name for name in own if _misspelt(option, name)), key=lambda name: (_distance(option, name), name))
    if near:
        return f"{said}: did you mean {near[0]}?"
    return f"{said}: `{command} --help` lists its options."


def _commands(names: Sequence[str]) -> str:
    shown = [f"`{name}`" for name in names[:3]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _misspelt(given: str, known: str) -> bool:
    """Whether one letter is wrong, missing, extra or swapped; two in a long name."""
    length = len(known.lstrip("-"))
    return length > 2 and _distance(given, known) <= (1 if length < 8 else 2)


def _distance(one: str, other: str) -> int:
    """Edit distance: letters changed, added, removed, or swapped with their neighbour."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b))
            if i > 1 and j > 1 and a == other[j - 2] and one[i - 2] == b:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]
