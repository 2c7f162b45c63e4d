"""Plans of diffusion models: simulated schedules are those of the engine, and costs are those of denoising steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bankfull.config import SchedConfig, StateConfig
from bankfull.errors import ConfigError
from bankfull.fleet.replica_range import ReplicaRange
from bankfull.plan.configurations import grid
from bankfull.plan.fleet_options import FleetOptions
from bankfull.plan.fleet_plan import simulate_fleet
from bankfull.plan.planner import Planner
from bankfull.plan.simulate import ReplicaSpec, simulate
from bankfull.plan.traffic import TraceRequest
from bankfull.runtime.memory import Sizes
from bankfull.state.spec import Paged, TensorSpec, layout_of
from bankfull.types import CanvasShape
from tests.models.diffusion import MASK, SIZES, llada_config
from tests.plan.test_planner import CARD, CPU, ask, plan
from tests.plan.test_simulate import Constant

SDAR: dict[str, Any] = {
    **SIZES,
    "model_type": "sdar",
    "head_dim": 8,
    "block_size": 8,
    "mask_token_id": MASK,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
}
LAYOUT = layout_of([(Paged((TensorSpec("k", (1, 4), "float32"),)),)], 8)


def run(canvas: CanvasShape, prompt: int, output: int, step_tokens: int = 64) -> Any:
    spec = ReplicaSpec(
        LAYOUT,
        Sizes(100, 0, 4, 256),
        SchedConfig(rows=4, step_tokens=step_tokens),
        StateConfig(page_tokens=8, prefix_cache=not canvas.whole),
        0,
        Constant(1.0),
        canvas=canvas,
    )
    return simulate(spec, [TraceRequest(0.0, tuple(range(prompt)), output)])


def test_each_step_fixes_a_token_and_a_block_arrives_as_a_whole() -> None:
    """A prompt of two blocks, one step for each token of two blocks, and a third block that the limit cuts."""
    found = run(CanvasShape(8, False, 8, 8), 16, 20)
    (served,) = found.finished
    assert served.tokens == 20 and found.spent.steps == 24
    assert (served.ttft, served.e2e) == (8.0, 24.0)
    whole = run(CanvasShape(1 << 30, True, 4, 16), 10, 8).finished[0]
    assert (whole.ttft, whole.e2e, whole.tokens) == (4.0, 8.0, 8)


def test_a_sequence_that_no_step_holds_is_refused() -> None:
    assert run(CanvasShape(1 << 30, True, 4, 16), 60, 30).requests[0].refused


@pytest.mark.parametrize(
    "model", [pytest.param(SDAR, marks=pytest.mark.full, id="blocks"), pytest.param(llada_config(), id="whole")]
)
def test_a_plan_recommends_how_to_serve_a_diffusion_model(model: dict[str, Any]) -> None:
    found = plan(CPU, CARD, model=model, traffic="rate=5/s, in=30, out=16", lossless=True)
    assert found.recommended is not None and found.recommended.output_per_s > 0 < found.recommended.tpot_least
    assert any("denoising step fixes one token" in note for note in found.notes)
    (command,) = found.recommended.configuration.commands("tiny")
    assert command.startswith("bankfull serve tiny")


def test_a_step_that_computes_whole_sequences_must_hold_them() -> None:
    found = Planner(llada_config(), (CPU,), ask())
    (prepared,) = (one for one in found._prepared() if not one.stored.lossy and one.stored.dtype == "auto")
    usual = next(grid(prepared))
    assert usual.step_tokens >= 256
    with pytest.raises(ConfigError, match="90 tokens are more than a step of 64"):
        replace(usual, step_tokens=64).sizes(90)
    assert prepared.denoising(3, 100, 32).counts == (132,) * 3, "all tokens, in every step"


def test_a_day_of_a_fleet_is_refused() -> None:
    asked = ask()
    prepared = next(iter(Planner(SDAR, (CARD,), asked)._prepared()))
    with pytest.raises(ConfigError, match="plan a diffusion model without --simulate"):
        options = FleetOptions(ReplicaRange(1, 1))
        simulate_fleet(asked, next(grid(prepared)), options, 10, "prefix", None, lambda done, note: None)
