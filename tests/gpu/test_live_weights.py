"""Weights that are written while captured steps stay: the graphs read the new numbers at the old addresses."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull import LLM, SamplingParams
from bankfull.runtime.twins import tensors_of
from tests.gpu.place import CUDA, DEVICE, only_cuda, require_device
from tests.tiny import speaking_folder

require_device()

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["The river runs", "The river runs at the full capacity of its channel, and the engine fills it."]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "quantize": "int8,keep"},
    {"dtype": "float32", "quantize": "fp8"},
    {"dtype": "float32", "speculative": "lookahead"},
)


def engine_of(folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(str(folder), device=str(DEVICE), memory="16MiB", rows=4, **{"speculative": "off", **options})


def said(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@only_cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_captured_steps_run_the_new_weights(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    old, new = speaking_folder(), speaking_folder(9)
    engine = engine_of(old, options)
    steps: Any = engine.loaded.engine.runner.run_model
    before, count, tensors = said(engine), steps.count, tensors_of(engine.loaded.model)
    places = [tensor.data_ptr() for tensor in tensors]
    written = engine.write_weights(new)
    assert [tensor.data_ptr() for tensor in tensors_of(engine.loaded.model)] == places
    assert steps.count == count > 0, "nothing is recorded again"
    assert said(engine) == said(engine_of(new, options)) != before
    engine.write_weights(old)
    assert said(engine) == before
    if CUDA:
        copies = [(torch.empty_like(tensor), tensor) for tensor in tensors]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for target, source in copies:
            target.copy_(source)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        with capsys.disabled():
            print(f"\npaused for {1e3 * written.paused_seconds:.2f} ms, a plain copy takes {1e3 * seconds:.2f} ms")


@only_cuda
@pytest.mark.parametrize("restart", [False, True])
def test_a_stream_goes_on(restart: bool) -> None:
    engine = engine_of(speaking_folder(), {"dtype": "float32"})
    stream = engine.stream(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    tokens = list(next(stream).token_ids)
    engine.write_weights(speaking_folder(9), restart=restart)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert len(tokens) == 40
    assert said(engine) == said(engine_of(speaking_folder(9), {"dtype": "float32"}))
