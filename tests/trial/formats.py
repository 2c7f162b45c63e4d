"""The models in the formats of published checkpoints: a GGUF file, what `bankfull quantize` writes with each method,
and the layouts of other tools. The plain loop runs the values that a file means: GGUF is read by the format's own
library, the others by what their descriptions say, so that no reader of the engine has a part in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from bankfull.errors import BankfullError
from bankfull.quantize.save import save_quantized
from bankfull.weights.source import open_model
from tests.quantize.models import recipe_of
from tests.trial.models import WIDE, TrialModel, by_bodies, model_of
from tests.trial.outcome import Refused
from tests.weights.published import writers
from tests.weights.published.test_models import CONFIGS, GROUP, quantized

Tensors = Mapping[str, Tensor]
GGUF = {
    "gguf q8_0": {"block": "q8_0"},
    "gguf q4_1": {"block": "q4_1"},
    "gguf q4_k": {"block": "q4_k", "tables": True},
}
MADE: dict[str, dict[str, Any]] = {
    "made awq": {"method": "awq", "bits": "4", "group": "32", "symmetric": False},
    "made gptq": {"method": "gptq", "bits": "4", "group": "32"},
    "made smoothquant": {"method": "smoothquant"},
    "made fp8": {"method": "fp8"},
}
"""By `bankfull quantize`, as files of compressed-tensors."""
PUBLISHED = ("awq", "gptq", "gptq-3", "gptq-order", "fp8", "w8a8")
"""As AutoAWQ, AutoGPTQ and others write them: `CONFIGS` of the tests of published formats."""
NAMES = (*GGUF, *MADE, *PUBLISHED)
BY_ROW = ("made smoothquant", "w8a8")
"""Formats whose matrices meet activations that are rounded per token."""
IN_GGUF = ("tiny:llama", "blocks:llama-blocks", f"blocks:{WIDE}")
"""Models that have a GGUF architecture, and matrices whose columns 32 divides."""
IN_GROUPS = ("gguf", "awq", "gptq")
"""Formats, by a part of their names, that need matrices whose columns 32 divides."""
TEXTS, LENGTH = 4, 24
"""Calibration texts of random tokens."""


def fits(name: str, form: str) -> bool:
    """Whether the model has matrices for the format. What else is refused, the writer says."""
    if form in GGUF:
        return name in IN_GGUF
    return not any(part in form for part in IN_GROUPS) or name.startswith(("tiny:", "blocks:"))


@cache
def published(name: str, form: str) -> TrialModel:
    """The model of that name in a format, and the logits of the values in its files."""
    own = model_of(name)
    home = own.folder.parent / f"{own.folder.name}-{form.replace(' ', '-')}"
    try:
        path, values = _published(own, form, home) if form in PUBLISHED else _made(own, form, home)
    except BankfullError as error:
        shutil.rmtree(home, ignore_errors=True)
        raise Refused(str(error)) from error
    return replace(own, folder=path, logits=by_bodies(_dense(own, values, home)))


def _dense(own: TrialModel, values: Tensors, home: Path) -> Path:
    """An unquantized model with these values."""
    folder = home / "dense"
    folder.mkdir()
    save_file({n: t.float().contiguous() for n, t in values.items()}, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(own.folder / "config.json", folder)
    return folder


def _made(own: TrialModel, form: str, home: Path) -> tuple[Path, Tensors]:
    recipe = recipe_of("rtn", form="gguf", **GGUF[form]) if form in GGUF else recipe_of(**MADE[form])  # type: ignore[arg-type]
    drawn = torch.Generator().manual_seed(7)
    texts = torch.randint(3, own.vocab, (TEXTS, LENGTH), generator=drawn).tolist()
    home.mkdir()
    path = save_quantized(open_model(own.folder), recipe, home / "made", sequences=texts).path
    if form in GGUF:
        return path, _read_gguf(path, own.folder)
    return path, _read_compressed(path)


def _read_gguf(path: Path, own: Path) -> dict[str, Tensor]:
    reader, config = gguf.GGUFReader(path), json.loads((own / "config.json").read_text())
    architecture = str(reader.fields["general.architecture"].contents())
    kind = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    values = {}
    for name in load_file(own / "model.safetensors"):
        found = stored[names.get_name(name, (".weight", ".bias")) or name]
        values[name] = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values[name] = _in_halves(values[name], heads[part])
    return values


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """The files of this architecture rotate neighbours; a directory rotates the halves of a head."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _read_compressed(path: Path) -> dict[str, Tensor]:
    stored = {name: part for file in path.glob("*.safetensors") for name, part in load_file(file).items()}
    config = json.loads((path / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    (bits,) = {group["weights"]["num_bits"] for group in groups.values()}
    values = {}
    for name, part in stored.items():
        module, _, kind = name.rpartition(".")
        scale = stored.get(f"{module}.weight_scale")
        scale = None if scale is None else scale.float()
        if kind == "weight_packed":
            assert scale is not None
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            codes = _unpacked(part, bits)[:, :columns]
            zeros = torch.full(scale.shape, 1 << (bits - 1))
            if (packed := stored.get(f"{module}.weight_zero_point")) is not None:
                zeros = _unpacked(packed.T.contiguous(), bits)[:, :rows].T
            wide = columns // scale.shape[1]
            values[f"{module}.weight"] = (codes - zeros.repeat_interleave(wide, 1)) * scale.repeat_interleave(wide, 1)
        elif kind == "weight" and scale is not None:
            values[name] = part.float() * scale
        elif not kind.startswith(("weight_", "input_")):
            values[name] = part
    if config["model_type"] == "gpt2":  # its own files have the matrices by column
        by_row = [name for name in values if f"{name}_scale" in stored]
        values |= {name: values[name].T for name in by_row}
    return values


# Experts whose columns are in different orders have no common one: docs/quantization.md says bfloat16.
def _published(own: TrialModel, form: str, home: Path) -> tuple[Path, Tensors]:
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    in_groups = any(part in form for part in IN_GROUPS)
    for name, tensor in load_file(own.folder / "model.safetensors").items():
        inner = tensor.dim() == 2 and "_proj.weight" in name and ".c_proj." not in name  # GPT-2's are by column
        if inner and not (in_groups and (tensor.shape[0] % GROUP or tensor.shape[1] % GROUP)):
            parts, dense = quantized(form, name.removesuffix(".weight"), tensor)
            stored |= parts
            values[name] = dense.to(torch.bfloat16) if form == "gptq-order" and ".experts." in name else dense
        else:
            stored[name] = values[name] = tensor
    if stored.keys() == values.keys():
        raise Refused(f"The trial finds no matrices of {own.name} that the format {form} could hold.")
    config = json.loads((own.folder / "config.json").read_text())
    folder = writers.write(home / "made", stored, CONFIGS[form], config)
    for text in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (own.folder / text).exists():
            shutil.copy(own.folder / text, folder)
    return folder, values


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes of 32-bit words, the lowest bits first."""
    every: NDArray[np.uint8] = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    codes = every[:, : every.shape[1] // bits * bits].reshape(len(every), -1, bits) @ (1 << np.arange(bits))
    return torch.from_numpy(codes)
