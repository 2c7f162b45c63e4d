"""Every kernel of the device on inputs of real size, fresh ones in every run, against the body in wider numbers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bankfull.ops import (
    Epilogue,
    HeadNorms,
    HeadWeights,
    Kit,
    Operation,
    PagedMeta,
    RecurrentMeta,
    RoutingRule,
    Unnormed,
)
from bankfull.ops.registry import Provider
from bankfull.weights.qtensor import QTensor
from tests.gpu.place import poison, require_device
from tests.ops.cases import Case, fused_in
from tests.ops.compare import tensors

require_device()

from tests.gpu.real import FLOATS, GENERATORS, SIZES, Draw  # noqa: E402
from tests.ops.forms import FORMS, providers_of  # noqa: E402

SEED = secrets.randbits(32)
TOLERANCE = {torch.float8_e4m3fn: 4e-2, torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""||got - wanted|| / ||wanted||. Products in TF32 would be off by 3e-4, and found."""
PROVIDERS = [
    pytest.param(operation, provider, id=f"{operation.label}-{provider.name}")
    for operation in FORMS.values()
    for provider in providers_of(operation)
    if provider.on == "cuda"
]
AS_IT_IS = {"rope_angles", "write_pages_int8", "write_pages_fp8", "write_pages_int4"}
"""What a wider body would compute something else for: their numbers are rounded to a dtype that they name."""
SCRATCH = 64 << 20
"""Bytes of memory beside the outputs that are poisoned, for what kernels keep aside."""


def test_every_kernel_has_inputs_of_real_size() -> None:
    assert {parameter.values[0].label for parameter in PROVIDERS} <= set(GENERATORS)


@pytest.mark.parametrize("tokens", SIZES.tokens)
@pytest.mark.parametrize(("operation", "provider"), PROVIDERS)
def test_a_kernel_computes_what_the_body_means(
    operation: Operation, provider: Provider, tokens: int, record_property: Callable[[str, object], None]
) -> None:
    worst, accepted = 0.0, 0
    for dtype in FLOATS:
        torch.manual_seed(SEED)  # for the weights
        draw = Draw(SEED + tokens, dtype)
        for label, given in GENERATORS[operation.label](draw, tokens):
            given.facts = {"dtype": dtype, **fused_in(given.args), **given.facts}
            kit = Kit("cuda", (provider.name,))
            run = kit.bind(operation, **given.facts)
            if set(kit.chosen[operation.label]) != {provider.name}:
                continue
            accepted += 1
            limit = TOLERANCE[given.provided or dtype]
            where = f"{label}, {dtype}, {tokens} tokens, seed {SEED}"
            error = _error(operation, kit, run, given, where) / limit
            assert error <= 1, f"{where}: error {error * limit:.2e} is more than {limit:.0e}"
            worst = max(worst, error * limit)
    record_property("error", worst)
    assert accepted, f"{provider.name} accepts no inputs of {operation.label}"


def _error(operation: Operation, kit: Kit, run: Callable[..., Any], given: Case, where: str) -> float:
    """The largest over the results and the arguments that are written to."""
    wide = tuple(copied(arg, None if operation.name in AS_IT_IS else torch.float64) for arg in given.args)
    prepared = [kit.prepare(operation, arg, **given.facts) if isinstance(arg, QTensor) else arg for arg in given.args]
    if given.facts.get("best"):
        scores = operation.body(*wide[:2], wide[2]._replace(best=False))
        poison(8 * len(scores), scores.numel() * 2, SCRATCH)
        chosen = run(*prepared)
        reached = scores.gather(-1, chosen[:, None])[:, 0]
        return float(((scores.amax(-1) - reached) / scores.amax(-1)).max())
    expected = [*tensors(operation.body(*wide)), *_written(given, wide)]
    poison(*(tensor.numel() * given.dtype.itemsize for tensor in expected), SCRATCH)
    got = [*tensors(run(*prepared)), *_written(given, given.args)]
    assert len(got) == len(expected), where
    return max(distance(one, other, where) for one, other in zip(got, expected, strict=True))


def _written(given: Case, args: tuple[Any, ...]) -> list[Tensor]:
    joined = [arg.joined for arg in args if isinstance(arg, Unnormed)]
    return [*joined, *(args[i] for i in given.written)]


def distance(got: Tensor, expected: Tensor, where: str) -> float:
    """NaN (poison) must stay where it was, and be nowhere else."""
    assert got.shape == expected.shape, where
    if not got.is_floating_point():
        # Codes of rounded numbers: a border case may fall on either side.
        return float((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
    holes = expected.isnan()
    assert torch.equal(got.isnan(), holes), f"{where}: NaN where there should be none, or none where it should be"
    wanted = expected.double().masked_fill(holes, 0)
    return float((got.double().masked_fill(holes, 0) - wanted).norm() / wanted.norm().clamp_min(1e-30))


def copied(value: Any, dtype: torch.dtype | None) -> Any:
    """An argument of its own, floats in that dtype where one is given; quantized weights widen by themselves."""
    if isinstance(value, Tensor):
        return value.to(dtype, copy=True) if dtype is not None and value.is_floating_point() else value.clone()
    if isinstance(value, Unnormed):
        names = ("x", "delta", "weight", "joined")
        return replace(value, **{name: copied(getattr(value, name), dtype) for name in names})
    if isinstance(value, HeadNorms):
        return replace(value, q=copied(value.q, dtype), k=copied(value.k, dtype))
    if isinstance(value, Epilogue):
        return value._replace(bias=copied(value.bias, dtype))
    if isinstance(value, torch.dtype):
        return dtype or value
    if isinstance(value, tuple):
        return tuple(copied(part, dtype) for part in value)
    known = HeadWeights | QTensor | PagedMeta | RecurrentMeta | RoutingRule | float | int | str | None
    assert isinstance(value, known), type(value)
    return value
