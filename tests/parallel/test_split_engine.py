"""An engine over several ranks gives the tokens of one process, whatever else is on: part of the exactness matrix."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.draft import DraftModel
from bankfull.decode.lookahead import Jacobi, Lookahead
from bankfull.decode.strategy import OwnModel, Strategy
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.ranks.group import RankGroup
from bankfull.runtime import naive
from bankfull.runtime.spread_storage import SpreadStorage
from bankfull.sample.params import SamplingParams
from bankfull.weights.source import open_model
from tests.kit import Bench, Guess, GuessLookup, GuessTree
from tests.late import Late
from tests.parallel.split_bench import SplitBench
from tests.tiny import folder_of, reference_of

WITHOUT_ATTENTION = ("mamba", "mamba2", "s4")
SHAPES = (
    "llama",
    "gemma",
    "latent",
    "experts",
    "mamba",
    "mamba2",
    "hybrid",
    "lightning",
    "delta",
    "s4",
    "based",
    "sparse",
    "shared",
)
CPU = torch.device("cpu")
NEW = 12


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 90) for _ in range(21)]
    return [shared + [rng.randrange(3, 90) for _ in range(rng.randrange(1, 9))] for _ in range(3)]


MESHES = ("tp=2", "pp=2", "pp=3", "tp=2,pp=2")
APART = ("ffn=1", "tp=2,ffn=2", "pp=2,ffn=1")
CONTEXTS = ("cp=2", "cp=3", "cp=2,sp=ulysses", "tp=2,cp=2", "cp=2,pp=2", "tp=2,cp=2,sp=on")
SCATTERED = ("tp=2,sp=on", "tp=2,pp=2,sp=on")
EXPERTS = (
    "tp=2,ep=2,sp=on",
    "cp=2,ep=2",
    "tp=2,cp=2,ep=4",
    "tp=2,pp=2,ep=2,sp=on",
    "tp=2,cp=2,ep=2",
    "tp=4,ep=2,sp=on",
    "tp=2,cp=2,ep=4,sp=on",
    "cp=2,ep=2,sp=ulysses",
)


def some(values: Iterable[str], *quick: str) -> list[Any]:
    """Parameters, of which quick runs take those that are named."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.full) for value in values]


ONE_STAGE = ("shared",)
"""Models whose layers share keys and values across the borders of stages."""
NO_FEEDS = ("mamba", "mamba2")
"""Models without feed-forward layers."""


def answers(shape: str, mesh: str, cached: bool, **more: Any) -> int:
    """Checks the tokens of three sequences with preemption; the number of accepted drafts."""
    if "pp" in mesh and shape in ONE_STAGE:
        pytest.skip("tests/parallel/test_stages.py: such layers stay in one stage")
    sched = SchedConfig(rows=3, step_tokens=more.pop("chunk", 7) if cached else 64)
    with SplitBench(shape, mesh, sched=sched, state=StateConfig(page_tokens=4, prefix_cache=cached), **more) as bench:
        asked = prompts(1)
        for name, prompt in enumerate(asked):
            bench.add(name, prompt, NEW)
        bench.run(preempt=random.Random(3))
        for name, prompt in enumerate(asked):
            expected, margins = naive.generate(reference_of(shape), prompt, NEW, CPU)
            assert min(margins) > 1e-4, "the reference cannot tell the best token from the second"
            assert bench.tokens[name, 0] == expected
        return sum(bench.engine.totals.accepted)


@pytest.mark.few(7)
@pytest.mark.covering(1)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mesh", [*MESHES, *SCATTERED])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_give_the_tokens_of_a_plain_loop(shape: str, mesh: str, cached: bool) -> None:
    answers(shape, mesh, cached)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mesh", APART)
@pytest.mark.parametrize(
    "shape", some([shape for shape in SHAPES if shape not in NO_FEEDS], "llama", "experts", "hybrid")
)
def test_feed_forward_ranks_give_the_tokens_of_a_plain_loop(shape: str, mesh: str, cached: bool) -> None:
    answers(shape, mesh, cached)


@pytest.mark.few(4)
@pytest.mark.covering(1)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("mesh", CONTEXTS)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape not in WITHOUT_ATTENTION])
def test_context_ranks_give_the_tokens_of_a_plain_loop(shape: str, mesh: str, cached: bool) -> None:
    """Pages that are free on any rank are NaN."""
    answers(shape, mesh, cached)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", some(EXPERTS, *EXPERTS[:3]))
@pytest.mark.parametrize("shape", ["experts", "latent"])
def test_experts_get_the_tokens_that_ranks_have_divided(shape: str, mesh: str) -> None:
    answers(shape, mesh, cached=True)


@pytest.mark.parametrize(
    "mesh", some([*MESHES, *APART, *CONTEXTS, *SCATTERED], "tp=2,pp=2", "tp=2,ffn=2", "cp=2", "cp=2,pp=2")
)
def test_drafts_that_the_host_finds_are_verified_on_every_rank(mesh: str) -> None:
    prompt = [5, 6, 7, 8] * 6
    expected, _ = naive.generate(reference_of("llama"), prompt, 16, CPU)
    lookup = GuessLookup([prompt + expected])
    with SplitBench("llama", mesh, sched=SchedConfig(rows=2, step_tokens=32), lookup=lookup) as bench:
        bench.add("a", prompt, 16)
        bench.run()
        assert bench.tokens["a", 0] == expected
        assert sum(bench.engine.totals.accepted) > 0


