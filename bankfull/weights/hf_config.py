"""Reads config.json files of any age into one set of keys.

Old files use `rope_theta`, `rope_scaling` with "type", and `torch_dtype`; new ones `rope_parameters` and `dtype`.
`normalize_config` leaves only `rope_theta`, `rope_scaling` (None, or a dict with "rope_type"), `rope_local_base_freq`
and `dtype`.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from bankfull.errors import ModelError

MAX_JSON_BYTES = 16 << 20
LAYER_TYPES = ("full_attention", "sliding_attention")

OPEN_LIMIT = "time_step_limit"
"""The one field of real files (Mamba-2) that holds Infinity."""

Config = dict[str, Any]


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Config:
    """A JSON object from an untrusted file."""

    infinite: list[Config] = []

    def constant(name: str) -> Config:
        if name != "Infinity":
            raise ValueError(f"{name} is not JSON")
        infinite.append({"__float__": name})  # as new versions of transformers write it
        return infinite[-1]

    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise ModelError(f"{path} is larger than {limit >> 20} MiB, which no real file of its kind is")
        with path.open("rb") as file:
            value = json.loads(file.read(limit + 1), parse_constant=constant)
        open_limit = value.get(OPEN_LIMIT) if isinstance(value, dict) else None
        if infinite and not (isinstance(open_limit, list) and open_limit[1:] == infinite):
            raise ValueError("Infinity is not JSON")
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({type(error).__name__}): download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__} where an object is expected")
    return value


def normalize_config(config: Config) -> Config:
    """The configuration with normalized keys; the argument is not changed, a `text_config` stays nested."""
    normalized = _normalize_level(config)
    if isinstance(nested := normalized.get("text_config"), dict):
        normalized["text_config"] = _normalize_level(nested)
    return normalized


_RENAMED = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
    },
    "gpt_neox": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
}
"""Architecture -> its own names of fields that other families share -> the shared names."""


def _normalize_level(config: Config) -> Config:
    kind = config.get("model_type")
    renamed = _RENAMED.get(kind, {}) if isinstance(kind, str) else {}
    normalized = {renamed.get(key, key): value for key, value in config.items()}
    old_dtype = normalized.pop("torch_dtype", None)
    if normalized.get("dtype") is None and old_dtype is not None:
        normalized["dtype"] = old_dtype
    parameters = _dict_or_none(normalized, "rope_parameters")
    normalized.pop("rope_parameters", None)
    scaling = _dict_or_none(normalized, "rope_scaling")
    if parameters is not None and any(kind in parameters for kind in LAYER_TYPES):
        local = _dict_or_none(parameters, "sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            kind = str(local["rope_type"])[:80]
            raise ModelError(f"config.json scales the rotary embedding of sliding layers by '{kind}', not supported")
        if "rope_theta" in local:
            normalized["rope_local_base_freq"] = local["rope_theta"]
        parameters = _dict_or_none(parameters, "full_attention")
    chosen = dict(parameters if parameters is not None else scaling or {})
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := chosen.pop(key, None)) is not None:
            normalized[key] = value
    normalized["rope_scaling"] = _scaling(chosen, normalized)
    for key in ("rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        if normalized.get(key) is None:
            normalized.pop(key, None)  # absent, so that the model's default applies
        elif not _is_positive(normalized[key]):
            raise ModelError(
                f"config.json has a '{key}' of {str(normalized[key])[:80]!r}, which is not a positive number"
            )
    return normalized


def _scaling(chosen: Config, config: Config) -> Config | None:
    kind = chosen.get("rope_type", chosen.get("type", "default"))
    chosen.pop("type", None)
    if not isinstance(kind, str):
        raise ModelError("config.json has a rope_scaling whose type is not text")
    if kind == "default":
        return None
    if kind == "su" or (kind == "yarn" and "long_factor" in chosen):
        kind = "longrope"  # its two earlier names
    original = config.get("original_max_position_embeddings")
    if kind == "longrope" and original is not None:
        chosen.setdefault("original_max_position_embeddings", original)
    return {"rope_type": kind} | {key: value for key, value in chosen.items() if key != "rope_type"}


def _dict_or_none(config: Config, key: str) -> Config | None:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ModelError(f"config.json has a '{key}' that is a {type(value).__name__} where an object is expected")
    return value


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300
