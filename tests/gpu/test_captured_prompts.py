"""Captured steps of prompts: the bits of the same padded steps launched one by one, whoever shares them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bankfull.decode.plain import Plain
from bankfull.types import Work
from tests.gpu.place import only_cuda, require_device
from tests.kit import Bench

require_device()

from tests.gpu.engines import LOGPROBS, Echo, bench_of, logprobs_of, random_prompts  # noqa: E402

SHAPES = ("llama", "gemma", "sparse")
NEW = 6


class Counted:
    """How many steps went through graphs of prompts, by whether rows decoded beside them."""

    def __init__(self, bench: Bench) -> None:
        steps: Any = bench.runner.run_model
        self.chunks, self.kinds = steps._chunks, {False: 0, True: 0}
        replay = self.chunks.replay

        def counted(work: list[Work], captured: bool) -> Any:
            found = replay(work, captured)
            if found is not None:
                self.kinds[any(w.count + w.drafts == 1 for w in work)] += 1
            return found

        self.chunks.replay = counted


def told(bench: Bench, names: list[str], prompts: list[list[int]]) -> dict[str, Any]:
    for name, prompt in zip(names, prompts, strict=True):
        bench.add(name, prompt, NEW, params=LOGPROBS)
    bench.run()
    return {name: (bench.tokens[name, 0], logprobs_of(bench, name)) for name in names}


@only_cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("strategy", (Plain, Echo), ids=("plain", "drafts"))
def test_prompts_alone_chunked_and_behind_a_known_prefix_keep_their_bits(
    shape: str, dtype: torch.dtype, strategy: type[Any]
) -> None:
    """More prompts than rows, more tokens than a step: they come in chunks while others decode, and then again with
    beginnings that are in pages already."""
    first = random_prompts(7, seed=3)
    again = [[*prompt[: 3 + len(prompt) // 2], 5, 6, 7, 8] for prompt in first] + [random_prompts(1, 90, seed=9)[0]]
    results = []
    for captured in (True, False):
        bench = bench_of(shape, dtype, rows=4, step_tokens=48, strategy=strategy(), page=8)
        steps: Any = bench.runner.run_model
        steps.enabled = captured
        counted = Counted(bench)
        found = told(bench, [f"first {i}" for i in range(len(first))], first)
        found |= told(bench, [f"again {i}" for i in range(len(again))], again)
        assert counted.kinds[False] and (counted.kinds[True] or strategy is Echo), counted.kinds
        assert any(bench.cached[f"again {i}"] for i in range(len(first))), "no prefix was found"
        results.append(found)
    assert results[0] == results[1]


@only_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_of_every_captured_size_equal_those_launched_one_by_one(shape: str) -> None:
    bench = bench_of(shape, torch.bfloat16, rows=6, step_tokens=300, frames=600, max_len=320)
    steps, rows = bench.runner.run_model, bench.runner.rows
    chunks: Any = steps._chunks  # type: ignore[attr-defined]
    sizes = sorted({size for size, _ in chunks.recorded})
    assert sizes[-1] == 300 and len(chunks.recorded) == 2 * len(sizes)

    def fill() -> None:
        """Pages of its own for each row and group, with something in them."""
        page = 1
        for table in rows.tables:
            table[:6] = torch.arange(page, page + 6 * table.shape[1], device=table.device).view(6, -1)
            page += 6 * table.shape[1]
        assert page <= 601, "there are too few pages"
        for (state,) in bench.runner.storage.layers:
            for part in state.values():
                part.normal_()
        rows.tokens.random_(50)

    bench.device.launch(fill).wait()

    def run(work: list[Work], captured: bool) -> torch.Tensor:
        rows.computed[:], rows.reached[:] = 20, 20
        found = chunks.replay(work, captured)
        assert found is not None
        return torch.as_tensor(found[1].clone())

    for size in sizes:
        for counts in ((size,), (size - 9, 9), (size - 9, 1, 5, 1), (size - 11, 1)):
            counts = tuple(min(count, 290) for count in counts)
            work = [Work(row, 20, count, sample=True) for row, count in enumerate(counts)]
            found = [bench.device.launch(lambda w=work, c=c: run(w, c)).wait() for c in (True, False)]
            assert found[0].isfinite().all() and torch.equal(*found), counts


@only_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_steps_without_padding(shape: str) -> None:
    """In float32 sums may be grouped in another way; tokens stay."""
    prompts = random_prompts(9, seed=4)
    results = []
    for captured in (True, False):
        bench = bench_of(shape, rows=5, step_tokens=64)
        if not captured:
            steps: Any = bench.runner.run_model
            steps._chunks = None
        told(bench, [str(i) for i in range(len(prompts))], prompts)
        results.append(bench.tokens)
    assert results[0] == results[1]
