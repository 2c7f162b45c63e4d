"""Ways to run a model: a weight type, a dtype, a KV cache type, or another saved form of the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.at_load import refuse_unknown, requantized
from bankfull.runtime.device import Device
from bankfull.weights.locate import locate
from bankfull.weights.requantized import block_types, inner_weights
from bankfull.weights.source import ModelFiles, open_model

SAVED = "saved"
DTYPES = {name: name for name in ("float32", "bfloat16", "float16")} | {
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
}
KV, ACTIVATIONS, EVICT = "kv:", "activations:", "sinks:"
DEFAULTS = {
    "cpu": "saved; bf16; int8; int4:32; int4:128; q6_k,keep; q4_k,keep; q3_k,keep; int3; int2; saved kv:int8",
    "cuda": "saved; bf16; int8; fp8; int4:32; int4:128; int3; saved kv:int8",
}
"""Ways that are tried on a kind of device if none is named; those that do not apply are left out with the reason."""
MOST_WAYS = 64
KEPT_SHARE = 0.5
"""Share of the weights that a type must fit to be worth a line of its own."""


@dataclass(frozen=True, slots=True)
class RunWay:
    """One way to run the model. `path`: another saved form of it."""

    name: str
    quantize: str | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    activations: str = "auto"
    kv_evict: str | None = None
    path: str | None = None

    @property
    def expand(self) -> bool:
        """A dtype of its own means that quantized weights are dequantized to it."""
        return self.dtype != "auto" and self.quantize is None

    def run(self, device: str) -> RunConfig:
        return RunConfig(
            device,
            self.dtype,
            expand=self.expand,
            kv_dtype=self.kv_dtype,
            activations=self.activations,
            kv_evict=self.kv_evict,
            speculative="off",
        )


def parse_ways(text: str, device: str) -> list[RunWay]:
    """ "bf16; int4:32; int4:32 kv:int8; ./model-awq": ways between semicolons. A way is the path of a saved model, or
    words between spaces: a type for --quantize, a dtype, kv:TYPE, activations:TYPE, sinks:N,window:M (for
    --kv-evict), or `saved`."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts or len(parts) > MOST_WAYS:
        raise ConfigError(f"--ways names {len(parts)} ways; give 1 to {MOST_WAYS}, with semicolons between them.")
    ways = [parse_way(part, device) for part in parts]
    names = [way.name for way in ways]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--ways names {twice[:40]!r} twice; leave one of them out.")
    return ways


def parse_way(text: str, device: str) -> RunWay:
    if _is_path(text):
        return RunWay(text, path=text)
    way = RunWay(text)
    for word in text.split():
        if word.startswith(KV):
            way = _set(way, "kv_dtype", word.removeprefix(KV))
        elif word.startswith(ACTIVATIONS):
            way = _set(way, "activations", word.removeprefix(ACTIVATIONS))
        elif word.startswith(EVICT):
            way = _set(way, "kv_evict", word)
        elif word.lower() in DTYPES:
            way = _set(way, "dtype", DTYPES[word.lower()])
        elif word.lower() != SAVED:
            refuse_unknown(word, device)
            way = _set(way, "quantize", word)
    way.run(device)  # refuses unknown types of the KV cache and of activations
    return way


def _set(way: RunWay, field: str, value: str) -> RunWay:
    if getattr(way, field) not in (None, "auto"):
        raise ConfigError(f"The way {way.name[:40]!r} names two types of one kind; separate ways with semicolons.")
    return replace(way, **{field: value})


def _is_path(text: str) -> bool:
    try:
        return "/" in text or Path(text).exists()
    except (OSError, ValueError):
        return False


def default_ways(files: ModelFiles, device: Device) -> tuple[list[RunWay], list[str]]:
    """The ways of a kind of device, and why others of its list were left out."""
    ways, left_out = [], []
    for text in DEFAULTS[device.kind].split(";"):
        name = text.strip()
        try:
            way = parse_way(name, device.kind)
            if (reason := _without_use(files, way, device)) is not None:
                raise ConfigError(reason)
        except (ConfigError, ModelError) as error:
            left_out.append(f"{name}: {error}")
        else:
            ways.append(way)
    return ways, left_out


def _without_use(files: ModelFiles, way: RunWay, device: Device) -> str | None:
    if way.name == "bf16" and not block_types(files.source) and _saved_dtype(files) == "bfloat16":
        return "the checkpoint is saved in bfloat16."
    if way.quantize is None:
        return None
    source = opened(files, way, device).source
    every = sum(_weights(files, name) for name in files.source.names() if len(files.source.shape(name)) > 1)
    if inner_weights(source) < KEPT_SHARE * (every - _tables(files)):
        return "its blocks do not divide the columns of most matrices."
    return None


def _saved_dtype(files: ModelFiles) -> str:
    return str(files.config.get("dtype") or files.config.get("torch_dtype") or "").removeprefix("torch.")


def _weights(files: ModelFiles, name: str) -> int:
    count = 1
    for size in files.source.shape(name):
        count *= size
    return count


def _tables(files: ModelFiles) -> int:
    vocab = files.config.get("vocab_size")
    return sum(_weights(files, n) for n in files.source.names() if files.source.shape(n)[:1] == (vocab,))


def opened(files: ModelFiles, way: RunWay, device: Device) -> ModelFiles:
    """The model's files in this form. `files` must be fresh: a source tracks which tensors were read."""
    if way.path is not None:
        return open_model(locate(way.path))
    if way.quantize is None:
        return files
    return requantized(files, way.quantize, device)[0]
