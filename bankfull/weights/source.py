"""A model's tensors and configuration, independent of the file format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from bankfull.errors import ModelError
from bankfull.weights.hf_config import normalize_config
from bankfull.weights.qtensor import QTensor, Scheme

__all__ = ["ExpertSource", "ModelFiles", "TensorSource", "normalize_config", "open_model"]


class TensorSource(Protocol):
    """Tensors by their Hugging Face names; data are memory-mapped and read on use."""

    def names(self) -> list[str]: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def scheme(self, name: str) -> Scheme:
        """The storage scheme; like `shape`, without reading the data."""

    def get(self, name: str) -> QTensor:
        """The tensor, which is then marked as read; raises ModelError if it does not exist."""

    def unread(self) -> list[str]:
        """Tensors that were never read, for example forgotten ones."""

    def release(self) -> None:
        """Release the memory of mapped files after weights were copied; they are read again on access."""


@runtime_checkable
class ExpertSource(Protocol):
    """A source that makes the tensors of experts from others, so that a view of a few reads all."""

    def get_experts(self, name: str, experts: Sequence[int]) -> QTensor:
        """These experts of a tensor; only they are read."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    path: Path
    kind: Literal["hf", "gguf"]
    config: dict[str, Any]  # normalized keys of a Hugging Face config.json
    source: TensorSource
    generation: dict[str, Any]  # generation_config.json, or {}; for a GGUF file, its end tokens
    metadata: Mapping[str, Any]  # GGUF key/values, {} for a directory
    quantization: str | None = None  # method and bits of a directory that was published quantized
    opened: TensorSource | None = None  # the source of `open_model`, whatever `source` became since

    @property
    def is_as_stored(self) -> bool:
        """Whether the source gives the tensors of the files at `path`, and nothing else."""
        return self.source is self.opened


def open_model(path: str | Path) -> ModelFiles:
    """Open a Hugging Face directory or a .gguf file; no tensor data are read."""
    path = Path(path)
    if "\0" in str(path):
        raise ModelError(f"{str(path)!r} is not a path: it contains a zero byte")
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise ModelError(f"{str(path)[:80]!r} is not a usable path: {error.strerror or error}") from None
    if is_directory:
        return _open_directory(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if exists:
        raise ModelError(f"{path} is neither a .gguf file nor a model directory with a config.json")
    raise ModelError(f"{path} does not exist: give a model directory or a .gguf file")


def _open_directory(path: Path) -> ModelFiles:
    from bankfull.weights.conv1d import Conv1DSource
    from bankfull.weights.safetensors import open_directory

    config, generation, files = open_directory(path)
    source: TensorSource = files
    if config.get("model_type") == "gpt2":
        source = Conv1DSource(files, config, getattr(files, "quantized", ()))
    return ModelFiles(path, "hf", config, source, generation, {}, getattr(files, "about", None), source)


def _open_gguf(path: Path) -> ModelFiles:
    from bankfull.weights.gguf.config import config_from, generation_from
    from bankfull.weights.gguf.file import open_container
    from bankfull.weights.gguf.names import GGUFSource

    container = open_container(path)
    config = config_from(container)
    source, generation = GGUFSource(container, config), generation_from(container)
    return ModelFiles(path, "gguf", config, source, generation, container.metadata, opened=source)
