"""Stages of a pipeline: each holds some layers; together they compute what the whole model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.models.registry import build_model, layer_count
from bankfull.ops import kit_for
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.shard import Shard
from bankfull.ranks.stage import Stage
from bankfull.runtime import naive
from bankfull.runtime.forward import plan_mixers
from bankfull.runtime.memory import plan_memory
from bankfull.spread.decoder import RankDecoder
from bankfull.state.spec import FRAME_ALIGN, Member, Paged, Recurrent, TensorSpec, layout_of
from bankfull.state.storage import Storage
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.source import ModelFiles, open_model
from tests.kit import Bench
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE, saved
from tests.parallel.even import even_model
from tests.parallel.split_bench import SplitBench
from tests.parallel.threads import Meeting, ThreadNeighbour, ThreadRank, on_ranks

SHARED = ("hunyuan-shared", "hunyuan-shared-biased")


def stage_of(files: ModelFiles, number: int, stages: int, borders: list[ThreadNeighbour]) -> RankDecoder:
    layers = layer_count(files.config)
    before = borders[number - 1] if number else None
    after = borders[number] if number < stages - 1 else None
    stage = Stage(*MeshSpec(pp=stages).stages(layers)[number], before, after)
    model = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU, stage=stage))
    assert isinstance(model, RankDecoder)
    return model


def hidden_of(model: RankDecoder, chunks: tuple[int, ...]) -> Tensor:
    """As `naive.hidden_states`, for the layers of a stage."""
    layout = layout_of(model.states(), 16).held(model.first, model.first + len(model.blocks))
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


@pytest.mark.few(24)
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


@given(
    st.lists(st.sampled_from(["full", "window", "slot", "both"]), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(2, 5),
)
def test_stages_keep_the_state_of_their_own_layers_under_the_same_page_numbers(
    kinds: list[str], stages: int, frames: int, slots: int
) -> None:
    """Together they keep as many bytes as one rank does, but for the alignment of frames and groups of unequal size."""
    paged = {"full": Paged((TensorSpec("k", (2, 8), "float32"),)), "window": Paged((TensorSpec("k", (8,), "int8"),), 4)}
    state = Recurrent((TensorSpec("s", (3, 5), "float32"),))
    made = {"full": (paged["full"],), "window": (paged["window"],), "slot": (state,), "both": (paged["full"], state)}
    whole = layout_of([made[kind] for kind in kinds], 4)
    owned: list[int] = []
    for first, last in MeshSpec(pp=min(stages, len(kinds))).stages(len(kinds)):
        held = whole.held(first, last)
        assert [one.page_tokens for one in held.paged] == [one.page_tokens for one in whole.paged]
        assert (held.groups, held.owners, held.block_tokens) == (whole.groups, whole.owners, whole.block_tokens)
        assert held.frames_for(37, 5) == whole.frames_for(37, 5)
        storage = Storage(held, frames, slots, CPU)
        assert storage.frames.shape == (frames + 1, held.frame_bytes)
        bytes_here = [
            sum(t.numel() * t.element_size() for own in states for t in own.values()) for states in storage.layers
        ]
        assert sum(t.nbytes for t in storage.slots) == 60 * (slots + 1) * sum(
            kind in ("slot", "both") for kind in kinds[first:last]
        )
        for layer, found in enumerate(bytes_here):
            assert (found > 0) == (first <= layer < last), "only this stage's layers have tensors"
        heaviest = max((one.token_bytes * one.page_tokens for one in held.paged), default=0)
        assert heaviest <= held.frame_bytes < heaviest + FRAME_ALIGN
        owned += [layer for layer, found in enumerate(bytes_here) if found]
    assert owned == list(range(len(kinds)))


@pytest.mark.parametrize("shape", ["llama", "hybrid", "mamba"])
def test_a_stage_of_an_engine_allocates_no_more_than_its_layers_need(shape: str) -> None:
    sched = SchedConfig(rows=3, step_tokens=16)
    with SplitBench(shape, sched=sched) as alone, SplitBench(shape, "pp=2", sched=sched) as first:
        whole, own = alone.runner.storage, first.runner.storage
        mine = MeshSpec(pp=2).stages(len(whole.layers))[0][1]
        assert own.frames.shape[0] == whole.frames.shape[0], "page numbers are those of all ranks"
        kept = [len(group.members) for group in first.runner.layout.paged]
        all_of_them = [len(group.members) for group in alone.runner.layout.paged]
        assert own.frames.nbytes * sum(all_of_them) == whole.frames.nbytes * sum(kept)
        slots = sum(layer < mine for layer, _ in members_of(alone)) / max(1, len(members_of(alone)))
        assert sum(t[0].nbytes for t in own.slots) == slots * sum(t[0].nbytes for t in whole.slots)
        assert sum(kept) + len(members_of(first)) < sum(all_of_them) + len(members_of(alone))


def members_of(bench: Bench) -> tuple[Member, ...]:
    recurrent = bench.runner.layout.recurrent
    return () if recurrent is None else recurrent.members


def test_a_stage_without_recurrent_layers_or_pages_plans_as_many_places_as_the_others_need() -> None:
    states = [(Paged((TensorSpec("k", (8,), "float32"),)),), (Recurrent((TensorSpec("s", (9,), "float32"),)),)]
    whole, how = layout_of(states, 4), {"free": 1 << 20, "depth": 2, "made_for": 64, "max_len": 64}
    sched, state = SchedConfig(rows=3, step_tokens=8), StateConfig(page_tokens=4)
    found = [plan_memory(one, sched, state, **how) for one in (whole, whole.held(0, 1), whole.held(1, 2))]  # type: ignore[arg-type]
    assert len({(one.frames, one.slots, one.rows, one.max_len) for one in found}) == 1
    assert found[1].nbytes(whole.held(0, 1)) + found[2].nbytes(whole.held(1, 2)) == found[0].nbytes(whole)


def test_a_tensor_rank_builds_other_stages_whose_matrices_have_outliers() -> None:
    """Where a rank's part of a fused matrix has its outliers is known from data only."""
    files = open_model(even_model("phi3")[0])
    fused = [name for name in files.source.names() if name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))]
    source = OutlierSource(files.source, {name: [1, 5] for name in fused}, CPU)
    stage = Stage(*MeshSpec(pp=2).stages(layer_count(files.config))[0], None, ThreadNeighbour())
    shard = Shard(ThreadRank(Meeting(2), 2, 1))
    build = Build(source, kit_for("cpu", "torch"), torch.float32, CPU, stage=stage, shard=shard)
    model = build_model(files.config, build)
    assert isinstance(model, RankDecoder) and len(model.states()) == layer_count(files.config)
