"""Engines of one process, each in a thread: what kernels keep between launches belongs to one engine's stream."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.gpu.place import require_device
from tests.kit import Bench

require_device()

from tests.gpu.engines import bench_of, random_prompts  # noqa: E402

ENGINES, NEW = 4, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_in_threads_give_the_tokens_of_one_that_is_alone(dtype: torch.dtype) -> None:
    prompts = random_prompts(3, 90, seed=5)  # long contexts of few sequences are split among programs

    def answers(bench: Bench, turns: int) -> list[list[list[int]]]:
        found = []
        for turn in range(turns):
            for i, prompt in enumerate(prompts):
                bench.add((turn, i), prompt, NEW)
            bench.run()
            found.append([bench.tokens[(turn, i), 0] for i in range(len(prompts))])
        return found

    (alone,) = answers(bench_of("llama", dtype), 1)
    benches = [bench_of("llama", dtype) for _ in range(ENGINES)]
    with ThreadPoolExecutor(ENGINES) as threads:
        for found in threads.map(answers, benches, [8] * ENGINES):
            assert all(turn == alone for turn in found)
