"""The works of quantized weights and of a quantized KV cache: each stands beside the same work in bfloat16."""

from __future__ import annotations

from benchmarks.gpu.engine import Setup
from benchmarks.gpu.works import Work, decode_work, mixed_work, offline, prefill_work

SHAPES = {"7b": "qwen2.5-7b", "8b": "llama-3-8b"}
WAYS = {
    "bf16": (None, "auto"),
    "int4": ("int4:128,tables", "auto"),
    "int8": ("int8:row,tables", "token"),
    "fp8": ("fp8,tables", "token"),
    "sparse24": ("2:4", "auto"),
}
"""Name -> weights and activations."""
KV = ("bfloat16", "int8", "fp8", "int4")
REQUESTS = {"requests": 32, "shortest": 64, "longest": 64, "outputs": 128, "reps": 3}
CONTEXT = 4096


def _works() -> dict[str, Work]:
    works: dict[str, Work] = {}
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
