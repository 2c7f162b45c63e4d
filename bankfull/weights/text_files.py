"""The files behind a model's text: configuration, tokenizer and chat template. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.gguf.header import open_header
from bankfull.weights.hf_config import normalize_config, read_json


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The parts of a model's files that `bankfull.text.load.load_tokenizer` reads."""

    path: Path
    kind: str
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    metadata: Mapping[str, Any]


def open_text_files(path: Path) -> TextFiles:
    """Open a model directory or a .gguf file without its tensors."""
    if path.is_dir():
        generation = path / "generation_config.json"
        config = normalize_config(read_json(path / "config.json"))
        return TextFiles(path, "hf", config, read_json(generation) if generation.exists() else {}, {})
    if path.suffix == ".gguf":
        return TextFiles(path, "gguf", {}, {}, open_header(path).metadata)
    raise ModelError(f"{path} is neither a .gguf file nor a model directory with a config.json")
