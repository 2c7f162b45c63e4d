"""The predicted gain of speculative decoding, by hand computation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bankfull.cli.app import run_command
from bankfull.config import RunConfig
from bankfull.decode.candidate_tree import best_tree, chain_tree, expected_tokens
from bankfull.errors import ConfigError
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.bounds import ModelRoofline, RooflineQuery
from bankfull.limits.model.charts import charts_of
from bankfull.limits.model.drafters import LAUNCH_SECONDS, assumed_ranks, parse_drafter, shape_of, tree_shape
from bankfull.limits.model.recipe import open_model_or_config, recipe_of
from bankfull.limits.model.speculation import (
    DraftHeads,
    DraftPasses,
    DraftShape,
    GainForecast,
    LookupDrafts,
    tokens_per_step,
)
from bankfull.limits.model.tables import gain_notes
from bankfull.weights.eagle import read_eagle, write_eagle
from bankfull.weights.medusa import MedusaHeads, write_heads
from tests.decode.test_eagle import random_eagle
from tests.limits.models import LLAMA, MIXED, RECURRENT
from tests.limits.test_model_bounds import machine
from tests.tiny import folder_of

FORCED = (0.8, 0.7, 0.6, 0.5)


def by_tokens(step: StepShape) -> float:
    """Reads weights for 10 s; from 20 tokens on, a token takes half a second."""
    return max(10.0, step.tokens / 2)


def test_tokens_per_step_is_the_sum_of_the_chances_of_each_length() -> None:
    assert tokens_per_step(FORCED) == pytest.approx(1 + 0.8 + 0.56 + 0.336 + 0.168)
    a, n = 0.7, 5
    assert tokens_per_step((a,) * n) == pytest.approx((1 - a ** (n + 1)) / (1 - a))
    assert tokens_per_step(()) == 1


def test_the_gain_of_a_chain_is_the_known_formula_while_memory_bounds_the_step() -> None:
    a, n, draft = 0.7, 4, 1.0
    shape = DraftShape((1,) * n, (a,) * n)
    full = GainForecast("x", shape, DraftPasses(0, lambda step: draft), by_tokens, 100).at(1).full
    c = draft / 10
    assert full.gain == pytest.approx((1 - a ** (n + 1)) / ((1 - a) * (n * c + 1)))
    assert (full.plain_seconds, full.verify_seconds, full.draft_seconds) == (10, 10, 4)


def test_a_compute_bound_step_shrinks_the_best_depth_to_none() -> None:
    forecast = GainForecast("x", DraftShape((1, 1, 1), (0.9, 0.9, 0.9)), LookupDrafts(), by_tokens, 100)
    one, many = forecast.at(1), forecast.at(64)
    assert one.full.gain == pytest.approx(1 + 0.9 + 0.81 + 0.729) and one.best == one.full
    assert many.full.verify_seconds == 128 and many.full.plain_seconds == 32
    assert many.full.gain == pytest.approx(3.439 / 4) and many.best.depth == 0 and many.best.gain == 1
    five = forecast.at(5)  # 5 x 4 tokens still fit: verification is free
    assert five.full.verify_seconds == 10 and five.best.depth == 3


def test_drafters_run_as_often_as_they_must() -> None:
    steps: list[StepShape] = []

    def one_pass(step: StepShape) -> float:
        steps.append(step)
        return 1.0

    shape = DraftShape((4, 3, 2), (0.8, 0.7, 0.6))
    assert DraftPasses(0, one_pass).seconds(2, 50, shape) == 3
    assert [step.counts for step in steps] == [(2, 2), (1, 1), (1, 1)]
    assert [step.lengths[0] for step in steps] == [50, 51, 52]
    steps.clear()
    assert DraftPasses(0, one_pass, whole_levels=True).seconds(1, 50, shape) == 3
    assert [step.counts for step in steps] == [(2,), (4,), (3,)]
    heads = DraftHeads(0, lambda batch: 0.5 * batch)
    assert heads.seconds(4, 50, shape) == 2 and heads.seconds(4, 50, shape.first(0)) == 0


def test_a_tree_has_the_tokens_that_the_engine_expects_of_it() -> None:
    ranks = assumed_ranks(0.6, 4)
    assert ranks[0][:3] == pytest.approx([0.6, 0.2, 0.1]) and sum(ranks[0]) < 1
    for tree in (best_tree(ranks, 20), chain_tree(4)):
        shape = tree_shape(tree, ranks)
        assert shape.nodes == len(tree) and shape.tokens == pytest.approx(expected_tokens(tree, ranks))


def test_leaves_beside_a_chain_end_the_path() -> None:
    choice = parse_drafter("draft:x,depth=2,breadth=2", None)
    assert choice is not None
    shape, notes = shape_of(choice)
    # The chain is right with 0.7, a leaf with half of the rest: 0.85 at the first place, 0.7 x 0.85 at the second.
    assert shape.tokens == pytest.approx(1 + 0.85 + 0.7 * 0.85) and shape.levels == (2, 2)
    assert "0.7" in notes[0]


def test_the_given_acceptance_sets_the_positions() -> None:
    choice = parse_drafter("medusa,nodes=32", "0.8,0.7,0.6,0.5")
    assert choice is not None
    shape, _ = shape_of(choice)
    assert shape.acceptance == FORCED and shape.levels == (8, 8, 8, 8) and not shape.is_chain
    lookup = parse_drafter("auto", "0.8,0.7")
    assert lookup is not None and lookup.name == "suffix" and shape_of(lookup)[0].levels == (1, 1)
    assert parse_drafter("off", None) is None


@pytest.mark.parametrize(
    ("text", "acceptance", "reason"),
    [
        ("lookahead", None, "no forecast"),
        ("draft", None, "needs a model"),
        ("suffix:here", None, "takes no model"),
        ("suffix,wide=3", None, "no option 'wide'"),
        ("suffix,width=0", None, "from 1 to 63"),
        ("draft:x,depth=3", "0.8,0.7", "2 positions, but depth=3"),
        ("draft:x,depth=32,breadth=2", None, "more than 63 drafts"),
        ("eagle,nodes=3", None, "fewer than the 4 positions"),
        ("medusa", ",".join(["0.5"] * 17), "at most 16 heads"),
        ("suffix", "1.5", "numbers from 0 to 1"),
        ("suffix", "much", "numbers from 0 to 1"),
        ("off", "0.5", "needs a drafter"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_sentence(text: str, acceptance: str | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_drafter(text, acceptance)


def roofline_of(
    text: str, acceptance: str | None = "0.8,0.7,0.6,0.5", config: dict[str, Any] = LLAMA, **ceilings: Any
) -> ModelRoofline:
    recipe = recipe_of(config, "cpu", RunConfig(dtype="float32", activations="float"))
    return ModelRoofline(recipe, machine(**ceilings), RooflineQuery(contexts=(64,)), parse_drafter(text, acceptance))


def test_verification_costs_what_the_meter_says_of_its_lines() -> None:
    found = roofline_of("suffix", bandwidth=1e12, peak=1e9)  # bound by arithmetic
    forecast = found.speculation
    assert forecast is not None
    full = forecast.at(8).full
    expected = found.metered.cost(StepShape((5,) * 8, (68,) * 8, 40)).sum().flops / 1e9
    assert full.verify_seconds == pytest.approx(expected) and full.draft_seconds == 0
    assert full.plain_seconds == pytest.approx(found.metered.cost(StepShape.decode(8, 64)).sum().flops / 1e9)


def test_a_draft_model_equal_to_the_target_never_pays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = roofline_of(f"draft:{tmp_path}", "1,1,1,1", bandwidth=1e8, peak=1e15)
    forecast = found.speculation
    assert forecast is not None
    full = forecast.at(1).full
    # Five tokens for five passes, some of which have more than one token: no gain.
    assert full.tokens == 5 and 0.9 < full.gain < 1
    assert forecast.source.weight_bytes == found.memory.weights


def test_draft_passes_on_a_gpu_cost_the_launches_that_the_engine_makes(tmp_path: Path) -> None:
    """The engine does not capture them: a small draft model takes the host's time for each kernel of each pass."""
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps({**LLAMA, "num_hidden_layers": 1}))
    forecasts = {}
    for kind in ("cpu", "cuda"):
        found = replace(machine(), kind=kind)
        choice = parse_drafter(f"draft:{draft},depth=4", "0.8,0.8,0.8,0.8")
        query = RooflineQuery((1,), (64,), 64)
        forecasts[kind] = ModelRoofline(recipe_of(LLAMA, kind, RunConfig()), found, query, choice).speculation
    on_cpu, on_gpu = forecasts["cpu"], forecasts["cuda"]
    assert on_cpu is not None and on_gpu is not None
    own = recipe_of({**LLAMA, "num_hidden_layers": 1}, "cuda", RunConfig()).metered()
    launches = sum(own.cost(StepShape.decode()).calls.values())
    assert launches > 8
    assert on_gpu.at(1).full.draft_seconds >= 4 * launches * LAUNCH_SECONDS
    assert f"not captured on a GPU: the host launches the {launches} kernels" in gain_notes(on_gpu)
    assert "captured" not in gain_notes(on_cpu)
    lookup = ModelRoofline(
        recipe_of(LLAMA, "cuda", RunConfig()), replace(machine(), kind="cuda"), query, parse_drafter("suffix", None)
    )
    assert lookup.speculation is not None and lookup.speculation.at(1).full.draft_seconds == 0


