"""A Hugging Face directory: config.json and safetensors files, one or many, each opened once and on demand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bankfull.errors import ModelError
from bankfull.weights.formats.dense import SCHEMES
from bankfull.weights.formats.mxfp4 import MXFP4
from bankfull.weights.fused_experts import FusedExperts
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.published.opening import quantization_of
from bankfull.weights.published.source import PublishedSource
from bankfull.weights.qtensor import QTensor, Scheme

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPOSED = "bankfull"
"""The `model_type` of a model as data, whose configuration may be written before it has weights."""
MAX_INDEX_BYTES = 64 << 20
READ_DTYPES = {scheme.name.upper(): scheme for scheme in SCHEMES}
GPT_OSS = "gpt_oss"
MODELOPT = "hf_quant_config.json"
"""The file in which older versions of ModelOpt describe the quantization."""
PLAIN_NAME = re.compile(r"[^/\\\0]+\.safetensors")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def open_directory(
    path: Path,
) -> tuple[dict[str, Any], dict[str, Any], DirectorySource | FusedExperts | PublishedSource]:
    """The normalized configuration, the generation defaults, and the tensors of a model directory."""
    if not (path / "config.json").exists():
        hint = next((name for name in sorted(item.name for item in path.iterdir()) if name.endswith(".gguf")), None)
        way_out = f"give the path of '{hint}' in it" if hint else "give a Hugging Face model directory or a .gguf file"
        raise ModelError(f"{path} has no config.json: {way_out}")
    config = read_json(path / "config.json")
    fused = config.get("model_type") == GPT_OSS
    if (path / MODELOPT).exists() and "quantization_config" not in config:
        config["quantization_config"] = read_json(path / MODELOPT) | {"quant_method": "modelopt"}
    quantized = quantization_of(path, config, *((MXFP4,) if fused else ()))
    config = normalize_config(config)
    if config.get("model_type") == COMPOSED and not (path / SINGLE).exists() and not (path / INDEX).exists():
        raise ModelError(
            f"{path.name!r} describes a model without weights: train it with `bankfull train lm`, or give it random "
            "weights with `bankfull make-model`"
        )
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    source = DirectorySource(path)
    if quantized is not None:
        reader, declared = quantized
        return config, generation, PublishedSource(source, reader(source, declared))
    return config, generation, FusedExperts(source) if fused else source


class DirectorySource:
    """The tensors of a directory under their names in its files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._shards: dict[str, Any] = {}
        self._read: set[str] = set()
        self._file_of: dict[str, str] = self._find()

    def names(self) -> list[str]:
        return list(self._file_of)

    def has(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._describe(name).get_shape())

    def scheme(self, name: str) -> Scheme:
        dtype = self._describe(name).get_dtype()
        if dtype not in READ_DTYPES:
            known = ", ".join(READ_DTYPES)
            raise ModelError(
                f"{self._file(name)} stores '{name}' as {dtype}, which is not read: use a checkpoint with {known}"
            )
        return READ_DTYPES[dtype]

    def get(self, name: str) -> QTensor:
        self.scheme(name)
        return QTensor.dense(self._tensor(name))

    def dtype_of(self, name: str) -> str:
        """The dtype's name in the file."""
        return str(self._describe(name).get_dtype())

    def stored(self, name: str) -> Tensor:
        """A tensor of any dtype, as it is in the file."""
        return self._tensor(name)

    def bytes_of(self, name: str) -> Tensor:
        """A tensor of bytes, which no scheme describes."""
        if (dtype := self._describe(name).get_dtype()) != "U8":
            raise ModelError(f"{self._file(name)} stores '{name}' as {dtype} instead of U8: download it again")
        return self._tensor(name)

    def _tensor(self, name: str) -> Tensor:
        file = self._file(name)
        try:
            tensor: Tensor = self._shards[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{file} cannot read the tensor '{name}' ({_short(error)}): download it again") from None
        self._read.add(name)
        return tensor

    def unread(self) -> list[str]:
        return [name for name in self._file_of if name not in self._read]

    def release(self) -> None:
        """Nothing to do: the library maps its files itself and frees unused tensors."""

    def _find(self) -> dict[str, str]:
        if (self._path / SINGLE).exists():
            return dict.fromkeys(self._shard(SINGLE).keys(), SINGLE)
        if (self._path / INDEX).exists():
            return self._read_index()
        present = sorted(item.name for item in self._path.iterdir())
        pickled = next((name for name in present if name.endswith(PICKLED)), None)
        if pickled is not None:
            raise ModelError(
                f"{self._path} holds its weights in '{pickled}', a pickle that could run any code: "
                "use a checkpoint in safetensors format"
            )
        raise ModelError(f"{self._path} holds no weights: neither {SINGLE} nor {INDEX} is there")

    def _read_index(self) -> dict[str, str]:
        index = read_json(self._path / INDEX, MAX_INDEX_BYTES)
        mapping = index.get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelError(f"{self._path / INDEX} has no weight_map: download it again")
        for file in mapping.values():
            # A plain name can only be in the directory itself. Symbolic links there are allowed: the usual download
            # cache consists of them.
            if not isinstance(file, str) or not PLAIN_NAME.fullmatch(file):
                label = repr(str(file)[:80])
                raise ModelError(f"{self._path / INDEX} points to {label}, which is not a safetensors file beside it")
        return dict(mapping)

    def _file(self, name: str) -> str:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self._path} lacks the tensor '{name}': the checkpoint does not hold the whole model")
        return file

    def _describe(self, name: str) -> Any:
        file = self._file(name)
        shard = self._shard(file)
        try:
            return shard.get_slice(name)
        except SafetensorError:
            raise ModelError(f"{file} lacks the tensor '{name}' that its index lists: download it again") from None

    def _shard(self, file: str) -> Any:
        if file not in self._shards:
            path = self._path / file
            if not path.is_file():
                raise ModelError(f"{path} is missing or not a regular file: download the checkpoint again")
            try:
                self._shards[file] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
                raise ModelError(f"{path} is not a safetensors file ({_short(error)}): download it again") from None
        return self._shards[file]


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
