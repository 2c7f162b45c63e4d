"""Writes a random model as a .gguf file, for comparisons with engines that read nothing else.

Matrices have the wanted type. As is customary, the table that gives the logits has a wider one (Q6_K if its blocks of
256 divide the width, otherwise Q8_0), and routers and vectors are float32. RoPE scaling is left out: random weights
have no trained context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.synthetic.checkpoint import WrittenModel, new_folder, raw_bytes
from bankfull.synthetic.random_weights import RandomWeights, Shape, random_model
from bankfull.synthetic.vocabulary import END, END_OF_TURN, MERGE, TEMPLATE, ByteVocabulary
from bankfull.weights.fetch import Report
from bankfull.weights.formats import SCHEMES
from bankfull.weights.quantize import quantize

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
"""GGUF architecture by model_type."""
TYPES = {"f32": 0, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9}
"""Types for matrices, with the number of the file type."""
QUANTIZATION_VERSION = 2
WIDE, NARROW = "q6_k", "q8_0"
"""Types of the table that gives the logits."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    name: str
    """Name in the file."""
    shape: Shape
    """Slowest dimension first."""
    kind: str
    parts: tuple[str, ...]
    """Names of the tensors that are stacked; one, except for experts."""

    @property
    def row_bytes(self) -> int:
        return SCHEMES[self.kind].row_bytes(self.shape[-1])

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


def write_gguf(
    name: str,
    config: Mapping[str, Any],
    folder: Path,
    kind: str = "q4_0",
    seed: int = 0,
    report: Report = lambda what, done, total: None,
) -> WrittenModel:
    """`folder/<name>.<KIND>.gguf`; the folder appears when the file is whole."""
    gguf = _package()
    kind, model_type = kind.lower(), config.get("model_type")
    if kind not in TYPES:
        raise ConfigError(f"--gguf {kind[:40]!r} is not a type of matrices; use one of {', '.join(TYPES)}.")
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"A .gguf file of the architecture {str(model_type)[:40]!r} cannot be written; leave --gguf out, or use "
            f"one of {', '.join(ARCHITECTURES)}."
        )
    source = random_model(name, config, torch.float32, seed=seed).source
    assert isinstance(source, RandomWeights)
    tensors = list(stored_tensors(config, source, kind))
    total = sum(tensor.nbytes for tensor in tensors)
    file = f"{name}.{kind.upper()}.gguf"
    with new_folder(folder, total) as partial:
        writer = gguf.GGUFWriter(partial / file, ARCHITECTURES[model_type])
        describe(writer, name, config, TYPES[kind])
        _announce(writer, tensors)
        assert writer.fout is not None
        out, written = writer.fout[0], 0
        for tensor in tensors:
            writer.write_padding(out, out.tell())
            for part in _encoded(tensor, source):
                written += out.write(part)
                report(f"Writing {file}", written, total)
        writer.write_padding(out, out.tell())
        writer.close()
    return WrittenModel(folder / file, sum(prod(tensor.shape) for tensor in tensors), total, True)


def stored_tensors(config: Mapping[str, Any], source: RandomWeights, kind: str) -> Iterator[StoredTensor]:
    """The tensors of the file in order; the experts of a layer are one."""
    gguf = _package()
    architecture = ARCHITECTURES[config["model_type"]]
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(known, int(config["num_hidden_layers"]))
    head = "token_embd.weight" if config.get("tie_word_embeddings") else "output.weight"
    experts: dict[str, list[str]] = {}
    for name in source.names():
        experts.setdefault(EXPERT.sub(".experts.", name), []).append(name)
    for whole, parts in experts.items():
        found = names.get_name(whole, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ConfigError(f"A .gguf file of architecture {architecture!r} has no place for the tensor {whole}.")
        shape = source.shape(parts[0])
        shape = shape if parts == [whole] else (len(parts), *shape)
        yield StoredTensor(found, shape, _type_of(found, shape, kind, head), tuple(parts))


def _type_of(name: str, shape: Shape, kind: str, head: str) -> str:
    if len(shape) == 1 or kind == "f32" or name.endswith("ffn_gate_inp.weight"):
        return "f32"
    if name == head:
        return NARROW if shape[-1] % SCHEMES[WIDE].block else WIDE
    if shape[-1] % SCHEMES[kind].block:
        raise ConfigError(
            f"The tensor {name} is {shape[-1]} wide, which blocks of {kind} do not divide; use --gguf f32."
        )
    return kind


def _announce(writer: Any, tensors: list[StoredTensor]) -> None:
    """Write everything before the tensors' data."""
    import numpy

    gguf = _package()
    for tensor in tensors:
        if tensor.kind == "f32":
            writer.add_tensor_info(tensor.name, tensor.shape, numpy.dtype(numpy.float32), tensor.nbytes)
        else:
            stored = gguf.GGMLQuantizationType[tensor.kind.upper()]
            rows = (*tensor.shape[:-1], tensor.row_bytes)
            writer.add_tensor_info(tensor.name, rows, numpy.dtype(numpy.uint8), tensor.nbytes, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def describe(writer: Any, name: str, config: Mapping[str, Any], file_type: int) -> None:
    """Write all metadata that the architectures need."""
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(float(config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps") or 1e-5))
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if inner := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(inner)
    vocabulary = ByteVocabulary(int(config["vocab_size"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(vocabulary.specials[END])
    writer.add_eos_token_id(vocabulary.specials[END_OF_TURN])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _encoded(tensor: StoredTensor, source: RandomWeights) -> Iterator[memoryview]:
    """The stored rows, a part of a tensor at a time."""
    for name in tensor.parts:
        for values in source.parts(name):
            yield raw_bytes(_stored(values, tensor.kind))


def _stored(values: Tensor, kind: str) -> Tensor:
    return values if kind == "f32" else quantize(values, kind).parts["blocks"]


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("Writing .gguf files needs the package gguf: pip install gguf") from None
    return gguf
