from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from bankfull.errors import RequestError
from bankfull.sample.params import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutput

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 1.0),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INF),
        ("temperature", 101),
        ("temperature", 1e-6),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 2**40),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("top_p", -0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", NAN),
        ("typical_p", 0.0),
        ("typical_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", INF),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", NAN),
        ("logit_bias", [1]),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "12"),
        ("allowed_token_ids", 5),
        ("banned_token_ids", [1.0]),
        ("banned_token_ids", {1: 2}),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words", ["x"] * 65),
        ("bad_word_ids", [[]]),
        ("bad_word_ids", [[1, -1]]),
        ("bad_word_ids", [[1]] * 257),
        ("bad_word_ids", [[1] * 65]),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", [1]),
        ("stop", 3),
        ("stop", ["x" * 5000]),
        ("stop", (s for s in "ab")),
        ("stop_token_ids", [2**30]),
        ("stop_token_ids", [True]),
        ("include_stop_str_in_output", 1),
        ("min_tokens", -1),
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("ignore_eos", "no"),
        ("seed", 2**63),
        ("seed", 0.5),
        ("logprobs", -1),
        ("logprobs", 65),
        ("prompt_logprobs", 65),
        ("detokenize", None),
        ("skip_special_tokens", 0),
        ("structured", {"json": {}}),
    ],
)
def test_a_bad_value_is_refused_in_one_sentence_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    message = str(refused.value)
    assert name in message and message.endswith(".") and "\n" not in message and len(message) < 250


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 2, "temperature": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"stop": "x", "detokenize": False},
        {"ignore_eos": True, "structured": StructuredOutput(regex="a")},
        {"allowed_token_ids": [1, 2], "banned_token_ids": [1, 2, 3]},
    ],
)
def test_parameters_that_contradict_each_other_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**wrong)
    assert all(name in str(refused.value) for name in list(wrong)[:1])


def test_values_are_normalised_and_edges_are_accepted() -> None:
    params = SamplingParams(
        n=128,
        temperature=1,
        top_k=-1,
        top_p=1,
        stop="end",
        bad_words=["no"],
        logprobs=0,
        seed=-(2**63),
        allowed_token_ids=[3, 4],
        logit_bias={3: 2},
        min_tokens=4,
        max_tokens=4,
    )
    assert params.stop == ("end",) and params.bad_words == ("no",) and params.allowed_token_ids == (3, 4)
    assert isinstance(params.temperature, float) and params.logit_bias == {3: 2.0} and not params.greedy
    assert replace(params, bad_word_ids=[[1, 2]]).bad_word_ids == ((1, 2),)
    assert SamplingParams().max_tokens is None and SamplingParams(temperature=0).greedy


def test_later_changes_to_the_callers_objects_do_not_reach_the_parameters() -> None:
    bias, ids = {1: 1.0}, [1]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids)
    bias[1], ids[0] = 50.0, 9
    assert params.logit_bias == {1: 1.0} and params.stop_token_ids == (1,)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "grammar": "start: x"},
        {"json": {}, "regex": "a", "choice": ["x"]},
        {"choice": []},
        {"choice": [""]},
        {"choice": "abc"},
        {"regex": 3},
        {"json": [1]},
        {"json": {"a": {1, 2}}},
        {"json": {"minimum": NAN}},
        {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
        {"choice": ["a"] * 5000},
        {"regex": "\ud800"},
    ],
)
def test_a_structured_output_that_cannot_be_meant_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        StructuredOutput(**fields)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_a_schema_in_a_loop_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["properties"] = schema
    with pytest.raises(RequestError, match=r"structured\.json"):
        StructuredOutput(json=schema)


def test_equal_schemas_as_dict_and_as_text_have_one_source() -> None:
    assert StructuredOutput(json={"type": "null"}).source == StructuredOutput(json='{"type": "null"}').source


def test_parameters_are_checked_without_loading_a_heavy_library() -> None:
    code = (
        "import sys, bankfull.sample.params; "
        "assert not {'torch', 'numpy', 'llguidance'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
