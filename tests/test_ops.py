"""Every operation x provider on this machine x generated input compared with the body; the bodies with an oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bankfull.ops import OPERATIONS, Kit, Operation, RecurrentMeta, Unnormed, native
from bankfull.ops.registry import Provider
from bankfull.weights.qtensor import QTensor
from tests.ops import cases, oracles
from tests.ops.compare import assert_close, tensors
from tests.ops.forms import FORMS, providers_of
from tests.quick import is_quick

SEEDS = range(len(cases.FLOATS) * len(cases.WEIGHTS))
"""Each dtype with each weight scheme."""
FEW_SEEDS, FEWER_SEEDS = range(16), range(8)
"""Enough for the kernels of operations without a weight; includes float64, which they reject."""
EACH_SCHEME = [len(cases.FLOATS) * scheme + scheme % 2 for scheme in range(len(cases.WEIGHTS))]
"""Once per scheme, alternating float32 and bfloat16."""
SPARSE = [len(cases.FLOATS) * list(cases.WEIGHTS).index("bf16_2of4") + 1 + other * len(SEEDS) for other in range(8)]
"""Sparse weights in bfloat16, in several shapes: the provider for them accepts no other of these dtypes and schemes."""
ENOUGH = 6
INTERPRETED_IN_FULL = [] if torch.cuda.is_available() else [pytest.mark.full]
THERE = {"cpu": "cpu", "cuda": "cuda" if torch.cuda.is_available() else "cpu"}
"""Device of a provider's inputs: without a GPU, its kernels are interpreted on the host."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_operation_has_generated_inputs_and_an_oracle() -> None:
    assert set(cases.GENERATORS) == set(FORMS) or native.status() is not None
    assert set(cases.GENERATORS) >= set(FORMS)
    assert set(oracles.ORACLES) == set(OPERATIONS)


def takes_every_scheme(operation: Operation) -> bool:
    by_row = operation.name == "linear_w8a8" or (operation.name == "linear_outliers" and "normed" in operation.fused)
    return "weight" in cases.case(operation.label, 0).facts and not by_row


def seeds_for(operation: Operation, provider: Provider) -> Iterator[Any]:
    """Interpreted kernels are slow, and others are recompiled for most shapes: they get every dtype, and every scheme
    if there is one, but fewer shapes; a quick run ends with the first `ENOUGH` of them, from another scheme on for each
    operation."""
    name = f"{operation.label}-{provider.name}"
    if provider.on != "cuda":
        yield pytest.param(operation, provider, SEEDS, id=name)
    elif provider.name == "triton-24":
        yield pytest.param(operation, provider, SPARSE, id=name)
    else:
        every, first = (SEEDS, EACH_SCHEME) if takes_every_scheme(operation) else (FEW_SEEDS, FEWER_SEEDS)
        turn = list(FORMS).index(operation.label) % len(first)
        first = [*first[turn:], *first[:turn]]
        rest = sorted(set(every) - set(first))
        yield pytest.param(operation, provider, first, id=name)
        yield pytest.param(operation, provider, rest, id=f"{name}-rest", marks=INTERPRETED_IN_FULL)


def host_seeds(name: str) -> Iterator[Any]:
    """Bodies and formulas: a quick run takes every scheme once, the full one every dtype with every scheme."""
    yield pytest.param(name, EACH_SCHEME, id=name)
    yield pytest.param(name, sorted(set(SEEDS) - set(EACH_SCHEME)), id=f"{name}-rest", marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("operation", "provider", "seeds"),
    [each for form in FORMS.values() for provider in providers_of(form) for each in seeds_for(form, provider)],
)
def test_a_provider_computes_what_the_body_means(
    operation: Operation, provider: Provider, seeds: Sequence[int], request: pytest.FixtureRequest
) -> None:
    accepted = 0
    enough = ENOUGH if is_quick(request.config) and not torch.cuda.is_available() else len(seeds)
    for seed in seeds:
        # Twice from the same seed: an operation may write to its arguments.
        reference, given = cases.case(operation.label, seed), cases.case(operation.label, seed).to(THERE[provider.on])
        kit = Kit(provider.on, (provider.name,))
        run = kit.bind(operation, **given.facts)
        if set(kit.chosen[operation.label]) != {provider.name}:
            continue
        accepted += 1
        if provider.on == "cuda" and accepted > enough:
            break
        prepared = [kit.prepare(operation, a, **given.facts) if isinstance(a, QTensor) else a for a in given.args]
        expected, got = operation.body(*reference.args), run(*prepared)
        assert [t.dtype for t in tensors(got)] == [t.dtype for t in tensors(expected)], f"seed {seed}"
        assert_close(got, expected, given.provided or given.dtype)
        for one, other in zip(cases.flat(given.args), cases.flat(reference.args), strict=True):
            if isinstance(one, Unnormed):
                assert_close(one.joined, other.joined, given.dtype)
            if isinstance(one, torch.Tensor):  # arguments that are not written must be unchanged
                assert_close(one, other, given.dtype)
    if operation.name == "linear_hadamard" and not native.copies_weights():
        pytest.skip("this instruction set has no int8 tiles")
    assert accepted, f"{provider.name} accepts none of the generated inputs of {operation.label}"


