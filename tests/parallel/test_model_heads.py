"""Medusa, EAGLE and multi-token prediction over several ranks: each rank has its share of them, all ranks draft the
same, and the tokens are those of one process without drafts."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull import LLM
from bankfull import SamplingParams as Asked
from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.medusa import Medusa
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Strategy, View
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.layers.linear import Weight
from bankfull.ops import kit_for
from bankfull.ranks.mesh import MeshSpec
from bankfull.ranks.shard import Shard
from bankfull.runtime.device import Cpu, Device
from bankfull.sample.params import SamplingParams
from bankfull.spread.gathered import GatheredLinear, gathered_linear
from bankfull.weights.eagle import EagleFiles, write_eagle
from bankfull.weights.medusa import write_heads
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import open_model
from tests.decode.test_eagle import random_eagle, strategy_of
from tests.decode.test_medusa import random_heads
from tests.decode.test_mtp import prediction
from tests.late import Late
from tests.parallel.split_bench import SplitBench, ThreadMesh
from tests.parallel.test_split_engine import NEW, prompts, some
from tests.parallel.threads import ThreadRank, on_ranks
from tests.tiny import folder_of, speaking_folder

FEW = [7, 20]
"""The only tokens that some requests may get: random heads are then often right."""


def eagle(seed: int, **more: Any) -> EagleFiles:
    """A head that can draft `FEW`."""
    files = random_eagle(seed, **more)
    if files.vocabulary is not None:
        others = [token for token in files.vocabulary.tolist() if token not in FEW]
        files = replace(files, vocabulary=torch.tensor(sorted([*FEW, *others[: len(files.vocabulary) - len(FEW)]])))
    return files


def medusa(**more: Any) -> Medusa:
    """Heads that draft only `FEW`."""
    return Medusa(replace(random_heads(3, heads=3, **more), vocabulary=torch.tensor(FEW)), nodes=9)


KINDS: dict[str, tuple[str, Callable[[], Strategy]]] = {
    "eagle": ("llama", lambda: strategy_of(eagle(5), depth=3)),
    "eagle-own-head": ("llama", lambda: strategy_of(eagle(1, own=True), depth=3)),
    "eagle-tree": ("gemma", lambda: strategy_of(eagle(3, fused=False), depth=4, tree="dynamic", branch=3)),
    "eagle3-tree": ("gemma", lambda: strategy_of(eagle(7), depth=3, tree="dynamic", branch=2)),
    "mtp": ("latent", lambda: prediction("latent", 3)),
    "medusa": ("llama", lambda: medusa(layers=2)),
}
MESHES = ("tp=2", "tp=4", "tp=2,sp=on", "tp=2,cp=2", "tp=2,cp=2,sp=on", "cp=2", "cp=3", "cp=2,sp=ulysses")
APART = ("ffn=1", "tp=2,ffn=2")
OF_EXPERTS = ("tp=2,ep=2", "tp=2,ep=2,hot=2", "tp=4,ep=2,sp=on", "tp=2,cp=2,ep=4", "cp=2,ep=2", "tp=2,ffn=2,ep=2")

Drafts = list[list[list[int]]]


def answered(
    shape: str, mesh: str, make: Callable[[], Strategy], device: Callable[[], Device] = Cpu
) -> tuple[dict[Any, list[int]], list[Drafts], int]:
    """Tokens of greedy and seeded requests with preemption, the drafts of each rank, and how many were accepted."""
    found: list[Drafts] = []

    def noting() -> Strategy:
        strategy, own = make(), Drafts()
        propose = strategy.propose

        def noted(view: View) -> Any:
            draft = propose(view)
            if draft is not None:
                own.append(draft.tokens.tolist())
            return draft

        strategy.propose = noted  # type: ignore[method-assign]
        found.append(own)
        return strategy

    sched, state = SchedConfig(rows=3, step_tokens=40), StateConfig(page_tokens=4)
    with SplitBench(shape, mesh, sched=sched, state=state, strategy=lambda pages: noting(), device=device) as bench:
        asked = prompts(1)
        bench.add("greedy", asked[0], NEW)
        bench.add("sampled", asked[1], NEW, params=SamplingParams(temperature=0.9, top_p=0.95), seed=5)
        for name, temperature in (("few", 0.0), ("few sampled", 1.0)):
            params = SamplingParams(temperature=temperature, allowed_token_ids=FEW)
            bench.add(name, asked[2], 2 * NEW, params=params, seed=7)
        bench.run(preempt=random.Random(3))
        return dict(bench.tokens), found, sum(bench.engine.totals.accepted)


@cache
def plain(shape: str) -> dict[Any, list[int]]:
    return answered(shape, "tp=1", Plain)[0]


@pytest.mark.few(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [*MESHES, *APART])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_process_without_drafts(kind: str, mesh: str) -> None:
    exactly(kind, mesh)


@pytest.mark.parametrize("mesh", some(OF_EXPERTS, *OF_EXPERTS[:2]))
def test_a_prediction_module_has_its_experts_on_the_ranks_of_the_others(mesh: str) -> None:
    exactly("mtp", mesh)


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", some(["tp=2", "tp=2,sp=on"], "tp=2"))
@pytest.mark.parametrize("kind", some(KINDS, "eagle-tree", "medusa"))
def test_drafters_run_behind_the_host_on_devices_that_are_late(kind: str, mesh: str) -> None:
    exactly(kind, mesh, partial(Late, 5, apart=True))


def exactly(kind: str, mesh: str, device: Callable[[], Device] = Cpu) -> None:
    shape, make = KINDS[kind]
    expected = plain(shape)
    tokens, drafts, accepted = answered(shape, mesh, make, device)
    assert tokens == expected
    assert accepted > 5, "drafts that are never accepted prove little"
    assert len(drafts) > 1 or mesh == "ffn=1"
    assert len(drafts[0]) > 5 and all(own == drafts[0] for own in drafts), "ranks decide nothing by themselves"


WITH_OWN = KINDS | {"medusa-own-heads": ("llama", lambda: Medusa(random_heads(3, heads=3, own=True), nodes=9))}


@pytest.mark.few(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [*MESHES, *APART])
@pytest.mark.parametrize("kind", WITH_OWN)
def test_ranks_draft_what_one_process_drafts(kind: str, mesh: str) -> None:
    """Whether or not drafts are right: they come from the same layers."""
    shape, make = WITH_OWN[kind]
    (expected, *_), (found, *_) = (answered(shape, layout, make)[1] for layout in ("tp=1", mesh))
    assert found == expected


@given(st.integers(1, 4), st.integers(1, 11), st.data())
def test_ranks_find_the_best_outputs_and_exchange_only_candidates(ranks: int, count: int, data: st.DataObject) -> None:
    """Also where ranks have padded rows, or none of their own."""
    most, generator = data.draw(st.integers(1, count)), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    weight, x = torch.randn(count, 8, generator=generator) - 9.0, torch.rand(5, 8, generator=generator)
    expected = x @ weight.T

    def work(rank: ThreadRank) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        source, kit = open_model(folder_of("llama")).source, kit_for("cpu", "torch")
        build = Build(source, kit, torch.float32, torch.device("cpu"), shard=Shard(rank))
        layer = gathered_linear(build, 8, count, stored=lambda rows=None: QTensor.dense(weight[rows]))
        assert isinstance(layer, GatheredLinear)
        return layer.highest(x, most), layer(x), layer.best(x), rank.sent

    each = -(-count // ranks)
    for best, outputs, first, sent in on_ranks(ranks, work):
        assert torch.equal(best, expected.topk(most).indices) and torch.equal(first, expected.argmax(-1))
        torch.testing.assert_close(outputs, expected)
        few = 5 * min(most, each) * (ranks - 1)
        assert sent == [4 * few, 8 * few, *[4 * 5 * each * (ranks - 1)] * 2]


def numbers_held(shape: str, mesh: str, make: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each rank: the size of all matrices that its drafter has beside the model's."""
    layout, found = MeshSpec.parse(mesh), list[int]()
    threads, begin = ThreadMesh(layout), Weight.__init__

    def counted(self: Weight, build: Any, operation: Any, stored: QTensor) -> None:
        found[-1] += prod(stored.shape)
        begin(self, build, operation, stored)

    for rank in range(layout.ranks):
        model = threads.build(shape, rank).model
        found.append(0)
        with monkeypatch.context() as patched:
            patched.setattr(Weight, "__init__", counted)
            make().prepare(model)
    return found


