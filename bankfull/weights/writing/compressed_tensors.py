"""Writes a quantized model as compressed-tensors in safetensors, which vLLM and transformers load.

| scheme | format | tensors of a matrix |
|---|---|---|
| int8, int4, int3, int2 in groups | pack-quantized | weight_packed, weight_scale, weight_shape |
| uint4, uint3, uint2 in groups | pack-quantized | the same and weight_zero_point, packed along the rows |
| int8 by row | int-quantized | weight, weight_scale; products round activations per token |
| int8 by row, float activations | pack-quantized | as int8 in groups |
| fp8 by row | float-quantized | weight, weight_scale; likewise, or with a static scale |
| 2:4 sparse floats | sparse-24-bitmask | compressed, bitmask, shape |
| int8 by row beside outlier columns | none: a method of our own | as `weights/published/outliers.py` says |

Static activations have one scale per matrix, a tensor `input_scale` beside it. All other tensors keep their dtype.
Scales of groups are float16, those of rows float32: as they are in memory. Stacked experts are written one by one
(experts.gate_proj becomes experts.0.gate_proj, ...). GPT-2's quantized matrices are written by row, as in all other
models.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.text.load import load_tokenizer
from bankfull.weights.conv1d import is_stored_transposed
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.hf_config import read_json
from bankfull.weights.outliers import KEPT
from bankfull.weights.published import outliers
from bankfull.weights.published.compressed_tensors import METHOD
from bankfull.weights.published.opening import KEYS
from bankfull.weights.published.outliers import outlier_names
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.source import ModelFiles
from bankfull.weights.writing.masked import masked, masked_parts, sparsity_config
from bankfull.weights.writing.output import OutputFolder, PlannedFile
from bankfull.weights.writing.packing import pack, packed_codes, words
from bankfull.weights.writing.shards import StoredPart, index_of, planned_shards
from bankfull.weights.writing.target import TargetTensor, module_of

GROUPED = re.compile(r"(?P<zeros>u?)int(?P<bits>[2348])_g(?P<group>\d+)")
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
    "generation_config.json",
    "LICENSE",
)
"""Files of a model directory beside its weights and config.json."""
EXPERTS = ".experts."
Rounded = Literal["", "int8", "fp8", "fp8-static"]
"""How activations are rounded in products with the matrices: not at all, per token, or with a scale of the file."""


def experts_of(target: TargetTensor) -> list[TargetTensor]:
    """A stacked matrix as those of single experts."""
    count, *shape = target.shape
    stem, _, which = target.name.rpartition(EXPERTS)
    return [TargetTensor(f"{stem}{EXPERTS}{expert}.{which}", tuple(shape), target.scheme) for expert in range(count)]


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The files of a model directory: their layout, and what each tensor becomes in them."""

    files: ModelFiles
    targets: Sequence[TargetTensor]
    activations: Rounded = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    """How the model was made, for config.json."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json that are no longer those of the model's own file."""

    def refuse(self) -> None:
        """Refuses what the format has no form for."""
        for target in self.targets:
            if not target.scheme.is_dense and len(target.shape) != 2 and EXPERTS not in target.name:
                raise ConfigError(
                    f"{self.files.path.name} has stacked matrices of experts ({target.name}) that have no names one by "
                    "one, so that compressed-tensors has no form for them; choose another model."
                )
        for target in self.targets:
            known = not target.scheme.is_rounded or target.scheme.name in (INT8_ROW, FP8)
            if not known and GROUPED.fullmatch(target.scheme.name) is None:
                raise ConfigError(
                    f"compressed-tensors has no form for {target.scheme.name} ({target.name}); use --format gguf."
                )

    def planned(self) -> list[PlannedFile]:
        return planned_shards([part for target in self.targets for part in self.parts(target)])

    def parts(self, target: TargetTensor) -> list[StoredPart]:
        """The tensors of the file that hold a tensor of the model."""
        if target.scheme.is_dense:
            shape = target.shape[::-1] if self._is_transposed(target) else target.shape
            return [StoredPart(target.name, DTYPES[target.scheme.name], shape)]
        if len(target.shape) == 3:
            return [part for one in experts_of(target) for part in self.parts(one)]
        rows, columns = target.shape
        stem = target.name
        if target.scheme.is_sparse:
            return masked_parts(target)
        if self._is_plain(target):
            return [
                StoredPart(stem, target.scheme.parts[0].dtype, target.shape),
                StoredPart(f"{stem}_scale", torch.float32, (rows, 1)),
                *_outlier_parts(target),
            ]
        scheme = target.scheme
        bits, groups = _bits(scheme), 1 if scheme.is_by_row else columns // scheme.block
        zeros = (
            [StoredPart(f"{stem}_zero_point", torch.int32, (words(rows, bits), groups))] if has_zeros(scheme) else []
        )
        return [
            StoredPart(f"{stem}_packed", torch.int32, (rows, words(columns, bits))),
            StoredPart(f"{stem}_scale", torch.float32 if scheme.is_by_row else torch.float16, (rows, groups)),
            StoredPart(f"{stem}_shape", torch.int64, (2,)),
            *zeros,
        ]

    def scheme(self, target: TargetTensor) -> Scheme:
        return target.scheme

    def stored(self, target: TargetTensor) -> list[str]:
        return [part.name for part in self.parts(target)]

    def encoded(self, target: TargetTensor, tensor: QTensor) -> dict[str, Tensor]:
        """The tensors of the file, by name."""
        stem = target.name
        if target.scheme.is_dense:
            values = tensor.dequantize(DTYPES[target.scheme.name])
            return {stem: values.T.contiguous() if self._is_transposed(target) else values}
        if len(target.shape) == 3:
            tensors: dict[str, Tensor] = {}
            for expert, one in enumerate(experts_of(target)):
                parts = {name: part[expert] for name, part in tensor.parts.items()}
                tensors |= self.encoded(one, QTensor(tensor.scheme, parts, one.shape))
            return tensors
        if target.scheme.is_sparse:
            return masked(target, tensor)
        scales = tensor.parts["scales"]
        if self._is_plain(target):
            beside: dict[str, Tensor] = {}
            if target.outliers is not None:
                assert tensor.outliers is not None and len(tensor.outliers[0]) == target.outliers, stem
                index, kept = tensor.outliers
                beside = dict(zip(outlier_names(stem), (index.to(torch.int32), kept), strict=True))
            return {stem: tensor.parts["codes"], f"{stem}_scale": scales, **beside}
        bits = _bits(target.scheme)
        packed = {
            f"{stem}_packed": packed_codes(tensor, bits),
            f"{stem}_scale": scales,
            f"{stem}_shape": torch.tensor(target.shape, dtype=torch.int64),
        }
        if has_zeros(target.scheme):
            zeros = tensor.parts["zeros"]
            assert bool((zeros < 1 << bits).all()), f"{stem}: a zero point needs {bits} bits"
            packed[f"{stem}_zero_point"] = pack(zeros.t().contiguous(), bits).t().contiguous()
        return packed

    def _is_transposed(self, target: TargetTensor) -> bool:
        """Whether a dense matrix is stored as (inputs, outputs), as in the model's own files."""
        return is_stored_transposed(self.files.config, target.name)

    def _is_plain(self, target: TargetTensor) -> bool:
        """Whether the codes are stored one per byte: fp8, and int8 whose products round activations. Engines read int8
        weights beside float activations only in packed form."""
        return target.scheme.name == FP8 or (target.scheme.name == INT8_ROW and self.activations == "int8")

    def finish(self, folder: OutputFolder, planned: Sequence[PlannedFile]) -> None:
        """Everything beside the weights."""
        if (index := index_of(planned)) is not None:
            (folder.path / index[0]).write_text(index[1])
        if self.files.kind == "gguf":
            write_text_files(self.files, folder.path)
        else:
            copy_text_files(self.files.path, folder.path)
        (folder.path / "config.json").write_text(json.dumps(self.config(), indent=2) + "\n")

    def config(self) -> dict[str, Any]:
        if self.files.kind == "gguf":
            config = {**_without_offset(self.files.config), "dtype": dense_dtype(self.targets)}
            config["architectures"] = [ARCHITECTURES[config["model_type"]]]
        else:
            config = {k: v for k, v in read_json(self.files.path / "config.json").items() if k not in KEYS}
        about = {"made_with": dict(self.about)} if self.about else {}
        stored: dict[str, Any] = {}
        if any(target.scheme.is_sparse for target in self.targets):
            stored = {"quantization_config": sparsity_config(self.targets, self.kept())}
        elif any(target.scheme.is_rounded for target in self.targets):
            stored = {"quantization_config": self.quantization_config()}
        return config | dict(self.changes) | about | stored

    def kept(self) -> list[str]:
        """Modules of matrices that are stored as they are."""
        kept = [t.name for t in self.targets if t.scheme.is_dense and len(t.shape) == 2 and t.name.endswith(".weight")]
        ignored = [module_of(name) for name in kept if "embed_tokens" not in name]
        return list(dict.fromkeys([*ignored, "lm_head"]))

    def quantization_config(self) -> dict[str, Any]:
        if any(target.outliers is not None for target in self.targets):
            return dict(outliers.CONFIG)
        by_scheme: dict[str, list[str]] = {}
        for target in self.targets:
            if not target.scheme.is_dense:
                each = experts_of(target) if len(target.shape) == 3 else [target]
                by_scheme.setdefault(target.scheme.name, []).extend(module_of(one.name) for one in each)
        # One scheme covers all linear layers but the ignored ones. Several name their layers.
        several = len(by_scheme) > 1
        groups = {
            f"group_{number}": self._group(name, modules if several else ["Linear"])
            for number, (name, modules) in enumerate(by_scheme.items())
        }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": METHOD,
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": self.kept(),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def _group(self, scheme: str, targets: list[str]) -> dict[str, Any]:
        match = GROUPED.fullmatch(scheme)
        if match is not None:
            group, even = int(match["group"]), not match["zeros"]
            weights = _args(int(match["bits"]), "int", "group", group_size=group, symmetric=even)
            form = "pack-quantized"
        else:
            weights = _args(8, "float" if scheme == FP8 else "int", "channel")
            form = "float-quantized" if scheme == FP8 else "int-quantized" if self.activations else "pack-quantized"
        inputs = None if match is not None or not self.activations else _activations(self.activations)
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": form,
        }