@pytest.mark.parametrize(("name", "seeds"), [each for name in sorted(FORMS) for each in host_seeds(name)])
def test_a_body_means_what_its_oracle_says(name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        made, untouched = cases.case(name, seed), cases.case(name, seed)
        expected = oracles.ORACLES[FORMS[name].name](*untouched.args)
        got = FORMS[name].body(*made.args)
        found = [*tensors(got), *(made.args[i] for i in made.written)]
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert_close(found, [torch.from_numpy(np.asarray(array)) for array in wanted], made.dtype)
        for i, (argument, before) in enumerate(zip(cases.flat(made.args), cases.flat(untouched.args), strict=True)):
            if isinstance(argument, torch.Tensor) and i not in made.written:
                same = torch.equal(argument.double().nan_to_num(), before.double().nan_to_num())
                assert same, f"argument {i} was written"


def test_values_may_have_another_size_than_keys() -> None:
    for seed in range(8):
        made = cases.paged_attention(cases.Maker(seed), values=1 + seed)
        expected = torch.from_numpy(oracles.paged_attention(*made.args))
        assert_close(OPERATIONS["paged_attention"].body(*made.args), expected, made.dtype)


@pytest.mark.parametrize(("name", "seeds"), [each for name in sorted(FORMS) for each in host_seeds(name)])
def test_the_meter_returns_the_shapes_and_dtypes_of_the_body(name: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        made = cases.case(name, seed)
        on_meta = tensors(FORMS[name].on_meta(*made.to("meta").args))
        real = tensors(FORMS[name].body(*made.args))
        assert [(t.shape, t.dtype) for t in on_meta] == [(t.shape, t.dtype) for t in real]
        assert all(t.is_meta for t in on_meta)


CONTINUED = [
    ("causal_conv", (0,)),
    ("selective_scan", (0, 1, 3, 4)),
    ("ssd_scan", (0, 1, 3, 4)),
    ("diagonal_scan", (0,)),
    ("linear_attention", (0, 1, 2)),
    ("delta_rule", (0, 1, 2, 3, 4)),
]
"""Recurrent operations and their arguments with one row per token."""


@pytest.mark.parametrize(("name", "per_token"), CONTINUED)
def test_every_kept_slot_continues_its_sequence(name: str, per_token: tuple[int, ...]) -> None:
    """Whatever number of draft tokens was accepted, the slot after them leads to the same outputs and state."""
    continued = 0
    for seed in range(20):
        made = cases.case(name, seed, torch.float64)
        meta = made.args[-1]
        whole = OPERATIONS[name].body(*made.args)
        states = {at: made.args[at] for at in made.written}
        for i, kept in enumerate(meta.kept.tolist()):
            last = int(meta.q_start[i + 1])
            for j in range(kept - 1):
                begin = last - kept + 1 + j
                spare = {at: torch.cat((state, torch.zeros_like(state[:1]))) for at, state in states.items()}
                again = list(made.args)
                for k in per_token:
                    again[k] = made.args[k][begin:last]
                for at, there in spare.items():
                    again[at] = there
                free = torch.tensor([[len(there) - 1]])
                again[-1] = RecurrentMeta(np.array([0, last - begin]), np.array([1]), meta.write[i, j : j + 1], free)
                assert_close(OPERATIONS[name].body(*again), whole[begin:last], torch.float64)
                for at, state in states.items():
                    assert_close(spare[at][-1], state[meta.write[i, kept - 1]], torch.float64)
                continued += 1
    assert continued