def test_heads_are_read_once_for_each_step(tmp_path: Path) -> None:
    found = roofline_of("medusa,vocabulary=0,layers=2", bandwidth=1e8, peak=1e15)
    forecast = found.speculation
    assert forecast is not None
    hidden, vocab = 64, 160
    weights = 4 * (4 * 2 * hidden * hidden + 4 * vocab * hidden)
    assert forecast.source.weight_bytes == weights
    assert forecast.at(1).full.draft_seconds == pytest.approx((weights + 4 * 4 * vocab) / 1e8)
    own = [[(torch.zeros(hidden, hidden), torch.zeros(hidden))] for _ in range(2)]
    by_rank = [[0.5, 0.25], [0.4, 0.1]]
    write_heads(MedusaHeads(own, vocab, None, torch.arange(32), by_rank), tmp_path)
    trained = roofline_of(f"medusa:{tmp_path},nodes=3", None).speculation
    assert trained is not None and trained.notes == ()
    # The best three nodes: 0.5, 0.25, and 0.5 x 0.4.
    assert trained.shape.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.2)
    assert trained.source.weight_bytes == 2 * hidden * hidden * 4


def test_an_eagle_pass_is_one_layer_the_head_and_the_joining_matrix() -> None:
    found = roofline_of("eagle,nodes=4", bandwidth=1e8, peak=1e15)
    forecast = found.speculation
    assert forecast is not None
    one, two = (
        recipe_of({**LLAMA, "num_hidden_layers": n}, "cpu", found.recipe.run).metered().parameters for n in (1, 2)
    )
    assert forecast.source.weight_bytes == 4 * (two - one + 2 * 64 * 64)
    assert forecast.at(1).full.draft_seconds < 4 * forecast.at(1).full.plain_seconds
    reduced = roofline_of("eagle,vocabulary=16", bandwidth=1e8, peak=1e15).speculation
    assert reduced is not None and reduced.at(1).full.draft_seconds < forecast.at(1).full.draft_seconds
    assert reduced.source.weight_bytes == forecast.source.weight_bytes + 4 * 16 * 64
    assert roofline_of("eagle", config=MIXED).speculation is not None


