"""Files of quantized models: others read the same values; an interrupted run continues; refusals are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from bankfull import LLM, SamplingParams
from bankfull.errors import BankfullError, ConfigError
from bankfull.quantize.recipe import QuantizeRecipe
from bankfull.quantize.rtn import RoundToNearest, rounded
from bankfull.quantize.save import save_quantized
from bankfull.text.load import load_tokenizer
from bankfull.weights.qtensor import QTensor
from bankfull.weights.source import TensorSource, open_model
from bankfull.weights.writing import output, shards
from bankfull.weights.writing.packing import pack, unpack, words
from tests.quantize.models import random_folder, recipe_of

RECIPES: dict[str, QuantizeRecipe] = {
    "w4a16": recipe_of("rtn", "4", "128"),
    "w4a16-32": recipe_of("rtn", "4", "32", clip="mse"),
    "w4a16-zero": recipe_of("rtn", "4", "64", symmetric=False),
    "w8a16": recipe_of("rtn", "8", "64"),
    "w8a16-row": recipe_of("rtn", "8", "row", activations="float"),
    "w8a8": recipe_of("rtn", "8"),
    "w3a16": recipe_of("rtn", "3", "64"),
    "w3a16-zero": recipe_of("rtn", "3", "64", symmetric=False),
    "w2a16": recipe_of("rtn", "2", "32"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_folder(tmp_path_factory.mktemp("model") / "m")


@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_packed_codes_are_unpacked_again(bits: int, rows: int, columns: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=random, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (rows, words(columns, bits)) and torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("name", RECIPES)
def test_the_engine_reads_its_own_files_in_the_schemes_that_were_written(
    name: str, folder: Path, tmp_path: Path
) -> None:
    recipe = RECIPES[name]
    saved = save_quantized(open_model(folder), recipe, tmp_path / "q")
    made, source = open_model(saved.path).source, open_model(folder).source
    assert set(made.names()) == set(source.names())
    for weight in source.names():
        values = source.get(weight).dequantize()
        scheme = None if values.dim() == 1 or "embed" in weight else recipe.scheme_of(values.shape[-1])
        expected = values if scheme is None else rounded(values, scheme, recipe.clip == "mse").dequantize()
        assert torch.equal(made.get(weight).dequantize(), expected), weight
        assert made.scheme(weight).name == (scheme or "f32"), weight


def test_a_saved_model_answers(tmp_path: Path) -> None:
    saved = save_quantized(open_model(random_folder(tmp_path / "m", torch.bfloat16)), RECIPES["w4a16"], tmp_path / "q")
    [result] = LLM(str(saved.path)).generate(
        ["the river"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    )
    assert len(result.outputs[0].token_ids) == 4


def test_columns_in_another_order_are_written_in_order(tmp_path: Path, folder: Path) -> None:
    files, recipe = open_model(folder), RECIPES["w4a16-zero"]
    once = open_model(save_quantized(files, recipe, tmp_path / "once").path)
    given = replace(once, source=Shuffled(once.source))
    again = open_model(save_quantized(given, recipe, tmp_path / "again", requantize=True).path)
    for name in once.source.names():
        wanted = given.source.get(name).dequantize()
        found = again.source.get(name)
        scheme = found.scheme.name
        assert torch.equal(found.dequantize(), wanted if found.is_dense else rounded(wanted, scheme).dequantize()), name


class Shuffled:
    """A source whose quantized matrices have their columns reversed."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.names, self.has, self.shape, self.scheme = source.names, source.has, source.shape, source.scheme
        self.unread, self.release = source.unread, source.release

    def get(self, name: str) -> QTensor:
        found = self.source.get(name)
        reverse = torch.arange(found.shape[-1] - 1, -1, -1, dtype=torch.int32)
        return found if found.is_dense else replace(found, columns=reverse)


