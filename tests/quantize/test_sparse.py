"""Pruning: patterns are exact, SparseGPT loses least on its data, and removed neurons save bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bankfull.errors import ConfigError, ModelError
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.quantize.gptq import output_error
from bankfull.quantize.method import LayerData
from bankfull.quantize.neurons import refitted, remove_neurons
from bankfull.quantize.sensitivity import Divergence
from bankfull.quantize.sparse import RULES, Pruner, SparsityPattern, parse_pattern, zeros_of
from bankfull.quantize.walk import WalkOptions, walk
from bankfull.runtime.naive import logits
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles, open_model
from tests.quantize.trained import CPU, sequences, trained_folder


def data_of(seed: int, out: int, columns: int) -> tuple[Tensor, Tensor]:
    """A matrix, and the Hessian of inputs that depend on each other."""
    chance = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=chance) / columns**0.5
    x = torch.randn(4 * columns, columns, generator=chance) @ (mixing + torch.eye(columns))
    x = x * torch.linspace(0.2, 3, columns)
    return torch.randn(out, columns, generator=chance), x.T @ x * (2 / len(x))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 99), st.sampled_from([8, 48, 132, 160]), st.sampled_from(["50%", "30%", "2:4", "1:4"]))
def test_patterns_are_exact_and_sparse_gpt_loses_least(seed: int, columns: int, text: str) -> None:
    pattern = parse_pattern(text)
    matrix, hessian = data_of(seed, 24, columns)
    errors = {}
    for rule in RULES:
        made = Pruner(rule, pattern).pruned(matrix, hessian)
        zeros = made == 0
        if pattern.group is not None:
            assert (zeros.unflatten(-1, (-1, pattern.group)).sum(-1) == pattern.dropped).all()
        else:
            assert abs(int(zeros.sum()) - pattern.share * matrix.numel()) <= 24
        if rule != "sparsegpt":
            assert torch.equal(made[~zeros], matrix[~zeros])
        errors[rule] = output_error(made - matrix, hessian)
    assert errors["sparsegpt"] < errors["magnitude"]


def test_wanda_looks_at_inputs_and_magnitude_does_not() -> None:
    matrix, hessian = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0]))
    half = SparsityPattern(0.5)
    assert Pruner("wanda", half).pruned(matrix, hessian).tolist() == [[1.0, 0.0, 0.0, 4.0]]
    assert Pruner("magnitude", half).pruned(matrix, hessian).tolist() == [[0.0, 0.0, 3.0, 4.0]]


def test_a_matrix_that_no_group_divides_or_nothing_enters_is_safe() -> None:
    layer = LayerData(0, {"a.weight": torch.randn(3, 6)})
    Pruner("magnitude", parse_pattern("2:4")).quantize(layer)
    assert layer.quantized == {}
    made = Pruner("sparsegpt", parse_pattern("50%")).pruned(torch.randn(3, 6), torch.zeros(6, 6))
    assert int((made == 0).sum()) == 9


@pytest.mark.parametrize("rule", ["wanda", "sparsegpt"])
def test_a_model_is_pruned_layer_by_layer(rule: str) -> None:
    files = open_model(trained_folder())
    tensors = dict(walk(files, Pruner(rule, parse_pattern("2:4")), WalkOptions(sequences(4, 0))))
    inner = {name: tensor for name, tensor in tensors.items() if is_inner_matrix(files.source, name)}
    assert zeros_of(inner) == pytest.approx(0.5, abs=0.01) and set(tensors) == set(files.source.names())
    judge = Divergence(files, sequences(4, 4096))
    loss = judge.of({name: tensor.dequantize() for name, tensor in inner.items()})
    by_size = Pruner("magnitude", parse_pattern("2:4"))
    plain = judge.of({name: by_size.pruned(judge.matrix(name), torch.empty(0)) for name in inner})
    assert loss < plain if rule == "sparsegpt" else loss < 2 * plain  # a model this small has even activations


def bytes_of(files: ModelFiles) -> int:
    shapes = {name: files.source.shape(name) for name in files.source.names()}
    return sum(
        torch.Size(shape).numel() * files.source.scheme(name).parts[0].dtype.itemsize for name, shape in shapes.items()
    )


def test_removed_neurons_save_bytes_and_the_model_runs() -> None:
    files = open_model(trained_folder())
    smaller = remove_neurons(files, 0.5, sequences(4, 0), block=16)
    assert smaller.config["intermediate_size"] == 64 and bytes_of(smaller) < 0.85 * bytes_of(files)
    model = build_model(smaller.config, Build(smaller.source, kit_for("cpu"), torch.float32, CPU))
    tokens = sequences(1, 4096)[0]
    assert logits(model, tokens, CPU).isfinite().all()
    judge = Divergence(open_model(trained_folder()), sequences(4, 4096))
    reference = build_model(smaller.config, Build(smaller.source, kit_for("cpu", "torch"), torch.float32, CPU))
    assert judge.of_model(reference) < 2.0
    assert not smaller.source.unread()


def test_a_refit_never_loses_more_than_dropping_columns() -> None:
    matrix, hessian = data_of(3, 12, 32)
    kept = torch.arange(0, 32, 2)
    gone = torch.zeros_like(matrix)
    plain, fitted = (gone.index_copy(1, kept, new) for new in (matrix[:, kept], refitted(matrix, hessian, kept)))
    assert output_error(fitted - matrix, hessian) < 0.9 * output_error(plain - matrix, hessian)
    assert torch.equal(refitted(matrix, torch.zeros(32, 32), kept), matrix[:, kept])


def test_bad_input_gets_one_sentence() -> None:
    for text in ("x", "0", "100%", "4:2", "4:4", "1:99", "-1"):
        with pytest.raises(ConfigError, match="--sparsity"):
            parse_pattern(text)
    with pytest.raises(ConfigError, match="'best'"):
        Pruner("best", SparsityPattern(0.5))
    assert (
        "as large as before" in parse_pattern("50%").statement
        and "sparse matrix units" in parse_pattern("2:4").statement
    )
    files = open_model(trained_folder())
    with pytest.raises(ConfigError, match="between 0 and 1"):
        remove_neurons(files, 1.0, [[1, 2]])
    with pytest.raises(ConfigError, match="blocks of 96"):
        remove_neurons(files, 0.5, [[1, 2]], block=96)
    with pytest.raises(ModelError, match="a layer has 0"):
        from bankfull.quantize.neurons import NeuronBlocks

        NeuronBlocks(1).quantize(LayerData(0, {"a.weight": torch.zeros(2, 2)}))
