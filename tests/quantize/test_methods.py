"""What each method promises of a single matrix or layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.quantize.ablation import KeptChannels
from bankfull.quantize.activations import CalibrationStreams, advance
from bankfull.quantize.awq import Awq, clipped_scales, factors_of, matrix_error
from bankfull.quantize.folds import apply_fold, folds_of
from bankfull.quantize.gptq import DAMPING, Gptq, feedback_of, output_error
from bankfull.quantize.grid import Grid, stacked
from bankfull.quantize.layered import LayeredModel
from bankfull.quantize.method import LayerData
from bankfull.quantize.walk import WalkOptions, layer_data, walk
from bankfull.weights.quantize import quantize
from bankfull.weights.source import open_model
from tests.models.oracle import TOKENS, saved
from tests.quantize.test_walk import SEQUENCES, files_of
from tests.quick import examples

GRIDS = st.builds(Grid, st.sampled_from((4, 3, 2)), st.sampled_from((32, 64, 128)), st.booleans()) | st.builds(
    Grid, st.just(8), st.sampled_from((32, 64, 128))
)


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def correlated(tokens: int, columns: int, seed: int) -> Tensor:
    """Inputs with channels of very different size that depend on one another, as in a model."""
    mixing = drawn(columns, columns, seed) / columns**0.5
    sizes = torch.linspace(-2, 2, columns).exp()
    return drawn(tokens, columns, seed + 1) @ (torch.eye(columns) + mixing) * sizes


@given(GRIDS, st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.floats(1e-3, 1e3))
@examples(40)
def test_a_rounded_matrix_is_within_half_a_step_of_every_number(
    grid: Grid, rows: int, groups: int, seed: int, size: float
) -> None:
    matrix = drawn(rows, groups * grid.group, seed) * size
    made = grid.to_nearest(matrix)
    assert made.scheme.name == grid.scheme and made.shape == matrix.shape
    steps = made.parts["scales"].float().abs().repeat_interleave(grid.group, -1)
    # A scale stored in float16 is off by 2^-11, which moves the farthest codes; the code without an opposite clips.
    off = (made.dequantize() - matrix).abs() / steps
    assert float(off.max()) <= (1.02 if grid.symmetric and grid.bits < 8 else 0.57 if grid.symmetric else 1.02)


@given(GRIDS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 9), st.integers(1, 60))
@examples(25)
def test_gptq_loses_less_than_rounding_to_nearest(grid: Grid, rows: int, groups: int, seed: int, tokens: int) -> None:
    columns = groups * grid.group
    matrix, inputs = drawn(rows, columns, seed), correlated(tokens, columns, seed)
    hessian = 2 / tokens * inputs.T @ inputs
    (made,) = Gptq(grid).rounded(grid, [matrix], hessian)
    losses = [output_error(one.dequantize() - matrix, hessian) for one in (made, grid.to_nearest(matrix))]
    assert losses[0] <= losses[1] * 1.0001


def test_matrices_rounded_together_are_those_rounded_alone() -> None:
    grid, inputs = Grid(3, 32), correlated(100, 96, 3)
    hessian, parts = inputs.T @ inputs / 50, [drawn(7, 96, 1), drawn(5, 96, 2)]
    together = Gptq(grid).rounded(grid, parts, hessian)
    for part, made in zip(parts, together, strict=True):
        (alone,) = Gptq(grid).rounded(grid, [part], hessian)
        assert torch.equal(alone.parts["scales"], made.parts["scales"])
        torch.testing.assert_close(alone.dequantize(), made.dequantize(), rtol=0, atol=0.3)


@pytest.mark.parametrize("act_order", [True, False])
def test_the_feedback_is_a_factor_of_the_hessian(act_order: bool) -> None:
    inputs = correlated(200, 40, 5)
    hessian = inputs.T @ inputs / 100
    found = feedback_of(hessian, 0.0, act_order)
    assert found is not None and torch.equal(found.matrix, found.matrix.triu())
    assert torch.equal(found.matrix.diagonal(), torch.ones(40))
    product = found.matrix * found.pivots @ found.matrix.T
    torch.testing.assert_close(product, hessian[found.order][:, found.order], rtol=1e-4, atol=1e-4)
    assert bool((hessian.diagonal()[found.order].diff() <= 0).all()) == act_order


def by_elimination(grid: Grid, matrix: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor) -> Tensor:
    """GPTQ as it was published, in float64: after each column the inverse Hessian spreads its error over the columns
    that remain, and the column is eliminated from the inverse."""
    size = len(hessian)
    damped = hessian.double() + DAMPING * float(hessian.diagonal().mean()) * torch.eye(size, dtype=torch.float64)
    inverse, left = torch.linalg.inv(damped), matrix.double().clone()
    made = torch.empty_like(matrix)
    for column in hessian.diagonal().argsort(descending=True, stable=True).tolist():
        scale, zero = (part[:, column // grid.group].double() for part in (scales, zeros))
        code = (left[:, column] / scale).round().add(zero).clamp(grid.lowest, grid.highest)
        made[:, column] = ((code - zero) * scale).float()
        error = (left[:, column] - (code - zero) * scale) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse = inverse - inverse[:, column, None] * inverse[column] / inverse[column, column]
        inverse[column, column] = 1.0  # it is not looked at again
    return made


@given(GRIDS, st.integers(1, 6), st.integers(1, 5), st.integers(0, 9))
@examples(15)
def test_gptq_rounds_as_elimination_from_the_inverse_does(grid: Grid, rows: int, groups: int, seed: int) -> None:
    columns = groups * grid.group
    matrix, inputs = drawn(rows, columns, seed), correlated(3 * columns, columns, seed)
    hessian = 2 / len(inputs) * inputs.T @ inputs
    (made,) = Gptq(grid).rounded(grid, [matrix], hessian)
    scales = made.parts["scales"].float()
    middle = torch.full_like(scales, float(grid.middle))
    zeros = middle if grid.symmetric else made.parts["zeros"].float()
    expected = by_elimination(grid, matrix, scales, zeros, hessian)
    # A tie that falls the other way in float32 changes the rest of its row.
    assert float((made.dequantize() == expected).float().mean()) > 0.95
    losses = [output_error(one - matrix, hessian) for one in (made.dequantize(), expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("hessian", [torch.zeros(32, 32), torch.full((32, 32), float("nan")), torch.ones(32, 32)])
def test_a_text_that_says_little_about_a_matrix_still_rounds_it(hessian: Tensor) -> None:
    grid, matrix = Grid(4, 32), drawn(3, 32, 1)
    (made,) = Gptq(grid).rounded(grid, [matrix], hessian)
    assert float((made.dequantize() - matrix).abs().max()) < 1.5


def test_the_grid_is_that_of_the_stored_formats() -> None:
    matrix = drawn(4, 128, 7)
    for name, grid in (("int8_g64", Grid(8, 64)), ("int4_g128", Grid(4, 128)), ("uint3_g32", Grid(3, 32, False))):
        here, there = grid.to_nearest(matrix).dequantize(), quantize(matrix, name).dequantize()
        assert float((here - there).square().mean()) <= 0.02 * float((there - matrix).square().mean())


@pytest.mark.parametrize(
    ("arguments", "sentence"), [((5, 32), "5 bits"), ((4, 0), "0 columns"), ((8, 32, False), "no zero points")]
)
def test_a_grid_that_cannot_be_stored_is_refused(arguments: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Grid(*arguments)


def test_narrower_groups_fit_odd_widths() -> None:
    assert [Grid(4, 128).fitting(n) for n in (256, 192, 96, 48)] == [Grid(4, 128), Grid(4, 64), Grid(4, 32), None]


def test_experts_are_stacked_without_a_change() -> None:
    parts = [Grid(4, 32).to_nearest(drawn(3, 64, seed)) for seed in range(2)]
    assert torch.equal(stacked(parts).dequantize(), torch.stack([part.dequantize() for part in parts]))


@pytest.mark.parametrize("case", ["llama", "gemma3-text", "llama-tied-biased", "opt", "qwen2", "phi3", "shared"])
def test_a_fold_without_rounding_leaves_the_logits(case: str) -> None:
    files, tokens = files_of(case) if case == "shared" else open_model(saved(case).path), [TOKENS]
    model, changed, folded = LayeredModel(files, 64), dict[str, Tensor](), 0
    with torch.no_grad():
        streams = [CalibrationStreams(tokens, [model.embedded(TOKENS)]) for _ in range(2)]
        for number in range(len(model)):
            data = layer_data(model, number)
            built = model.layer(number, {**data.matrices, **data.plain})
            for fold in folds_of(built, data, number in model.shared):
                columns = data.matrices[fold.targets[0]].shape[-1]
                apply_fold(fold, drawn(1, columns, number)[0].exp(), data)
                folded += 1
            changed |= {**data.matrices, **data.plain}
            for stream, replaced in zip(streams, ({}, changed), strict=True):
                advance(model, stream, number, replaced)
        before, after = (model.logits(model.normed(stream.hidden[0])) for stream in streams)
    assert folded >= len(model)
    assert float((before - after).abs().max()) <= 1e-5 * float(before.abs().max())


def test_awq_is_never_worse_than_rounding_to_nearest_on_its_text() -> None:
    method = Awq(Grid(3, 32))
    made = dict(walk(files_of("llama"), method, WalkOptions(SEQUENCES)))
    assert len(method.chosen) == 6
    assert all(found.error <= found.to_nearest for found in method.chosen.values())
    assert any(found.alpha > 0 for found in method.chosen.values())
    assert made["model.layers.0.input_layernorm.weight"].scheme.name == "f32"
    assert made["model.layers.0.self_attn.q_proj.weight"].scheme.name == "int3_g32"


def test_clipping_lowers_the_error_of_a_group_with_an_outlier() -> None:
    grid, matrix, inputs = Grid(3, 32), drawn(8, 64, 1), correlated(80, 64, 2)
    matrix[:, 5] = 6.0
    inputs[:, 5] *= 0.01
    clipped = grid.rounded(matrix, *clipped_scales(grid, matrix, inputs))
    plain = grid.to_nearest(matrix)
    assert matrix_error(clipped.dequantize() - matrix, inputs) < matrix_error(plain.dequantize() - matrix, inputs)


def test_factors_are_spread_around_one() -> None:
    factors = factors_of(torch.tensor([0.1, 1.0, 10.0]), 0.5)
    assert float(factors.max() * factors.min()) == pytest.approx(1.0)
    assert torch.equal(factors_of(torch.tensor([0.1, 7.0]), 0.0), torch.ones(2))


def test_channels_kept_by_activations_help_more_than_others() -> None:
    grid, matrix, inputs = Grid(3, 32), drawn(16, 128, 1), correlated(100, 128, 2)

    class Text:
        def inputs(self, name: str, expert: int | None = None) -> Tensor:
            return inputs

        hessian = output_error = groups = inputs  # type: ignore[assignment]

    losses = {}
    for by in ("activations", "weights", "random"):
        layer = LayerData(0, {"x.weight": matrix}, activations=Text())  # type: ignore[arg-type]
        KeptChannels(grid, 0.1, by).quantize(layer)  # type: ignore[arg-type]
        losses[by] = matrix_error(layer.quantized["x.weight"].dequantize() - matrix, inputs)
    assert losses["activations"] < 0.7 * min(losses["weights"], losses["random"])
    with pytest.raises(ConfigError, match="share of 2"):
        KeptChannels(grid, 2.0)
