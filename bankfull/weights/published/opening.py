"""Which published format a configuration names, and the source that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bankfull.errors import ModelError
from bankfull.weights.published import awq, bitsandbytes, compressed_tensors, fp8, gptq, hqq, outliers
from bankfull.weights.published.matrix import Published, StoredTensors

Reader = Callable[[StoredTensors, Mapping[str, Any]], Published]
READERS: dict[str, Reader] = {
    awq.METHOD: awq.read_awq,
    bitsandbytes.METHOD: bitsandbytes.read_bitsandbytes,
    compressed_tensors.METHOD: compressed_tensors.read_compressed,
    gptq.METHOD: gptq.read_gptq,
    hqq.METHOD: hqq.read_hqq,
    outliers.METHOD: outliers.read_outliers,
    **dict.fromkeys(fp8.METHODS, fp8.read_fp8),
}
# Keys of config.json that mark quantized weights, and the method they imply if it is not named.
KEYS = {"quantization_config": "unnamed", "compression_config": compressed_tensors.METHOD, "quantization": "mlx"}


def quantization_of(path: Path, config: Mapping[str, Any], *known: str) -> tuple[Reader, Mapping[str, Any]] | None:
    """The reader that a configuration needs, and what it says about quantization. None for unquantized checkpoints, and
    for the methods `known` to the caller."""
    nested = config.get("text_config")
    for level in (config, nested if isinstance(nested, dict) else {}):
        for key, method in KEYS.items():
            if not (declared := level.get(key)):
                continue
            if isinstance(declared, dict):
                method = _method(declared, method)
            if method in known:
                continue
            if method not in READERS or not isinstance(declared, dict):
                raise ModelError(
                    f"{path} is quantized with '{method[:80]}', which is not read: use the unquantized checkpoint, a "
                    f"GGUF file of it, or one quantized with {', '.join(READERS)}"
                )
            return READERS[method], declared
    return None


def _method(found: Mapping[str, Any], default: str) -> str:
    """Old files of bitsandbytes and AWQ do not name their method, and ours under a name of its own."""
    if outliers.KEY in found:
        return f"bankfull-{found[outliers.KEY]}"
    if any(name.startswith("load_in_") for name in found):
        default = bitsandbytes.METHOD
    elif "w_bit" in found:
        default = awq.METHOD
    return str(found.get("quant_method", default))
