"""A linear whose weight has its columns in another order computes what the matrix in order computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.linear import Linear, split_linear, stack
from bankfull.layers.mlp import GatedMLP
from bankfull.ops import Kit, native
from bankfull.ops.products.activations import RULES
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.quantize import quantize
from tests.quick import examples

CPU = torch.device("cpu")
STACKING = Kit("cuda", ("no such provider",))
"""It stacks layers as on a GPU, and runs bodies."""


class Tensors:
    def __init__(self, **held: QTensor) -> None:
        self.held = {name.replace("_", "."): tensor for name, tensor in held.items()}

    def names(self) -> list[str]:
        return list(self.held)

    def has(self, name: str) -> bool:
        return name in self.held

    def shape(self, name: str) -> tuple[int, ...]:
        return self.held[name].shape

    def scheme(self, name: str) -> Scheme:
        return self.held[name].scheme

    def get(self, name: str) -> QTensor:
        return self.held[name]

    def unread(self) -> list[str]:
        return []

    def release(self) -> None: ...


def permuted(seed: int, outer: int, inner: int, scheme: str = "int4_g32", order: int | None = None) -> QTensor:
    """A quantized matrix whose stored columns are in a random order; `order`: its seed."""
    random = torch.Generator().manual_seed(seed)
    stored = quantize(torch.randn(outer, inner, generator=random), scheme)
    own = torch.Generator().manual_seed(seed if order is None else order)
    return replace(stored, columns=torch.randperm(inner, generator=own).to(torch.int32))


def build_of(kit: Kit | None = None, dtype: torch.dtype = torch.float64, **held: QTensor) -> Build:
    return Build(Tensors(**held), kit or Kit("cpu", ()), dtype, CPU)


def rows_of(inner: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, inner, generator=torch.Generator().manual_seed(5)).to(dtype)


@examples(30, deadline=None)
@given(
    scheme=st.sampled_from(["int4_g32", "uint3_g64", "int8_g32", "int8_row", "q4_k"]),
    outer=st.integers(1, 9),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_product_with_permuted_columns_is_that_with_the_matrix(
    scheme: str, outer: int, groups: int, seed: int
) -> None:
    inner = 256 * groups if scheme == "q4_k" else 64 * groups
    weight = permuted(seed, outer, inner, scheme)
    layer, x = Linear(build_of(weight=weight), inner, outer), rows_of(inner)
    wanted = x @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(layer(x), wanted)
    assert torch.equal(layer.best(x), wanted.argmax(-1))
    assert not layer.norms(1) and not layer.norms_for_best(1), "a fused norm would not gather"


@pytest.mark.parametrize("activations", ["float", "bf16", "int8"])
@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_kernels_gather_before_the_product(activations: str) -> None:
    weight = permuted(1, 40, 128)
    kit, rule = Kit("cpu"), RULES[activations]
    build = replace(build_of(kit, torch.float32, weight=weight), activations=rule)
    layer, x = Linear(build, 128, 40), rows_of(128, torch.float32)
    assert kit.chosen["gather_columns"] == {"native": 1}
    assert all(set(providers) == {"native"} for providers in kit.chosen.values())
    bodies = Linear(replace(build, kit=Kit("cpu", ())), 128, 40)
    # bf16 kernels round weights, too.
    torch.testing.assert_close(layer(x), bodies(x), rtol=0, atol=0.1 if activations == "bf16" else 1e-3)


def test_layers_stored_as_one_matrix_share_its_order() -> None:
    weight = permuted(2, 12, 64)
    parts = split_linear(build_of(weight=weight), 64, [5, 7])
    x = rows_of(64)
    both = torch.cat([part(x) for part in parts], -1)
    torch.testing.assert_close(both, x @ weight.dequantize(torch.float64).T)


def test_layers_of_one_order_are_stacked_and_others_are_not() -> None:
    held = {"a": permuted(1, 6, 64, order=7), "b": permuted(2, 4, 64, order=7), "c": permuted(3, 4, 64, order=8)}
    held["d"] = replace(held["b"], columns=None)
    build, x = build_of(STACKING, **{f"{name}_weight": weight for name, weight in held.items()}), rows_of(64)

    def layer(name: str) -> Linear:
        return Linear(build.at(name), 64, held[name].shape[0])

    assert stack(build, [layer("a"), layer("c")]) is None and stack(build, [layer("a"), layer("d")]) is None
    whole = stack(build, [layer("a"), layer("b")])
    assert whole is not None
    wanted = torch.cat([x @ held[name].dequantize(torch.float64).T for name in "ab"], -1)
    torch.testing.assert_close(whole(x), wanted)


@pytest.mark.parametrize("kit", [None, STACKING], ids=["apart", "stacked"])
def test_a_gated_layer_gathers_for_both_of_its_matrices(kit: Any) -> None:
    held = {"gate": permuted(1, 96, 64, order=7), "up": permuted(2, 96, 64, order=7), "down": permuted(3, 64, 96)}
    build, x = build_of(kit, **{f"{name}_weight": weight for name, weight in held.items()}), rows_of(64)
    gate, up, down = (Linear(build.at(name), *reversed(held[name].shape)) for name in held)
    mlp = GatedMLP(build, gate, up, down, "silu")
    assert (mlp.both is not None) == (kit is not None) and not mlp.norms(1)
    g, u, d = (weight.dequantize(torch.float64) for weight in held.values())
    torch.testing.assert_close(mlp(x), (torch.nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T)


def test_gpu_kernels_multiply_gathered_rows() -> None:
    """Interpreted. The gather is torch's: it is enqueued, so that a step can be captured."""
    from bankfull.ops.triton import providers  # noqa: F401  (registers its providers)

    held = {"gate": permuted(1, 96, 64, order=7), "up": permuted(2, 96, 64, order=7), "down": permuted(3, 64, 96)}
    kit, dtype = Kit("cuda"), torch.bfloat16
    build = build_of(kit, dtype, **{f"{name}_weight": weight for name, weight in held.items()})
    gate, up, down = (Linear(build.at(name), *reversed(held[name].shape)) for name in held)
    mlp = GatedMLP(build, gate, up, down, "silu")
    assert kit.chosen["gated_linear"] == {"triton-q": 1} and set(kit.chosen["linear"]) == {"triton-q"}
    g, u, d = (weight.dequantize(torch.float64) for weight in held.values())
    for rows in (1, 3):
        x = rows_of(64, dtype)[:rows].double()
        wanted = (torch.nn.functional.silu(x @ g.T) * (x @ u.T)) @ d.T
        found = mlp(x.to(dtype)).double()
        assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


def test_a_layer_that_does_not_gather_gets_the_matrix_in_order(caplog: pytest.LogCaptureFixture) -> None:
    weight = permuted(4, 8, 64)
    build = build_of(weight=weight)
    for found in (build.weight("weight", (8, 64)), build.table("weight", (8, 64))):
        assert found.is_dense and found.columns is None
    assert torch.equal(build.weight("weight", (8, 64)).dequantize(), weight.dequantize())
    assert caplog.text.count("act-order") == 1
