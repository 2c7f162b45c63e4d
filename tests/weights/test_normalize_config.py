"""Config files of every age are normalized, and absurd ones are rejected with a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ModelError
from bankfull.weights.hf_config import read_json
from bankfull.weights.source import normalize_config
from tests.quick import examples

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_old_and_new_files_say_the_same() -> None:
    old = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": dict(LLAMA3), "torch_dtype": "bfloat16"}
    new = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "dtype": "bfloat16"}
    want = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3, "dtype": "bfloat16"}
    assert normalize_config(old) == normalize_config(new) == want
    assert normalize_config(want) == want


def test_the_argument_is_left_alone() -> None:
    config: dict[str, Any] = {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "text_config": {"rope_theta": 2.0},
    }
    normalize_config(config)
    assert config == {
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "text_config": {"rope_theta": 2.0},
    }


def test_no_scaling_is_none_and_no_theta_stays_absent() -> None:
    assert normalize_config({}) == {"rope_scaling": None}
    assert normalize_config({"rope_scaling": None, "rope_theta": None}) == {"rope_scaling": None}
    assert normalize_config({"rope_parameters": {"rope_type": "default"}}) == {"rope_scaling": None}


def test_earlier_names_of_scaling_types_are_renamed() -> None:
    assert normalize_config({"rope_scaling": {"type": "linear", "factor": 2.0}})["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 2.0,
    }
    su = {
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]},
    }
    assert normalize_config(su)["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1.0],
        "short_factor": [1.0],
        "original_max_position_embeddings": 4096,
    }
    assert (
        normalize_config({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})["rope_scaling"]["rope_type"] == "yarn"
    )


def test_gemma_3_keeps_the_global_base_and_the_local_one() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=6)
    config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    made = normalize_config(config.to_dict())
    assert (made["rope_theta"], made["rope_local_base_freq"]) == (1e6, 1e4)
    assert made["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert "rope_parameters" not in made
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert {key: made[key] for key in old} == normalize_config(old)


def test_a_partial_rotation_moves_to_the_top() -> None:
    config = transformers.Phi3Config(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    )
    assert normalize_config(config.to_dict())["partial_rotary_factor"] == 0.75


def test_a_nested_text_config_stays_nested_and_is_normalized() -> None:
    made = normalize_config({"text_config": {"torch_dtype": "float16", "rope_parameters": {"rope_theta": 7.0}}})
    assert made["text_config"] == {"dtype": "float16", "rope_theta": 7.0, "rope_scaling": None}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": "10000"},
        {"rope_theta": -1},
        {"rope_theta": True},
        {"rope_theta": 0},
        {"rope_scaling": 3},
        {"rope_scaling": {"type": 3}},
        {"rope_parameters": []},
        {"rope_parameters": {"full_attention": 1}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
        {"rope_local_base_freq": []},
        {"text_config": {"rope_theta": {}}},
    ],
)
def test_rotary_settings_of_the_wrong_kind_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        normalize_config(config)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)
KEYS = st.sampled_from(
    [
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "dtype",
        "torch_dtype",
        "text_config",
        "type",
        "rope_type",
        "full_attention",
        "sliding_attention",
        "rope_local_base_freq",
    ]
)


@examples(200, deadline=None)
@given(st.dictionaries(KEYS, st.one_of(JSON, st.dictionaries(KEYS, st.one_of(JSON, st.dictionaries(KEYS, JSON))))))
def test_any_config_is_normalized_or_refused(config: dict[str, Any]) -> None:
    try:
        made = normalize_config(config)
    except ModelError:
        return
    assert made["rope_scaling"] is None or isinstance(made["rope_scaling"]["rope_type"], str)
    assert normalize_config(made) == made


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'"x"',
        b"null",
        b"\xff\xfe{",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": Infinity, "time_step_limit": [0.0, Infinity]}',
        b"[" * 100000,
        b'{"a":' * 100000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_json(path)
    assert len(str(caught.value)) < 400


def test_an_open_limit_of_the_time_steps_may_be_infinite(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_json(path) == {"time_step_limit": [0.0, {"__float__": "Infinity"}]}


def test_an_oversized_or_missing_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ModelError, match="larger than 16 MiB"):
        read_json(path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ModelError, match="not a regular file"):
        read_json(tmp_path)
