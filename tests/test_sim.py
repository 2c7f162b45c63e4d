"""Ten thousand simulated scenarios: no request is lost, duplicated or starved, and no output ever changes.

A quick run has the first thousand; planted bugs are found within 1500.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import pytest

from tests.sim import SimulationError, simulate
from tests.sim.denoising import simulate_denoising
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.pinning import simulate_pins

SEEDS, QUICK_SEEDS, CHUNK = 10_000, 1000, 250
FEWEST = {"parked": 20}
"""Copying state aside is rare where host tiers have room for a page or three."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[] if first < QUICK_SEEDS else pytest.mark.full) for first in range(0, SEEDS, CHUNK)],
)
def test_every_scenario_ends_with_every_request_served_exactly(first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed)


def test_the_scenarios_reach_every_corner_that_they_are_meant_to_reach() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        seen.update(asdict(simulate(seed, tiered=seed % 2 == 0)))
    rare = {name: count for name, count in seen.items() if count < FEWEST.get(name, 50)}
    assert not rare, f"too rare to prove anything: {rare}"


@pytest.mark.few(9)
@pytest.mark.parametrize("plant", MUTANTS, ids=lambda m: m.__name__)
def test_a_planted_bug_is_found_within_some_hundred_scenarios(plant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(SimulationError, match=r"seed \d+: .*python -m tests\.sim \d+"):
        for seed in range(3000):
            simulate(seed)


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(250, SEEDS, CHUNK))])
def test_tiers_that_are_late_fail_or_lose_pages_change_no_output(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        seen.update(asdict(simulate(seed, tiered=True)))
    assert min(
        seen[name] for name in ("finished", "aborted", "cached", "evictions", "preemptions", "written", "restored")
    )


@pytest.mark.parametrize("seed", [2426, 2978])
def test_an_admitted_sequence_does_not_take_the_slot_that_its_tenants_other_one_waits_for(seed: int) -> None:
    """As it was found: with two slots and competing tenants, a sequence was admitted and preempted forever."""
    assert simulate(seed, tiered=True).finished


SOME_SEEDS = [range(50), pytest.param(range(50, 3000), marks=pytest.mark.full)]


def test_a_tenants_token_is_not_kept_for_a_sequence_that_was_just_displaced() -> None:
    """As it was found: the claim that had displaced it had a share of none, and nothing was planned."""
    assert simulate(2148, mixed=True).finished


@pytest.mark.parametrize("seeds", SOME_SEEDS, ids=str)
def test_latents_sparse_masks_and_two_states_in_a_layer_mix_with_all_others(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(asdict(simulate(seed, mixed=True)))
    assert min(seen[name] for name in ("finished", "aborted", "cached", "resumed", "evictions", "forks", "preemptions"))


@pytest.mark.parametrize("seeds", SOME_SEEDS, ids=str)
def test_diffusion_models_denoise_every_request_beside_prompts_preemption_and_cached_blocks(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(asdict(simulate_denoising(seed)))
    assert min(seen[name] for name in ("finished", "aborted", "cached", "resumed", "evictions", "forks", "preemptions"))


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(250, 5000), marks=pytest.mark.full)], ids=str)
def test_pinned_prefixes_stay_while_they_may_and_never_stop_a_request(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen.update(simulate_pins(seed))
    assert min(seen[name] for name in ("pinned", "below", "expired", "given_up", "over_quota"))