@pytest.mark.parametrize(
    ("kind", "share"), [("eagle", 0.51), ("eagle-own-head", 0.51), ("medusa-own-heads", 0.51), ("mtp", 0.6)]
)
def test_a_rank_holds_its_share_of_a_drafter(kind: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not divide are padded. A prediction module copies its projections to latents, as the model does."""
    shape, make = WITH_OWN[kind]
    (whole,) = numbers_held(shape, "tp=1", make, monkeypatch)
    held = numbers_held(shape, "tp=2", make, monkeypatch)
    assert len(held) == 2 and all(whole / 2 <= own <= share * whole for own in held)


def test_heads_that_ranks_cannot_divide_are_refused_by_name() -> None:
    files = random_eagle(3)
    with pytest.raises(ConfigError, match=r"^The heads in eagle do not suit the layout: .*width of 47|size of 47"):
        odd = replace(files, config={**files.config, "intermediate_size": 47})
        SplitBench("llama", "tp=2", strategy=lambda pages: strategy_of(odd))


# -- processes


ONLY = list(range(40, 44))


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    vocab = LLM(str(speaking_folder()), dtype="float32").loaded.model.vocab
    write_heads(replace(random_heads(2, vocab=vocab), vocabulary=torch.tensor(ONLY)), folder / "medusa")
    write_eagle(random_eagle(2, fused=False, vocab=vocab, layers=2), folder / "eagle")
    shutil.copytree(folder_of("latent"), folder / "latent")
    for file in speaking_folder().glob("token*"):
        shutil.copy(file, folder / "latent")
    return folder


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("eagle", "tp=2"),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in (
                ("mtp", "tp=2"),
                ("chain:medusa", "tp=2"),
                ("medusa", "tp=2"),
                ("mtp", "tp=2,ep=2,sp=on"),
                ("eagle", "tp=2,ffn=1"),
                ("eagle", "tp=2,cp=2"),
            )
        ),
    ],
)
def test_processes_give_the_tokens_of_one(kind: str, mesh: str, drafters: Path) -> None:
    """With the kernels, and over gloo."""
    name = kind.rpartition(":")[2]
    folder = drafters / "latent" if kind == "mtp" else speaking_folder()
    way = "mtp,width=3" if kind == "mtp" else f"{kind}:{drafters / name}"
    alone = LLM(str(folder), dtype="float32", rows=4, speculative="off")
    split = LLM(str(folder), dtype="float32", rows=4, parallel=mesh, speculative=f"{way},adaptive=false")
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [40, 3, 60]}]
    for temperature in (0.0, 1.0):
        for only in (None, ONLY):
            how = Asked(temperature=temperature, max_tokens=16, seed=3, allowed_token_ids=only, detokenize=False)
            one, other = (
                [list(output.outputs[0].token_ids) for output in llm.generate(prompts, how)] for llm in (alone, split)
            )
            assert other == one
    assert sum(split.loaded.engine.totals.accepted) > 3
    split.loaded.engine.runner.followers.close()  # type: ignore[union-attr]