def truths(shape: str) -> list[list[int]]:
    return [prompt + naive.generate(reference_of(shape), prompt, NEW, CPU)[0] for prompt in prompts(1)]


def drafter(pages: RankGroup | None, shape: str, branching: Sequence[int]) -> DraftModel:
    """The model itself, so that its drafts are right as long as its keys and values are."""
    files, kit = open_model(folder_of(shape)), kit_for("cpu", "torch")
    model = build_model(files.config, Build(files.source, kit, torch.float32, CPU, context=pages))
    return DraftModel(OwnModel(model, kit), branching)


OWN: dict[str, Callable[[RankGroup | None, str], Strategy]] = {
    "draft": lambda pages, shape: drafter(pages, shape, (1, 1, 1)),
    "draft-tree": lambda pages, shape: drafter(pages, shape, (3, 1, 2)),
    "trees": lambda pages, shape: GuessTree(truths(shape), width=7, seed=2),
    "chains": lambda pages, shape: Guess(truths(shape)),
    "lookahead": lambda pages, shape: Lookahead(4, 3, 4),
    "jacobi": lambda pages, shape: Jacobi(3),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", OWN)
@pytest.mark.parametrize("mesh", ["cp=2", "tp=2,cp=2", "cp=2,sp=ulysses", "tp=2,sp=on"])
@pytest.mark.parametrize("shape", ["llama", "gemma"])
def test_trees_and_draft_models_work_over_pages_of_several_ranks(shape: str, mesh: str, strategy: str) -> None:
    """Accepted drafts move between pages, wherever these are."""
    accepted = answers(shape, mesh, True, chunk=30, strategy=lambda pages: OWN[strategy](pages, shape))
    if strategy not in ("lookahead", "jacobi"):
        assert accepted > 15


@pytest.mark.covering(1)
@pytest.mark.parametrize("strategy", ["draft-tree", "trees", "chains"])
@pytest.mark.parametrize("mesh", some(["cp=2", "tp=2", "cp=2,sp=ulysses", "tp=2,sp=on"], "cp=2"))
def test_ranks_run_behind_the_host_on_devices_that_are_late(mesh: str, strategy: str) -> None:
    """Equal seeds: a rank that waits in a collective gets the others' work."""
    late = partial(Late, 5, apart=True)
    assert answers("llama", mesh, True, chunk=20, device=late, strategy=lambda pages: OWN[strategy](pages, "llama"))


def sampled(mesh: str, **settings: Any) -> dict[Any, list[int]]:
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, logit_bias={4: 2.0}, repetition_penalty=1.2, seed=7)
    with SplitBench("llama", mesh, sched=SchedConfig(rows=4, step_tokens=32), **settings) as bench:
        bench.add("a", [9, 8, 7, 6, 5, 4, 3], 20, n=3, params=params, seed=7)
        bench.run()
        return dict(bench.tokens)


@pytest.mark.parametrize("mesh", some([*MESHES, *APART, *CONTEXTS, *SCATTERED], "tp=2,pp=2", "tp=2,ffn=2", "cp=2"))
def test_sampled_tokens_and_masks_are_those_of_one_rank(mesh: str) -> None:
    found = sampled(mesh)
    assert found == sampled("tp=1") and len({tuple(tokens) for tokens in found.values()}) == 3


@pytest.mark.parametrize("mesh", some(["cp=2", "cp=3"], "cp=2"))
def test_samples_copy_their_last_page_from_one_rank_to_another(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, int]] = []
    transfer = SpreadStorage.transfer

    def noted(self: SpreadStorage, transfers: Any) -> None:
        transfers = list(transfers)
        copied.extend((one.src.place % self.share.ranks, one.dst.place % self.share.ranks) for one in transfers)
        transfer(self, transfers)

    monkeypatch.setattr(SpreadStorage, "transfer", noted)
    assert sampled(mesh, state=StateConfig(page_tokens=4)) == sampled("tp=1", state=StateConfig(page_tokens=4))
    assert any(src != dst for src, dst in copied)


def cached_tokens(bench: Bench, name: str, prompt: Sequence[int]) -> int:
    bench.add(name, prompt, 4)
    bench.run()
    return bench.cached[name]


@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,pp=2"])
def test_a_prefix_is_found_whichever_ranks_hold_its_pages(mesh: str) -> None:
    prompt = prompts(2)[0]
    with SplitBench("llama", mesh, sched=SchedConfig(rows=2), state=StateConfig(page_tokens=4)) as bench:
        assert cached_tokens(bench, "first", prompt) == 0
        assert cached_tokens(bench, "second", prompt) == (len(prompt) - 1) // 4 * 4
        assert bench.tokens["first", 0] == bench.tokens["second", 0]


@pytest.mark.parametrize(("mesh", "rows"), [("tp=2,pp=2", 24), ("tp=2,pp=2,sp=on", 14), ("cp=2,pp=2", 14)])
def test_stages_exchange_rows_as_they_are_divided(mesh: str, rows: int) -> None:
    """A prompt of 21 tokens, then three steps of one: all of them, or their half, rounded up."""
    split = SplitBench("llama", mesh, sched=SchedConfig(rows=1, step_tokens=64))
    with split as bench:
        bench.add("a", list(range(5, 26)), 4)
        bench.run()
    assert {border.bytes for border in split.threads.borders.values()} == {4 * rows * bench.model.hidden}
