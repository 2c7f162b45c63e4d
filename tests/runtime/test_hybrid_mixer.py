"""A mixer with two states, KV pages and the last inputs of a convolution, runs through every path of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.mixer import Angles
from bankfull.models.common import TRANSFORMER, attention, heads_of, prenorm_decoder
from bankfull.models.fields import ConfigFields
from bankfull.ops import Kit, PagedMeta, RecurrentMeta, causal_conv, kit_for, native
from bankfull.runtime import naive
from bankfull.state.spec import Recurrent, StateSpec, TensorSpec, layout_of
from bankfull.state.storage import LayerStates
from bankfull.weights.source import open_model
from tests.kit import Bench, Guess, device_of
from tests.tiny import VOCAB, folder_of

CPU = torch.device("cpu")
WIDTH = 3
NEW = 16


class ConvAttention:
    """Attention over inputs that a short causal convolution has mixed."""

    rope: str | None = "global"

    def __init__(self, fields: ConfigFields, build: Build) -> None:
        hidden = fields.size("hidden_size")
        self.attention = attention(fields, build, heads_of(fields), qkv_bias=False, out_bias=False)
        self.kernel = torch.linspace(-1.0, 1.5, hidden * WIDTH, dtype=build.dtype).view(hidden, WIDTH)
        state = TensorSpec("conv", (hidden, WIDTH - 1), str(build.dtype).removeprefix("torch."))
        self.states: tuple[StateSpec, ...] = (*self.attention.states, Recurrent((state,)))
        self._conv = build.bind(causal_conv)

    def plan(self, batch: Batch, groups: Sequence[int | None]) -> tuple[PagedMeta, RecurrentMeta]:
        assert batch.read is not None and batch.write is not None and groups[1] is None
        slots = RecurrentMeta(batch.q_start, batch.kept, batch.read, batch.write, batch.starts, batch.kepts)
        return self.attention.plan(batch, groups[:1]), slots

    def run(
        self, x: Tensor, states: LayerStates, meta: tuple[PagedMeta, RecurrentMeta], angles: Angles | None
    ) -> Tensor:
        pages, slots = states
        mixed = self._conv(x, self.kernel, None, slots["conv"], meta[1])
        return self.attention.run(mixed, (pages,), meta[0], angles)


@lru_cache
def built(arithmetic: str) -> tuple[Decoder, Kit]:
    files = open_model(folder_of("llama"))
    kit = kit_for("cpu", "torch" if arithmetic == "bodies" else "auto")
    build = Build(files.source, kit, torch.float64 if arithmetic == "bodies" else torch.float32, CPU)
    fields = ConfigFields(files.config, TRANSFORMER)
    return prenorm_decoder(fields, build, heads_of(fields), lambda layer, at: ConvAttention(fields, at)), kit


@lru_cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens, margins = naive.generate(built("bodies")[0], prompt, NEW, CPU)
    assert min(margins) > 1e-3, f"the oracle itself hesitates: {min(margins)}"
    return tuple(tokens)


def test_its_two_states_lie_in_the_pages_and_in_the_slots() -> None:
    model, _ = built("bodies")
    layout = layout_of(model.states(), 4)
    assert [group.layers for group in layout.paged] == [(0, 1, 2)] and layout.groups == ((0, None),) * 3
    assert layout.recurrent is not None and layout.recurrent.members == ((0, 1), (1, 1), (2, 1))


def test_the_pass_may_be_cut_anywhere() -> None:
    model, _ = built("bodies")
    tokens = random.Random(2).choices(range(VOCAB), k=23)
    whole = naive.logits(model, tokens, CPU)
    assert torch.allclose(naive.logits(model, tokens, CPU, [1, 1, 9, 2, 10]), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("arithmetic", ["bodies", "kernels"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("strategy", ["plain", "drafts"])
def test_tokens_are_those_of_the_plain_loop(arithmetic: str, depth: int, strategy: str) -> None:
    """With the prefix cache, chunks, preemption, forks and drafts; kernels run captured."""
    if arithmetic == "kernels" and native.status() is not None:
        pytest.skip("the kernels are not built")
    model, kit = built(arithmetic)
    rng = random.Random(5)
    trunk = rng.choices(range(VOCAB), k=30)
    prompts = [trunk[:29], [*trunk[:16], 3, 1, 4], [5]]
    truths = [[*prompt, *truth(tuple(prompt))] for prompt in prompts]
    bench = Bench(
        model,
        device_of(depth, seed=3),
        depth,
        SchedConfig(rows=5, step_tokens=7),
        StateConfig(page_tokens=4, snapshot_every=2),
        Plain() if strategy == "plain" else Guess(truths),
        kit=kit,
    )
    assert hasattr(bench.runner.run_model, "tape") == (arithmetic == "kernels")
    for turn in range(2):  # the second finds the first in the prefix cache
        for number, prompt in enumerate(prompts):
            bench.add((turn, number), prompt, NEW, n=2)
        bench.run(preempt=rng)
        for number, prompt in enumerate(prompts):
            for child in range(2):
                assert tuple(bench.tokens[(turn, number), child]) == truth(tuple(prompt))
    assert bench.cached[1, 0] > 0
