"""The works of architectures beyond dense transformers: experts, latents, state spaces, hybrids, diffusion."""

from __future__ import annotations

from benchmarks.gpu.diffusion import denoise_work
from benchmarks.gpu.engine import Setup
from benchmarks.gpu.works import Work, context_work, decode_work, prefill_work

QWEN3_MOE = Setup("qwen3-30b-a3b", rows=32, step_tokens=16384)
DEEPSEEK = Setup("deepseek-v2-lite", rows=32, max_len=4352)
MAMBA2 = Setup("mamba2-2.7b", rows=64)
MAMBA2_LONG = Setup("mamba2-2.7b", rows=1, max_len=32768)
GRANITE = Setup("granite-4-h-tiny", rows=64)
LLADA = Setup("llada-8b", rows=4, max_len=1024, diffusion="block=32,length=128")
DENOISED = {"batch": 4, "prompt": 128, "outputs": 128, "reps": 1}
LONG = 16384
"""Context at which hybrids are compared with models that have attention in every layer."""


def long_work(shape: str, layers: int | None = None) -> Work:
    """Decode of 16 sequences at a long context; its rate and its bytes of state are to be compared in pairs."""
    setup = Setup(shape, rows=16, max_len=LONG, layers=layers)
    return decode_work(
        f"{setup.label}, batch 16, context {LONG}", setup, batch=16, prompt=LONG - 80, outputs=64, reps=2
    )


ONE = {"batch": 1, "prompt": 128, "outputs": 256, "reps": 3}
ARCHITECTURES: dict[str, Work] = {
    "experts-1": decode_work("Qwen3-30B-A3B, batch 1, context 128-384", QWEN3_MOE, **ONE),
    "experts-32": decode_work(
        "Qwen3-30B-A3B, batch 32, context 448-576", QWEN3_MOE, batch=32, prompt=448, outputs=128, reps=3
    ),
    "experts-prefill": prefill_work("Qwen3-30B-A3B, prefill 8 x 2048", QWEN3_MOE, batch=8, prompt=2048, reps=3),
    "latent-32": decode_work(
        "DeepSeek-V2-Lite, batch 32, context 4,096", DEEPSEEK, batch=32, prompt=4032, outputs=128, reps=2
    ),
    "mamba2-1": decode_work("Mamba-2 2.7B, batch 1", MAMBA2, **ONE),
    "mamba2-64": decode_work("Mamba-2 2.7B, batch 64", MAMBA2, batch=64, prompt=128, outputs=128, reps=3),
    "mamba2-context": context_work(
        "Mamba-2 2.7B, batch 1, time per token by context",
        MAMBA2_LONG,
        contexts=(128, 4096, 32500),
        outputs=128,
        reps=3,
    ),
    "granite-1": decode_work("Granite-4-H-tiny, batch 1", GRANITE, **ONE),
    "granite-64": decode_work("Granite-4-H-tiny, batch 64", GRANITE, batch=64, prompt=128, outputs=128, reps=3),
    "diffusion-1": denoise_work("LLaDA-8B, batch 4, block 32, 1 a step", LLADA, per_step=1, **DENOISED),
    "diffusion-4": denoise_work("LLaDA-8B, batch 4, block 32, 4 a step", LLADA, per_step=4, **DENOISED),
    "long-falcon-h1": long_work("falcon-h1-0.5b"),
    "long-qwen3": long_work("qwen3-0.6b"),
    "long-jamba": long_work("jamba-mini", 8),
    "long-mixtral": long_work("mixtral-8x7b", 8),
}
"""Each takes well under a minute beside the start of its engine. The works `long-...` come in pairs of equal size: a
hybrid, then a model with attention in every layer."""