def test_trained_eagle_heads_have_their_own_bytes_and_acceptance(tmp_path: Path) -> None:
    by_rank = [[0.5, 0.25], [0.4, 0.1]]
    files = replace(random_eagle(fused=True, own=True), acceptance=by_rank)
    write_eagle(files, tmp_path)
    recipe = recipe_of(open_model_or_config(str(folder_of("llama"))), "cpu", RunConfig(dtype="float32"))
    asked = RooflineQuery(contexts=(32,), prompt=32)
    machine_of_bytes = machine(bandwidth=1e8, peak=1e15)
    found = ModelRoofline(recipe, machine_of_bytes, asked, parse_drafter(f"eagle:{tmp_path},nodes=4", None)).speculation
    assert found is not None and found.notes == ()
    # The best four nodes: 0.5, 0.25, 0.5 x 0.4, and 0.25 x 0.4.
    assert found.shape.tokens == pytest.approx(1 + 0.5 + 0.25 + 0.2 + 0.1) and found.shape.levels == (2, 2)
    own = sum(tensor.nbytes for tensor in read_eagle(tmp_path).tensors.values())
    assert found.source.weight_bytes == own
    assert "lm_head.weight" in files.tensors, "so that no rows of the model's head are read"
    assert found.at(1).full.draft_seconds == pytest.approx(2 * own / 1e8), "two passes"


def test_recurrent_models_verify_chains_only() -> None:
    chain = roofline_of("suffix", config=RECURRENT).speculation
    assert chain is not None and chain.recurrent and chain.at(1).full.gain > 0
    with pytest.raises(ConfigError, match="recurrent state"):
        _ = roofline_of("medusa,nodes=32", config=RECURRENT).speculation


def test_assumptions_are_named() -> None:
    forecast = roofline_of("suffix", None).speculation
    assert forecast is not None and "assumed: the best draft" in gain_notes(forecast)
    told = roofline_of("suffix").speculation
    assert told is not None and "assumed" not in gain_notes(told) and "0.8, 0.7, 0.6, 0.5" in gain_notes(told)
    assert "speculation" in charts_of(roofline_of("suffix")) and "speculation" not in charts_of(
        roofline_of("off", None)
    )


def test_the_command_prints_the_table_or_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = ["roofline", str(tmp_path), "--device", "h200", "--context", "64", "--prompt", "64"]
    asked += ["--speculative", "medusa,nodes=32", "--acceptance", "0.8,0.7,0.6,0.5"]
    assert run_command(asked) == 0
    shown = capsys.readouterr().out
    assert "predicted gain" in shown and "given that all before it were accepted" in shown
    assert run_command([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["speculation"]
    assert [one["batch"] for one in found["batches"]] == [1, 8, 64] and found["acceptance"] == list(FORCED)
    assert found["batches"][0]["tokens_per_step"] == pytest.approx(2.864)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 192}))
    assert run_command([*asked[:8], "--speculative", f"draft:{other}"]) == 2
    assert "vocabulary of 192 tokens and the model one of 160" in capsys.readouterr().err
