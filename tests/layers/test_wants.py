"""Each layer asks the rule for its own weight: matrices of one model may want different activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bankfull.layers.build import Build
from bankfull.layers.linear import GatedLinear, Linear, stack
from bankfull.limits.machine.ceilings import Ceilings
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.roofline import roofline
from bankfull.limits.meter.step import StepShape
from bankfull.models.registry import build_model
from bankfull.ops import Kit, kit_for, native
from bankfull.ops.products.activations import RULES, ActivationRule
from bankfull.weights.formats import SCHEMES
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import KEEP, Requantized
from bankfull.weights.source import ModelFiles, TensorSource, open_model
from tests.tiny import speaking_folder

CPU = torch.device("cpu")
STACKING = ("no such provider",)
"""A kit that prefers it stacks layers as on a GPU, and runs bodies."""
DENSE, BLOCKS, BY_ROW = ("f32", "bf16"), ("q4_0", "q4_k", "int4_g32", "uint3_g64"), ("int8_row", "fp8")
WANTED = {
    "float": ("float", "float", "float"),
    "bf16": ("bf16", "bf16", "bf16"),
    "int8": ("float", "int8", "int8"),
    "int8-few": ("float", "int8", "int8"),
    "token": ("float", "float", "token"),
}
"""Rule -> what dense weights, blocks and 8-bit rows want."""


@pytest.mark.parametrize("name", RULES)
def test_a_rule_goes_by_the_scheme_of_a_weight(name: str) -> None:
    rule = RULES[name]
    found = tuple({str(rule.of(SCHEMES[scheme], 256)) for scheme in kind} for kind in (DENSE, BLOCKS, BY_ROW))
    assert found == tuple({wanted} for wanted in WANTED[name])
    assert rule.rounds == (name != "float") and rule.narrows_pages == (name not in ("float", "token"))
    assert rule.matrices(torch.float32) == (torch.bfloat16 if name == "bf16" else torch.float32)


def test_groups_of_activations_need_whole_groups_of_columns() -> None:
    assert RULES["int8"].of(SCHEMES["int8_row"], 40) == "float" != RULES["int8"].of(SCHEMES["int8_row"], 64)
    assert RULES["token"].of(SCHEMES["int8_row"], 40) == "token"


def test_only_int8_makes_a_second_copy() -> None:
    assert [name for name, rule in RULES.items() if rule.copies] == ["int8"]


def weight_of(scheme: str, outer: int = 24, inner: int = 64) -> QTensor:
    made = torch.randn(outer, inner, generator=torch.Generator().manual_seed(outer))
    return QTensor.dense(made) if scheme == "f32" else quantize(made, scheme)


def with_outliers(weight: QTensor) -> QTensor:
    return replace(weight, outliers=(torch.tensor([1, 7]), torch.ones(weight.shape[0], 2, dtype=torch.bfloat16)))


def linear_of(weight: QTensor, rule: ActivationRule, prefer: tuple[str, ...] = ()) -> Linear:
    kit = Kit("cuda" if prefer == STACKING else "cpu", prefer)
    build = Build(None, kit, torch.float32, CPU, activations=rule)  # type: ignore[arg-type]
    return Linear(build, weight.shape[1], weight.shape[0], weight=weight)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_experts_have_one_format_which_all_of_their_matrices_want(rule: ActivationRule) -> None:
    row, block, dense = (weight_of(scheme) for scheme in ("int8_row", "q8_0", "f32"))
    wanted = {"bf16": "bf16", "int8": "int8", "int8-few": "int8"}.get(rule.name, "float")
    assert rule.of_experts((block, block, row)) == wanted
    assert rule.of_experts((row, row, row)) == wanted, "no kernel rounds experts per token"
    assert rule.of_experts((block, dense, block)) == ("bf16" if rule.name == "bf16" else "float")


def test_outlier_columns_decide_before_the_rule() -> None:
    for rule in RULES.values():
        assert linear_of(with_outliers(weight_of("int8_row")), rule).wants == "outliers"


def test_layers_that_want_different_activations_are_not_stacked() -> None:
    rule = RULES["token"]
    build = Build(None, Kit("cuda", STACKING), torch.float32, CPU, activations=rule)  # type: ignore[arg-type]
    row, four = weight_of("int8_row"), weight_of("int4_g32")

    def parts(*weights: QTensor) -> list[Linear]:
        return [Linear(build, 64, weight.shape[0], weight=weight) for weight in weights]

    assert stack(build, parts(row, four)) is None and stack(build, parts(row, with_outliers(row))) is None
    whole = stack(build, parts(row, row))
    assert whole is not None and whole.wants == "token"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("scheme", ["f32", "q8_0", "int8_row"])
def test_a_gated_layer_rounds_as_its_parts_do(rule: ActivationRule, scheme: str) -> None:
    gate, up = weight_of(scheme, 32), weight_of(scheme, 32)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    build = Build(None, Kit("cuda", STACKING), torch.float32, CPU, activations=rule)  # type: ignore[arg-type]
    apart = torch.nn.functional.silu(linear_of(gate, rule)(x)) * linear_of(up, rule)(x)
    whole = stack(build, [Linear(build, 64, 32, weight=weight) for weight in (gate, up)])
    assert whole is not None
    torch.testing.assert_close(GatedLinear(build, whole, "silu")(x), apart)


def mixed(source: TensorSource) -> TensorSource:
    """8-bit rows, 4-bit groups, one matrix with outlier columns, and the rest as it was."""
    by_name = {
        name: "int8_row" if "q_proj" in name or "up_proj" in name else "int4_g32" if "gate_proj" in name else KEEP
        for name in source.names()
    }
    rounded = Requantized(source, (KEEP,), by_name=by_name)
    return OutlierSource(rounded, {"model.layers.0.self_attn.o_proj.weight": [2, 5]}, CPU)


@pytest.fixture
def files() -> ModelFiles:
    found = open_model(speaking_folder())
    return replace(found, source=mixed(found.source))


def wants(files: ModelFiles, rule: str) -> dict[str, str]:
    build = Build(files.source, kit_for("cpu", "torch"), torch.float32, CPU, activations=RULES[rule])
    block = build_model(files.config, build).blocks[0]
    layers = {"q": block.mixer.q, "v": block.mixer.v, "out": block.mixer.out, "gate": block.feed.gate}  # type: ignore[attr-defined,union-attr]
    return {name: str(layer.wants) for name, layer in layers.items()}


def test_each_matrix_of_a_mixed_model_gets_what_its_own_weight_wants(files: ModelFiles) -> None:
    assert wants(files, "token") == {"q": "token", "v": "float", "out": "outliers", "gate": "float"}
    assert wants(files, "int8") == {"q": "int8", "v": "float", "out": "outliers", "gate": "int8"}
    assert wants(files, "bf16") == {"q": "bf16", "v": "bf16", "out": "outliers", "gate": "bf16"}


def test_limits_of_a_mixed_model_count_each_product_at_its_own_peak(files: ModelFiles) -> None:
    """One peak for the whole model, that of its narrowest type, would promise too much for the others."""
    flops = {"float32": 1e9, "bfloat16": 1e10, "int8": 4e10, "float8": 8e10}
    machine = Ceilings(1e15, 1e15, flops, 1, "x", "now", 1000, 100, 200)
    ledger = MeteredModel(files, dtype="bfloat16", activations=RULES["token"]).cost(StepShape.prefill(64))
    found = {entry.operation: entry for entry in roofline(ledger, machine, "bfloat16").entries}
    rounded, plain, kept = (found[name] for name in ("linear_w8a8", "linear", "linear_outliers"))
    assert (
        rounded.cost.operands == ["int8"] and plain.cost.operands == ["own"] and kept.cost.operands == ["int8", "own"]
    )
    assert rounded.seconds == pytest.approx(rounded.cost.flops / 4e10)
    assert plain.seconds == pytest.approx(plain.cost.flops / 1e10)
    assert found["head/linear"].seconds == pytest.approx(found["head/linear"].cost.flops / 1e10)
    assert kept.seconds == pytest.approx(kept.cost.int8 / 4e10 + kept.cost.own / 1e10)
    total = ledger.sum()
    whole = roofline(ledger, machine, "bfloat16").seconds
    assert whole == pytest.approx(total.int8 / 4e10 + total.own / 1e10)
    assert 2 * total.flops / 4e10 < whole < total.flops / 1e10


@pytest.mark.skipif(native.status() is not None, reason="the kernels are not built")
def test_a_mixed_model_runs_on_the_kernels_of_each_format(files: ModelFiles) -> None:
    kit = kit_for("cpu")
    build_model(files.config, Build(files.source, kit, torch.float32, CPU, activations=RULES["int8"]))
    chosen = {name: set(providers) for name, providers in kit.chosen.items()}
    assert {"linear", "linear_int8", "linear_outliers"} <= set(chosen)
    assert all(chosen[name] == {"native"} for name in ("linear", "linear_int8", "linear_outliers"))
