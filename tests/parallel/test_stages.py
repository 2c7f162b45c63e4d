"""Stages of a pipeline: each holds some layers; together they compute what the whole model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.stage import Stage
from bankfull.layers.staged import StageDecoder
from bankfull.mesh import MeshSpec
from bankfull.models.registry import build_model
from bankfull.models.splitting import layer_count
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.runtime.forward import plan_mixers
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.source import ModelFiles, open_model
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE, saved
from tests.parallel.threads import ThreadNeighbour, ThreadRank, on_ranks

SHARED = ("hunyuan-shared", "hunyuan-shared-biased")


def stage_of(files: ModelFiles, number: int, stages: int, borders: list[ThreadNeighbour]) -> StageDecoder:
    layers = layer_count(files.config)
    before = borders[number - 1] if number else None
    after = borders[number] if number < stages - 1 else None
    stage = Stage(*MeshSpec(pp=stages).stages(layers)[number], before, after)
    model = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU, stage=stage))
    assert isinstance(model, StageDecoder)
    return model


def hidden_of(model: StageDecoder, chunks: tuple[int, ...]) -> Tensor:
    """As `naive.hidden_states`, for the layers of a stage."""
    layout = layout_of(model.states(), 16)
    frames = sum(-(-len(TOKENS) // group.page_tokens) for group in layout.paged)
    storage, count = Storage(layout, frames, 2, CPU), len(model.blocks)
    own, states = layout.part(model.first, count), storage.layers[model.first : model.first + count]
    parts, start = [], 0
    for turn, size in enumerate(chunks):
        batch = naive.single_batch(layout, TOKENS, start, size, turn, CPU)
        parts.append(model.forward(batch, states, plan_mixers(model, own, batch)))
        start += size
    return torch.cat(parts)


def run(name: str, stages: int) -> list[Any]:
    borders = [ThreadNeighbour() for _ in range(stages - 1)]
    saved(name)  # once, before the ranks are threads

    def work(rank: ThreadRank) -> Any:
        model = stage_of(open_model(saved(name).path), rank.index, stages, borders)
        hidden = hidden_of(model, PASSES["chunks"])
        return model.head(hidden) if rank.index == stages - 1 else borders[rank.index].bytes

    return on_ranks(stages, work)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SHARED])
def test_two_stages_compute_the_logits_of_the_reference(name: str) -> None:
    sent, logits = run(name, 2)
    assert float((logits - saved(name).logits).abs().max()) < TOLERANCE
    config = open_model(saved(name).path).config
    hidden = config.get("text_config", config)["hidden_size"]
    assert sent == 4 * len(TOKENS) * hidden  # one row of the stream for each token


def test_three_stages_of_three_layers() -> None:
    *_, logits = run("llama", 3)
    assert float((logits - saved("llama").logits).abs().max()) < TOLERANCE


def test_a_stage_reads_only_its_own_layers() -> None:
    files = open_model(saved("llama").path)
    stage_of(files, 0, 2, [ThreadNeighbour()])
    unread = files.source.unread()
    assert any(name.startswith("model.layers.2.") for name in unread) and "lm_head.weight" in unread
    assert not any(name.startswith("model.layers.0.") for name in unread)


@pytest.mark.parametrize("name", SHARED)
def test_layers_that_share_keys_and_values_stay_in_one_stage(name: str) -> None:
    files = open_model(saved(name).path)
    with pytest.raises(ConfigError, match="another stage of the pipeline computes"):
        for number in range(3):
            stage_of(files, number, 3, [ThreadNeighbour(), ThreadNeighbour()])
