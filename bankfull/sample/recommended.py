"""Default sampling parameters of a model, the same for the command line, the server and `LLM`.

In this order: the model's own files (generation_config.json, or the `general.sampling` keys of a GGUF file); values
that its authors publish elsewhere, found by the model's name; else a default for any model. A file with a temperature
or with `do_sample` is followed exactly; a file with only some of the other values replaces those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from bankfull.errors import ModelError, RequestError
from bankfull.sample.params import SamplingParams

KEYS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
#: Names of the same values in a GGUF file, converted from the authors' generation_config.json.
GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

#: Published by the authors of chat models in a model card or beside the original weights; the first match counts. Most
#: GGUF files lack these values, and with greedy decoding small models repeat themselves without end.
PUBLISHED: tuple[tuple[re.Pattern[str], Mapping[str, float]], ...] = tuple(
    (re.compile(rf"\b{name}\b"), values)
    for name, values in (
        ("smollm2", {"temperature": 0.2, "top_p": 0.9}),
        ("smollm3", {"temperature": 0.6, "top_p": 0.95}),
        ("qwen-?3-.*instruct", {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
        ("qwen-?3", {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (r"qwen-?2\.5", {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}),
        (r"llama-?3(\.\d)?", {"temperature": 0.6, "top_p": 0.9}),
        ("gemma-?3", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}),
    )
)
GENERAL: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9}
"""Values for an unknown model: random enough not to loop, without the unlikely tokens that derail a text."""


class Described(Protocol):
    """A model's files, apart from its tensors."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def generation(self) -> Mapping[str, Any]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


def recommended(files: Described, *, chats: bool) -> dict[str, Any]:
    """Values for fields of SamplingParams, checked. `chats`: the model has a chat template."""
    settings = {name: _decimal(files.metadata[key]) for key, name in GGUF_KEYS.items() if key in files.metadata}
    settings |= {key: files.generation[key] for key in KEYS if files.generation.get(key) is not None}
    samples = files.generation.get("do_sample")
    if samples is False:
        settings = {key: value for key, value in settings.items() if key == "repetition_penalty"} | {"temperature": 0.0}
    elif samples is None and "temperature" not in settings:
        settings = {**(_published(files) if chats else GENERAL), **settings}
    try:
        SamplingParams(**settings)  # invalid values fail at start, not at each request
    except RequestError as error:
        raise ModelError(f"{files.path} recommends sampling that does not exist: {error}") from None
    return settings


def _decimal(value: Any) -> Any:
    """A float32 of a GGUF file as its author wrote it: 0.6, not 0.6000000238418579."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _published(files: Described) -> Mapping[str, float]:
    names = [re.sub(r"[\s_/-]+", "-", name.lower()) for name in _names(files)]
    return next((values for pattern, values in PUBLISHED if any(map(pattern.search, names))), GENERAL)


def _names(files: Described) -> Iterator[str]:
    """Every name of the model: in its metadata, in its configuration, of its folder or file."""
    for name in (
        files.metadata.get("general.name"),
        files.metadata.get("general.basename"),
        files.config.get("_name_or_path"),
    ):
        if isinstance(name, str):
            yield name
    path = files.path
    # The hub's cache keeps a model as models--OWNER--NAME/snapshots/COMMIT.
    yield path.parents[1].name if path.parent.name == "snapshots" else path.name
