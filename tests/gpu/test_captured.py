"""A captured step is the same launches in one go, and a sequence's results do not depend on who shares the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.decode.plain import Plain
from tests.gpu.place import CUDA, DEVICE, only_cuda, require_device
from tests.kit import Bench
from tests.tiny import speaking_folder

require_device()

from tests.gpu.engines import LOGPROBS, Echo, EchoTree, bench_of, logprobs_of, random_prompts  # noqa: E402

SHAPES = ("llama", "gemma", "sparse", "mamba", "mamba2", "s4", "hybrid")
DTYPES = (torch.float32, torch.bfloat16)
NEW = 12


def answers(bench: Bench, prompts: list[list[int]], *, told: bool) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """`told`: with log-probabilities, which takes another way through the captured step."""
    for i, prompt in enumerate(prompts):
        if told:
            bench.add(i, prompt, NEW, params=LOGPROBS)
        else:
            bench.add(i, prompt, NEW)
    bench.run()
    return bench.tokens, {i: logprobs_of(bench, i) for i in range(len(prompts))}


@only_cuda
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("strategy", (Plain, Echo, EchoTree), ids=("plain", "drafts", "trees"))
@pytest.mark.parametrize("told", (False, True), ids=("tokens", "logprobs"))
def test_captured_equals_launch_by_launch_bit_for_bit(
    shape: str, dtype: torch.dtype, strategy: type[Any], told: bool
) -> None:
    if strategy is EchoTree and shape not in ("llama", "gemma", "sparse"):
        pytest.skip("recurrent state verifies chains only")
    prompts = random_prompts(7, seed=3)
    results = []
    for captured in (True, False):
        bench = bench_of(shape, dtype, rows=6, strategy=strategy())
        steps: Any = bench.runner.run_model
        assert steps.count > 0, "nothing was captured"
        steps.enabled = captured
        results.append(answers(bench, prompts, told=told))
    assert results[0] == results[1]


@only_cuda
@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_of_every_captured_size_equal_those_launched_one_by_one(shape: str) -> None:
    """Replayed on the rows that a run has left behind: a step that is run again writes what it wrote."""
    bench = bench_of(shape, torch.bfloat16, rows=8)
    answers(bench, random_prompts(8, 20, seed=5), told=False)
    steps: Any = bench.runner.run_model
    for kind, recorded in steps.steps.items():
        size, width = kind.rows, kind.width
        found = []
        for enabled in (True, False):

            def run(enabled: bool = enabled, size: int = size, width: int = width, recorded: Any = recorded) -> Any:
                steps.lines[:size] = torch.arange(size, device=steps.lines.device)
                steps._sent = None
                steps.enabled = enabled
                steps._run(recorded, size, width)
                return recorded.hidden.clone()

            found.append(bench.device.launch(run).wait())
        assert torch.equal(*(one.nan_to_num(7.0) for one in found)), f"{size} rows, width {width}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES if CUDA else DTYPES[:1], ids=str)
@pytest.mark.parametrize("mates", (1, 3, 5))
def test_results_do_not_depend_on_what_batch_mates_say(shape: str, dtype: torch.dtype, mates: int) -> None:
    """Steps of the same shape: other mates as long as these leave every bit as it was."""
    mine = random_prompts(1, 17, seed=1)
    found = []
    for seed in (2, 3):
        others = random_prompts(mates, 23, seed=seed)
        bench = bench_of(shape, dtype, rows=6, step_tokens=256, prefix_cache=False)
        tokens, logprobs = answers(bench, mine + others, told=True)
        found.append((tokens[0, 0], logprobs[0]))
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_do_not_depend_on_how_many_batch_mates_there_are(shape: str) -> None:
    """In float32 sums may be grouped in another way for another number of rows; tokens stay."""
    mine = random_prompts(1, 17, seed=1)
    found = []
    for mates in (0, 1, 2, 5):
        bench = bench_of(shape, rows=6, step_tokens=256, prefix_cache=False)
        tokens, logprobs = answers(bench, mine + random_prompts(mates, 23, seed=mates), told=True)
        found.append(tokens[0, 0])
        assert len(logprobs[0]) == NEW and torch.tensor(logprobs[0]).isfinite().all()
    assert all(tokens == found[0] for tokens in found)


@only_cuda
def test_nothing_is_compiled_once_the_engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all lengths, alone and among others that answer already, greedy and drawn."""
    from triton import knobs

    llm = LLM(str(speaking_folder()), device=str(DEVICE), memory="64MiB", rows=8, max_model_len=128)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **facts: compiled.append(fn.name))
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True)
        for lengths in ((1,), (2,), (3,), (9,), (16,), (40,), (1, 40), (3, 17, 50), (2, 5, 9, 16, 17, 30, 60, 90)):
            llm.generate([list(range(3, 3 + length)) for length in lengths], params)
    assert not compiled
