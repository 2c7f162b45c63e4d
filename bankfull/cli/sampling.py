"""Sampling options from the command line or a file become checked SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from bankfull.errors import RequestError
from bankfull.sample.params import SamplingParams, StructuredOutput

KNOWN = tuple(field.name for field in fields(SamplingParams))
ONLY_WHEN_SAMPLING = ("top_k", "top_p", "min_p", "typical_p")


def params_from(base: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`base` with the values of `given`. A RequestError names a parameter that is unknown or out of range."""
    changes = dict(given)
    for name in changes:
        if name not in KNOWN:
            raise RequestError(f"There is no sampling parameter {name!r}; known are {', '.join(KNOWN)}.")
    if isinstance(form := changes.get("structured"), Mapping):
        changes["structured"] = _structured(form)
    if isinstance(bias := changes.get("logit_bias"), Mapping):
        changes["logit_bias"] = {_token(key): value for key, value in bias.items()}
    if base.greedy and "temperature" not in changes and _asks_to_sample(changes):
        changes["temperature"] = 1.0
    return replace(base, **changes)


def _asks_to_sample(changes: Mapping[str, Any]) -> bool:
    several = changes.get("n", 1) != 1
    return several or any(name in changes for name in ONLY_WHEN_SAMPLING)


def _structured(form: Mapping[str, Any]) -> StructuredOutput:
    known = tuple(field.name for field in fields(StructuredOutput))
    for name in form:
        if name not in known:
            raise RequestError(f"structured has no field {name!r}; give one of {', '.join(known)}.")
    return StructuredOutput(**form)


def _token(key: object) -> object:
    """Token ids as integers: the keys of a JSON object are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
