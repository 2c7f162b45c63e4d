"""The works of quantized weights and of a quantized KV cache: each stands beside the same work in bfloat16."""

from __future__ import annotations

from benchmarks.gpu.engine import Setup
from benchmarks.gpu.works import ONE, Work, decode_work, mixed_work, offline, prefill_work

SHAPES = {"7b": "qwen2.5-7b", "8b": "llama-3-8b"}
WAYS = {
    "bf16": (None, "auto"),
    "int4": ("int4:128,tables", "auto"),
    "int8": ("int8:row,tables", "token"),
    "fp8": ("fp8,tables", "token"),
    "llm.int8": ("llm.int8", "auto"),
    "sparse24": ("2:4", "auto"),
}
"""Name -> weights and activations."""
KV = ("bfloat16", "int8", "fp8", "int4")
REQUESTS = {"requests": 32, "shortest": 64, "longest": 64, "outputs": 128, "reps": 3}
CONTEXT = 4096
MXFP4 = Setup("gpt-oss-20b", rows=64, step_tokens=16384, mxfp4=True)


def _works() -> dict[str, Work]:
    works: dict[str, Work] = {
        "decode-int3": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "int3:128,tables"), **ONE),
        "decode-int2": decode_work("8B, batch 1, context 128-512", Setup("llama-3-8b", "int2:128,tables"), **ONE),
        "mxfp4-1": decode_work("gpt-oss-20b, batch 1, context 128-512", MXFP4, **ONE),
        "mxfp4-32": decode_work("gpt-oss-20b, batch 32", MXFP4, batch=32, prompt=448, outputs=128, reps=3),
        "mxfp4-prefill": prefill_work("gpt-oss-20b, prefill 8 x 2048", MXFP4, batch=8, prompt=2048, reps=3),
    }
    for size, shape in SHAPES.items():
        for way, (quantize, activations) in WAYS.items():
            setup = Setup(shape, quantize, rows=32, step_tokens=16384, activations=activations)
            works[f"requests-{size}-{way}"] = mixed_work(
                f"{size.upper()}, 32 requests, 64 in, 128 out", setup, offline, **REQUESTS
            )
            works[f"prefill-{size}-{way}"] = prefill_work(
                f"{size.upper()}, prefill 8 x 2048", setup, batch=8, prompt=2048, reps=3
            )
        for kind in KV:
            setup = Setup(shape, rows=64, max_len=CONTEXT + 64, kv_dtype=kind)
            works[f"kv-{size}-{kind}"] = decode_work(
                f"{size.upper()}, batch 64, context {CONTEXT}", setup, batch=64, prompt=CONTEXT - 64, outputs=96, reps=2
            )
    return works


QUANTIZATION = _works()
