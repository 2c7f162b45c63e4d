"""The same models in other arithmetic: narrower, wider, and through the kernels of this machine."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from bankfull.state.spec import Recurrent, Shared
from tests.models.cases import CASES
from tests.models.oracle import PASSES, TOLERANCE, error, logits, ours, reference_logits, saved


@pytest.mark.few(12)
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_close_to_float32_as_the_reference_is(name: str) -> None:
    model = saved(name)
    narrow = CASES[name]().to(torch.bfloat16).eval()
    narrow.load_state_dict(model.reference.state_dict())
    off = typical_error(reference_logits(narrow).float(), model.logits)
    mine = typical_error(logits(ours(name, dtype=torch.bfloat16), PASSES["chunks"]), model.logits)
    assert mine < 2 * off < 0.5


def typical_error(found: Tensor, want: Tensor) -> float:
    """Of the median token: where rounding sends a token to another expert, that token's error says nothing."""
    return float((found - want).square().mean(1).sqrt().median())


@pytest.mark.few(12)
@pytest.mark.parametrize("name", CASES)
def test_float64_agrees_with_float32_and_keeps_its_state_in_float64(name: str) -> None:
    model = ours(name, dtype=torch.float64)
    assert error(model, saved(name).logits, PASSES["chunks"]) < TOLERANCE
    for state in chain.from_iterable(model.states()):
        if not isinstance(state, Shared):  # it has no tensors of its own
            assert {tensor.dtype for tensor in state.tensors} == {"float64"}


@pytest.mark.few(12)
@pytest.mark.parametrize("name", CASES)
def test_the_fastest_operations_of_this_machine_compute_the_same(name: str) -> None:
    model = ours(name, providers="auto")
    assert error(model, saved(name).logits, PASSES["chunks"]) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recurrence_remembers_in_float32_whatever_it_computes_in(dtype: torch.dtype) -> None:
    for (state,) in ours("mamba", dtype=dtype).states():
        assert isinstance(state, Recurrent)
        shapes = {tensor.name: (tensor.shape, tensor.dtype) for tensor in state.tensors}
        assert shapes == {"conv": ((80, 3), "float32"), "ssm": ((80, 5), "float32")}