def outlier_bytes(target: TargetTensor) -> int:
    """Bytes of the columns that are stored beside a tensor."""
    return sum(part.nbytes for part in _outlier_parts(target))


def _outlier_parts(target: TargetTensor) -> list[StoredPart]:
    if target.outliers is None:
        return []
    columns, values = outlier_names(target.name)
    return [
        StoredPart(columns, torch.int32, (target.outliers,)),
        StoredPart(values, KEPT, (target.shape[0], target.outliers)),
    ]


def _bits(scheme: Scheme) -> int:
    match = GROUPED.fullmatch(scheme.name)
    return 8 if match is None else int(match["bits"])


def has_zeros(scheme: Scheme) -> bool:
    return any(part.name == "zeros" for part in scheme.parts)


def _args(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    given = {"symmetric": True, "group_size": None, "dynamic": False, "actorder": None, "block_structure": None}
    return {"num_bits": bits, "type": kind, "strategy": strategy, **given, **more}


def _activations(kind: str) -> dict[str, Any]:
    number = "int" if kind == "int8" else "float"
    if kind == "fp8-static":
        return _args(8, number, "tensor")
    return _args(8, number, "token", dynamic=True)


def dense_dtype(targets: Sequence[TargetTensor]) -> str:
    """The dtype of the unquantized matrices, as config.json names it."""
    scheme = next((t.scheme.name for t in targets if t.scheme.is_dense and len(t.shape) == 2), "f32")
    return str(DTYPES[scheme]).removeprefix("torch.")


ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""Classes of transformers by model_type, for configurations that a GGUF file gave, which name none."""


def _without_offset(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type")
    scaling = config.get("rope_scaling") or {}
    if kind not in ARCHITECTURES or scaling.get("rope_type") == "factors":
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"A GGUF file of the architecture {str(kind)[:40]!r} cannot become a model directory; give a model "
            f"directory, use --format gguf, or a file of one of {known}."
        )
    return dict(config)


def copy_text_files(source: Path, folder: Path) -> None:
    for name in COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
        elif (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def write_text_files(files: ModelFiles, folder: Path) -> None:
    """Tokenizer, chat template and end tokens of a GGUF file, in the form of a model directory."""
    tokenizer, _ = load_tokenizer(files)
    tokenizer.backend.save(str(folder / "tokenizer.json"), pretty=False)
    named = {key: files.config.get(f"{key}_id") for key in ("bos_token", "eos_token", "pad_token")}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokenizer.backend.id_to_token(number) for key, number in named.items() if number is not None},
        "add_bos_token": tokenizer.add_bos,
        "clean_up_tokenization_spaces": False,
    }
    template = files.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    if files.generation:
        (folder / "generation_config.json").write_text(json.dumps(files.generation, indent=1))
