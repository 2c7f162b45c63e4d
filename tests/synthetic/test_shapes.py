"""The list of real shapes, and tiny models of the same architectures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bankfull.errors import BankfullError, ConfigError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.registry import FAMILIES
from bankfull.synthetic.shapes import shape_config, tiny, with_layers
from bankfull.weights.known_shapes import shape_names

PARAMETERS = {
    "smollm2-135m": 0.1345e9,
    "smollm2-360m": 0.3618e9,
    "smollm2-1.7b": 1.711e9,
    "llama-3-8b": 8.03e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.55e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "mistral-7b": 7.248e9,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-7b": 7.616e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "olmo-2-7b": 7.3e9,
    "granite-3.3-8b": 8.17e9,
    "glm-4-9b": 9.4e9,
    "gpt2": 0.1244e9,
    "pythia-1.4b": 1.415e9,
    "opt-1.3b": 1.316e9,
    "phi-3-mini": 3.821e9,
    "gemma-2-2b": 2.614e9,
    "gemma-3-1b": 1.0e9,
    "smollm3-3b": 3.075e9,
    "mixtral-8x7b": 46.7e9,
    "qwen1.5-moe-a2.7b": 14.32e9,
    "qwen3-30b-a3b": 30.53e9,
    "olmoe-1b-7b": 6.92e9,
    "gpt-oss-20b": 20.91e9,
    "deepseek-v2-lite": 15.71e9,
    "deepseek-v3": 671.0e9,
    "mamba-2.8b": 2.768e9,
    "mamba2-2.7b": 2.702e9,
    "granite-4-h-tiny": 6.94e9,
    "jamba-mini": 51.57e9,
    "falcon-h1-0.5b": 0.5214e9,
    "qwen3-next-80b-a3b": 79.67e9,
    "minimax-text-01": 456.1e9,
    "llada-8b": 8.016e9,
    "dream-7b": 7.616e9,
}
"""Parameters of the published models."""
KNOWN = [name for name in shape_names() if shape_config(name)["model_type"] in FAMILIES]


def test_every_shape_is_listed_with_its_size() -> None:
    assert set(shape_names()) == set(PARAMETERS)


def kinds_of(metered: MeteredModel) -> tuple[set[type], set[type]]:
    """The kinds of mixers and of feed-forward layers."""
    blocks = metered.model.blocks
    return {type(block.mixer) for block in blocks}, {type(block.feed) for block in blocks}


@pytest.mark.few(13)
@pytest.mark.parametrize("name", KNOWN)
def test_a_shape_has_the_size_of_its_model_and_its_tiny_one_every_kind_of_layer(name: str) -> None:
    real, small = MeteredModel(shape_config(name)), MeteredModel(shape_config(f"{name}-tiny"))
    assert real.parameters == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert small.parameters < 3e6 and len(small.model.mixers) <= 12
    assert kinds_of(small) == kinds_of(real)


def test_lists_with_one_value_per_layer_are_cut_with_the_layers() -> None:
    config = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "other": [1, 2], "first_k_dense_replace": 3}
    assert with_layers(config, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "other": [1, 2],
        "first_k_dense_replace": 2,
    }
    for layers in (0, 5, -1):
        with pytest.raises(ConfigError, match=rf"--layers {layers} must be from 1 to 4"):
            with_layers(config, layers)
    with pytest.raises(ConfigError, match="no number of layers"):
        with_layers({}, 1)


def test_heads_of_a_tiny_model_are_shared_as_in_the_real_one() -> None:
    made = tiny({"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2, "head_dim": 128})
    assert (made["num_attention_heads"], made["num_key_value_heads"], made["head_dim"]) == (4, 1, 16)
    assert (
        tiny({"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2})["num_key_value_heads"] == 4
    )


def test_a_configuration_file_is_a_shape(tmp_path: Path) -> None:
    config = shape_config("smollm2-135m") | {"num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_config(str(tmp_path)) == shape_config(str(tmp_path / "config.json")) == config


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("llama-3.1-8", "did you mean 'llama-3.1-8b'"),
        ("zzz", "give the path of a config.json, or one of: smollm2-135m"),
        ("x" * 5000, "not a usable path|There is no shape"),
        ("a\0b", "not a usable path|There is no shape"),
    ],
    ids=["misspelt", "unknown", "long", "zero byte"],
)
def test_an_unknown_shape_is_refused_in_one_sentence(shape: str, message: str) -> None:
    with pytest.raises(BankfullError, match=message) as refused:
        shape_config(shape)
    assert "\n" not in str(refused.value)
