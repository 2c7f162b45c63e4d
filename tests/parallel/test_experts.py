"""Expert ranks: each holds some experts, tokens travel to them, and the logits are those of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bankfull.errors import ModelError
from bankfull.layers.build import Build
from bankfull.layers.experts import Experts
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.mesh import MeshSpec
from bankfull.spread.experts import SpreadExperts
from bankfull.synthetic.checkpoint import write_checkpoint
from bankfull.synthetic.gguf_file import write_gguf
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.source import open_model
from tests.models.composed import config_of
from tests.models.oracle import CPU, TOKENS, TOLERANCE
from tests.parallel.built import build_of, expert_ranks, logits_of, model_of
from tests.parallel.even import even_model
from tests.parallel.threads import ThreadRank, on_ranks
from tests.weights.test_mxfp4 import quantized_directory

FAMILIES = (
    "mixtral",
    "qwen2-moe",
    "qwen2-moe-mixed",
    "qwen3-moe",
    "olmoe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "minimax",
    "qwen3-next",
    "jamba",
    "granitemoehybrid",
)
FOUR = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
"""Sizes that four ranks divide."""
MAMBA = {"mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 12, "shared_intermediate_size": 28}
LAYOUTS = {"alone": None, "tensor": MeshSpec(tp=2, ep=2)}


def worst(name: str, ranks: int, mesh: MeshSpec | None, cut: str = "chunks", **changes: int) -> float:
    path, expected = even_model(name, **changes)
    found = on_ranks(ranks, lambda rank: logits_of(model_of(rank, path, mesh), cut))
    return max(float((one - expected).abs().max()) for one in found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_expert_ranks_compute_the_logits_of_the_reference(name: str, layout: str) -> None:
    assert worst(name, 2, LAYOUTS[layout]) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3", "jamba", "granitemoehybrid"])
def test_tensor_ranks_that_experts_leave_over_split_their_width(name: str) -> None:
    changes = FOUR | (MAMBA if name == "granitemoehybrid" else {})
    assert worst(name, 4, MeshSpec(tp=4, ep=2), **changes) < TOLERANCE


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_four_tensor_ranks_hold_different_experts(name: str) -> None:
    assert worst(name, 4, MeshSpec(tp=4, ep=4), **FOUR) < TOLERANCE


@pytest.mark.parametrize("ranks", [3, 5])
def test_one_token_at_a_time_leaves_ranks_without_tokens(ranks: int) -> None:
    """Five experts: three ranks have one or two each, five ranks one."""
    assert worst("mixtral", ranks, None, "single") < TOLERANCE


def test_copies_of_hot_experts_change_no_logit() -> None:
    """Before the first step and between two, with a part of each width on a rank."""
    mesh = MeshSpec(tp=4, ep=2)
    path, expected = even_model("gpt-oss", **FOUR)

    def work(rank: ThreadRank) -> list[torch.Tensor]:
        groups = replace(expert_ranks(rank, mesh), hot={"model.layers.0.mlp": [4], "model.layers.1.mlp": [0, 3]})
        model = model_of(rank, path, mesh, experts=groups)
        feeds = [block.feed for block in model.blocks if isinstance(block.feed, SpreadExperts)]
        assert [feed.spread.hot for feed in feeds] == [(4,), (0, 3)]
        for feed in feeds:
            feed.count_routing()
        found = [logits_of(model)]
        for feed in feeds:
            counts = feed.counted_routing()
            assert int(counts.sum()) == len(TOKENS) * feed.rule.per_token
            feed.replicate(counts, 2)
        return [*found, logits_of(model)]

    for found in on_ranks(4, work):
        assert all(float((one - expected).abs().max()) < TOLERANCE for one in found)


def test_a_rank_reads_the_tensors_of_its_own_experts_only() -> None:
    path, _ = even_model("mixtral")
    names = [name for name in open_model(path).source.names() if ".experts." in name]
    assert len(names) == 2 * 5 * 3

    def unread(rank: ThreadRank) -> set[str]:
        build = build_of(rank, path, None)
        build_model(open_model(path).config, build)
        return set(build.source.unread())

    first, second = on_ranks(2, unread)
    assert first | second == set(names) and not first & second
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in first} == {3, 4}


def test_a_tensor_of_the_file_that_no_rank_reads_is_still_an_error() -> None:
    path, _ = even_model("mixtral")

    def fewer_layers(rank: ThreadRank) -> None:
        build_model(open_model(path).config | {"num_hidden_layers": 1}, build_of(rank, path, None))

    with pytest.raises(ModelError, match="holds tensors that architecture 'mixtral' does not use"):
        on_ranks(2, fewer_layers)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("shape", "kind"), [("mixtral-8x7b", "q8_0"), ("gpt-oss-20b", "mxfp4"), ("qwen3-30b-a3b", "q4_0")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantized_experts_in_one_tensor_are_cut_as_they_are(
    shape: str, kind: str, layout: str, tmp_path: Path
) -> None:
    path = write_gguf("m", shape_config(f"{shape}-tiny"), tmp_path / "m", kind).path
    same_as_whole(path, LAYOUTS[layout], kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_experts_of_gpt_oss_are_read_sliced(layout: str, tmp_path: Path) -> None:
    same_as_whole(quantized_directory(tmp_path)[0], LAYOUTS[layout], "mxfp4")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_a_model_as_data_are_spread(layout: str, tmp_path: Path) -> None:
    path = write_checkpoint("m", config_of("experts"), tmp_path / "m", torch.float32).path
    same_as_whole(path, LAYOUTS[layout], "f32")


def same_as_whole(path: Path, mesh: MeshSpec | None, kind: str) -> None:
    files = open_model(path)
    whole = build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU))
    tokens = [token % files.config["vocab_size"] for token in TOKENS]
    expected = logits_of(whole, tokens=tokens)

    def work(rank: ThreadRank) -> tuple[torch.Tensor, int, str]:
        model = model_of(rank, path, mesh)
        feed = model.blocks[0].feed
        assert isinstance(feed, Experts)
        return logits_of(model, tokens=tokens), feed.gate.shape[0], feed.gate.scheme.name

    found = on_ranks(2, work)
    for logits, _, scheme in found:
        assert float((logits - expected).abs().max()) < TOLERANCE * max(1.0, float(expected.abs().max()))
        assert scheme == kind
    feed = whole.blocks[0].feed
    assert isinstance(feed, Experts) and sum(held for _, held, _ in found) == feed.rule.experts


def test_native_kernels_run_the_experts_of_a_rank() -> None:
    path, expected = even_model("qwen3-moe")
    for found in on_ranks(2, lambda rank: logits_of(model_of(rank, path, None, providers="auto"))):
        assert float((found - expected).abs().max()) < TOLERANCE


def test_more_ranks_than_experts_are_refused() -> None:
    path, _ = even_model("mixtral")
    with pytest.raises(ModelError, match=r"5 experts of .*0.block_sparse_moe cannot be spread over 6 ranks"):
        on_ranks(6, lambda rank: model_of(rank, path, None) and None)


def test_an_unknown_hot_expert_is_refused() -> None:
    path, _ = even_model("mixtral")
    hot = {"model.layers.1.block_sparse_moe": [5]}
    with pytest.raises(ModelError, match="has 5 experts, so that expert 5 cannot be hot"):
        on_ranks(2, lambda rank: model_of(rank, path, None, experts=ExpertRanks(rank, rank, hot=hot)) and None)
