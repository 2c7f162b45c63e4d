"""A model that is run layer by layer is the same model, and every matrix of every architecture is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bankfull.errors import ConfigError
from bankfull.quantize import activations
from bankfull.quantize.activations import CalibrationStreams, LayerActivations, advance
from bankfull.quantize.gptq import Gptq
from bankfull.quantize.grid import Grid
from bankfull.quantize.kept import KEPT_BYTES, KeptOutputs
from bankfull.quantize.layered import LayeredModel
from bankfull.quantize.method import LayerData
from bankfull.quantize.walk import WalkOptions, layer_data, walk
from bankfull.runtime.naive import hidden_states
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.source import ModelFiles, open_model
from tests.tiny import VOCAB, folder_of, model_of

SHAPES = [
    *("llama", "gemma", "shared", "latent", "experts", "lightning", "delta"),
    *("mamba", "mamba2", "hybrid", "s4", "based", "sparse"),
]
CPU = torch.device("cpu")
SEQUENCES = [torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]


def files_of(shape: str) -> ModelFiles:
    return open_model(folder_of(shape))


def streams_of(model: LayeredModel) -> CalibrationStreams:
    with torch.no_grad():
        return CalibrationStreams(SEQUENCES, [model.embedded(tokens) for tokens in SEQUENCES])


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_alone_make_the_hidden_states_of_the_whole_model(shape: str) -> None:
    model = LayeredModel(files_of(shape), 64)
    streams = streams_of(model)
    with torch.no_grad():
        for number in range(len(model)):
            advance(model, streams, number, {})
        for tokens, hidden in zip(SEQUENCES, streams.hidden, strict=True):
            expected = hidden_states(model_of(shape, torch.float32), tokens, CPU)
            torch.testing.assert_close(model.normed(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_matrix_has_inputs_of_its_width(shape: str) -> None:
    model = LayeredModel(files_of(shape), 64)
    streams = streams_of(model)
    with torch.no_grad():
        for number in range(len(model)):
            data = layer_data(model, number)
            seen = LayerActivations(model, streams, data)
            assert {name for group in seen.groups() for name, _ in group} == set(data.matrices)
            for group in seen.groups()[:6]:
                name, expert = group[0]
                inputs, hessian = seen.inputs(name, expert), seen.hessian(name, expert)
                assert inputs.shape[1] == data.matrices[name].shape[-1]
                if 0 < len(inputs) <= sum(map(len, SEQUENCES)):
                    torch.testing.assert_close(hessian, 2 / len(inputs) * inputs.T @ inputs, rtol=1e-4, atol=1e-4)
            advance(model, streams, number, {})


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
def test_gptq_stores_every_matrix_whose_columns_are_whole_groups(shape: str) -> None:
    files = files_of(shape)
    made = dict(walk(files, Gptq(Grid(4, 32)), WalkOptions(SEQUENCES[:1])))
    assert set(made) == set(files.source.names())
    for name, tensor in made.items():
        assert tuple(tensor.shape) == files.source.shape(name)
        fits = is_inner_matrix(files.source, name) and tensor.shape[-1] % 32 == 0 and ".layers.3." not in name
        assert tensor.scheme.name == ("int4_g32" if fits else files.source.scheme(name).name), name


@pytest.mark.few(5)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_that_are_kept_between_passes_change_no_bit(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files, made, reused = files_of(shape), [], []
    for most in (0, KEPT_BYTES):
        held: list[KeptOutputs] = []

        def keep(most: int = most, held: list[KeptOutputs] = held) -> KeptOutputs:
            held.append(KeptOutputs(most))
            return held[-1]

        monkeypatch.setattr(activations, "KeptOutputs", keep)
        made.append(dict(walk(files, Gptq(Grid(4, 32)), WalkOptions(SEQUENCES))))
        reused.append(sum(one.reused for one in held))
        assert all(one.nbytes <= most for one in held)
    for name, tensor in made[0].items():
        assert torch.equal(tensor.dequantize(), made[1][name].dequantize()), name
    assert reused[0] == 0 < reused[1]


def test_an_output_is_reused_for_the_same_weight_and_an_equal_input_only() -> None:
    kept, weight, x = KeptOutputs(), torch.ones(3), torch.arange(3.0)
    assert torch.equal(kept.of("a", (weight,), x, lambda: x + 1), x + 1)
    assert torch.equal(kept.of("a", (weight,), x.clone(), lambda: x + 2), x + 1)
    assert torch.equal(kept.of("a", (weight.clone(),), x, lambda: x + 3), x + 3)
    kept.sequence = 1
    assert torch.equal(kept.of("a", (weight,), x, lambda: x + 4), x + 4)
    kept.sequence = 0
    assert torch.equal(kept.of("a", (weight,), x, lambda: x + 5), x + 5)
    assert torch.equal(kept.of("a", (weight,), x + 1, lambda: x + 6), x + 6)
    assert kept.reused == 1


class Interrupted(Exception):
    pass


def test_an_interrupted_walk_continues_with_the_same_result(tmp_path: Path) -> None:
    files, method = files_of("llama"), Gptq(Grid(4, 32))

    def stop(layers: int, note: str) -> None:
        if layers == 2:
            raise Interrupted

    whole = dict(walk(files, method, WalkOptions(SEQUENCES)))
    with pytest.raises(Interrupted):
        list(walk(files, method, WalkOptions(SEQUENCES, tmp_path, {"bits": 4}, stop)))
    notes: list[str] = []
    options = WalkOptions(SEQUENCES, tmp_path, {"bits": 4}, lambda layers, note: notes.append(note))
    again = dict(walk(files, method, options))
    assert notes == ["from the earlier run", "from the earlier run", "quantized"]
    for name, tensor in whole.items():
        for part, value in tensor.parts.items():
            assert torch.equal(value, again[name].parts[part]), name
    with pytest.raises(ConfigError, match="other options"):
        list(walk(files, method, WalkOptions(SEQUENCES, tmp_path, {"bits": 3})))


def test_large_hidden_states_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, method = files_of("llama"), Gptq(Grid(4, 32))
    expected = dict(walk(files, method, WalkOptions(SEQUENCES)))
    monkeypatch.setattr("bankfull.quantize.walk.SPILLED", 0)
    made = dict(walk(files, method, WalkOptions(SEQUENCES, tmp_path)))
    name = "model.layers.2.self_attn.q_proj.weight"
    assert torch.equal(made[name].parts["codes"], expected[name].parts["codes"])
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", *[".safetensors"] * 3]


def test_a_calibrated_method_needs_a_text() -> None:
    with pytest.raises(ConfigError, match="needs a calibration text"):
        list(walk(files_of("llama"), Gptq(Grid(4, 32)), WalkOptions()))


def test_matrices_without_activations_come_one_by_one() -> None:
    data = LayerData(0, {"a": torch.ones(2, 4), "b": torch.ones(3, 2, 4)})
    assert data.groups() == [(("a", None),), (("b", 0),), (("b", 1),), (("b", 2),)]


def test_only_a_matrix_computed_earlier_makes_a_hessian_new(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LayeredModel(files_of("llama"), 64)
    data = layer_data(model, 0)
    passes: list[str] = []
    accumulate = LayerActivations._accumulated

    def counted(self: LayerActivations, key: str, columns: int) -> torch.Tensor:
        passes.append(key.split(".")[-2])
        return accumulate(self, key, columns)

    monkeypatch.setattr(LayerActivations, "_accumulated", counted)
    with torch.no_grad():
        seen = LayerActivations(model, streams_of(model), data)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            full = f"model.layers.0.self_attn.{name}.weight"
            seen.hessian(full)
            data.quantized[full] = Grid(4, 32).to_nearest(data.matrices[full])
        float_input = LayerActivations(model, streams_of(model), layer_data(model, 0)).hessian(full)
        assert passes == ["q_proj", "o_proj", "o_proj"]
        assert not torch.equal(seen.hessian(full), float_input)