def test_a_quantized_model_is_quantized_again_only_on_demand(folder: Path, tmp_path: Path) -> None:
    once = save_quantized(open_model(folder), RECIPES["w8a16"], tmp_path / "once")
    with pytest.raises(ConfigError, match=r"once is quantized already \(int8_g64\).*or --requantize"):
        save_quantized(open_model(once.path), RECIPES["w4a16"], tmp_path / "twice")
    twice = save_quantized(open_model(once.path), RECIPES["w4a16"], tmp_path / "twice", requantize=True)
    config = json.loads((twice.path / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    again = open_model(twice.path).source
    assert again.scheme("model.layers.0.self_attn.q_proj.weight").name == "int4_g128"


def test_a_gguf_file_becomes_a_directory_with_its_tokenizer(folder: Path, tmp_path: Path) -> None:
    first = save_quantized(open_model(folder), recipe_of("rtn", "8", "32", form="gguf", tables=True), tmp_path / "g")
    made = save_quantized(open_model(first.path), RECIPES["w4a16-32"], tmp_path / "q", requantize=True)
    own, text = load_tokenizer(open_model(folder)), load_tokenizer(open_model(made.path))
    assert text[0].encode("the river\n") == own[0].encode("the river\n") and text[1] is not None
    names = set(open_model(made.path).source.names())
    assert names == set(open_model(folder).source.names())
    assert open_model(made.path).source.scheme("model.embed_tokens.weight").name == "f16"


@pytest.mark.full  # the library takes ten seconds to import
@pytest.mark.parametrize("name", RECIPES)
def test_the_formats_own_library_reads_the_values_that_were_meant(name: str, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    recipe = RECIPES[name]
    saved = save_quantized(open_model(folder), recipe, tmp_path / "q")
    stored, source = load_file(saved.path / "model.safetensors"), load_file(folder / "model.safetensors")
    config = json.loads((saved.path / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key != "quant_method"})
    for weight in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        found = [
            group for group in parsed.config_groups.values() if "Linear" in group.targets or weight in group.targets
        ]
        assert len(found) == 1
        parts = {key.removeprefix(f"{weight}."): value for key, value in stored.items() if key.startswith(f"{weight}.")}
        decode = BaseCompressor.get_value_from_registry(found[0].format).decompress
        parts = {key: part.to(torch.float32) if key == "weight_scale" else part for key, part in parts.items()}
        values = decode(parts, found[0])["weight"]
        original = source[f"{weight}.weight"]
        scheme = recipe.scheme_of(original.shape[-1])
        assert scheme is not None
        assert torch.equal(values, rounded(original, scheme, recipe.clip == "mse").dequantize()), weight
    assert torch.equal(stored["model.embed_tokens.weight"], source["model.embed_tokens.weight"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["w4a16", "w8a8", "w4a16-zero"])
def test_transformers_runs_the_files_with_the_logits_of_the_rounded_weights(
    name: str, folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    import transformers

    recipe = RECIPES[name]
    saved = save_quantized(open_model(folder), recipe, tmp_path / "q")
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for weight, values in expected.named_parameters():
            if values.dim() == 2 and "embed" not in weight:
                scheme = recipe.scheme_of(values.shape[-1])
                assert scheme is not None
                values.copy_(rounded(values, scheme).dequantize())
    # Version 0.20 of the library cannot load packed zero points but by expanding them.
    expand = {} if recipe.symmetric else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(saved.path, dtype=torch.float32, **expand)
    prompt = torch.tensor([list(b"the river runs at the full capacity")])
    with torch.no_grad():
        wanted, found = expected(prompt).logits, loaded(prompt).logits
    # Activations of w8a8 are rounded per token, too. Expanded weights have the dtype of their scales, float16.
    allowed = 0.05 if recipe.activations else 1e-4 if recipe.symmetric else 2e-3
    assert (wanted - found).abs().max() < allowed * wanted.abs().max()


def test_large_models_have_several_files_and_an_index(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 40_000)
    saved = save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    index = json.loads((saved.path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3 and index["metadata"]["total_size"] == saved.bytes_after
    for name, file in index["weight_map"].items():
        with safe_open(saved.path / file, framework="pt") as shard:
            assert name in list(shard.keys()), name
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= {item.name for item in saved.path.iterdir()}
    assert "lm_head.weight" not in index["weight_map"], "embeddings are tied"


class Interrupted(Exception):
    pass


def interrupting(after: int) -> Callable[..., None]:
    """Rounding that stops after a number of matrices."""
    real, count = RoundToNearest.quantize, 0

    def quantize(self: RoundToNearest, layer: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise Interrupted
        real(self, layer)

    return quantize


def test_an_interrupted_run_continues_and_makes_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(RoundToNearest, "quantize", interrupting(5))
        with pytest.raises(Interrupted):
            save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    assert not (tmp_path / "q").exists() and (tmp_path / ".q.partial").exists()
    with monkeypatch.context() as patch:
        patch.setattr(RoundToNearest, "quantize", interrupting(14 - 5))  # fails if one matrix is done again
        again = save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    assert again.resumed_bytes > 0 and not (tmp_path / ".q.partial").exists()
    for item in whole.path.iterdir():
        assert (again.path / item.name).read_bytes() == item.read_bytes(), item.name


def test_a_run_with_another_recipe_starts_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RoundToNearest, "quantize", interrupting(5))
        with pytest.raises(Interrupted):
            save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    saved = save_quantized(open_model(folder), RECIPES["w4a16-32"], tmp_path / "q")
    assert saved.resumed_bytes == 0
    assert load_file(saved.path / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"].shape == (192, 4)


def test_what_cannot_be_written_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(ConfigError, match="full exists already; delete it, or choose another directory"):
        save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "full")
    narrow = random_folder(tmp_path / "narrow", hidden_size=40, head_dim=10, intermediate_size=40)
    with pytest.raises(ConfigError, match=r"--group 128 divides the columns of no matrix \(40\)"):
        save_quantized(open_model(narrow), RECIPES["w4a16"], tmp_path / "q")
    monkeypatch.setattr(output, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GB in .* are free; make room"):
        save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_full_disk_is_one_sentence_and_what_is_written_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output.OutputFolder, "put", fails)
    with pytest.raises(BankfullError, match="No space left on device; choose another directory"):
        save_quantized(open_model(folder), RECIPES["w4a16"], tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_bits_per_weight_count_scales(folder: Path, tmp_path: Path) -> None:
    saved = save_quantized(open_model(folder), RECIPES["w4a16-32"], tmp_path / "q")
    assert saved.bits_per_weight == 4.5 and saved.quantized == 14 and saved.kept == 0
    assert saved.bits_per_weight < saved.model_bits < 32 and saved.bytes_after < saved.bytes_before
