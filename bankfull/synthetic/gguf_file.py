"""Writes a random model as a .gguf file, for comparisons with engines that read nothing else.

Matrices have the wanted type. As is customary, the table that gives the logits has a wider one (Q6_K if its blocks of
256 divide the width, otherwise Q8_0), and routers, biases and vectors are float32. With MXFP4, which is a type of
experts, all other matrices are Q8_0. RoPE scaling is left out: random weights have no trained context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.synthetic.ahead import ahead
from bankfull.synthetic.checkpoint import WrittenModel, new_folder
from bankfull.synthetic.random_weights import RandomWeights, Shape, random_model
from bankfull.synthetic.vocabulary import END, END_OF_TURN, MERGE, TEMPLATE, ByteVocabulary
from bankfull.weights.fetch import Report
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.mxfp4 import BLOCK, MXFP4, from_values
from bankfull.weights.gguf import names
from bankfull.weights.quantize import quantize
from bankfull.weights.writing import gguf_fields
from bankfull.weights.writing.gguf_header import Field, StoredTensor, planned_gguf
from bankfull.weights.writing.output import raw_bytes

ARCHITECTURES = {
    kind: architecture
    for kind, architecture in (gguf_fields.ARCHITECTURES | gguf_fields.WITH_EXPERTS).items()
    if kind != "smollm3"
}
"""GGUF architecture by model_type."""
TYPES = ("f32", "q4_0", "q4_1", "q8_0", "q5_0", "q5_1", MXFP4)
"""Types for matrices."""
WIDE, NARROW = "q6_k", "q8_0"
"""Types of the table that gives the logits."""
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def write_gguf(
    name: str,
    config: Mapping[str, Any],
    folder: Path,
    kind: str = "q4_0",
    seed: int = 0,
    report: Report = lambda what, done, total: None,
) -> WrittenModel:
    """`folder/<name>.<KIND>.gguf`; the folder appears when the file is whole."""
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
    if all(tensor.kind != kind for tensor in tensors):
        raise ConfigError(
            f"--gguf {kind} is a type of experts, which {name} has none of; use one of {', '.join(TYPES)}."
        )
    total = sum(tensor.nbytes for tensor in tensors)
    fields = gguf_fields.architecture_fields(f"{name}, random weights", config, kind) | _text_fields(config)
    planned = planned_gguf(f"{name}.{kind.upper()}.gguf", fields, tensors)
    written = 0
    with new_folder(folder, total) as partial, (partial / planned.name).open("xb") as out:
        out.write(planned.head)
        for tensor, place in zip(tensors, planned.places, strict=True):
            out.seek(place.offset)
            for part in ahead(_encoded(tensor, source)):
                written += out.write(part)
                report(f"Writing {planned.name}", written, total)
    return WrittenModel(folder / planned.name, sum(prod(tensor.shape) for tensor in tensors), total, True)


def stored_tensors(config: Mapping[str, Any], source: RandomWeights, kind: str) -> Iterator[StoredTensor]:
    """The tensors of the file in order; the experts of a layer are one."""
    head = "token_embd.weight" if config.get("tie_word_embeddings") else "output.weight"
    experts: dict[str, list[str]] = {}
    for name in source.names():
        experts.setdefault(EXPERT.sub(".experts.", name), []).append(name)
    for whole, parts in experts.items():
        gguf_name = names.gguf_name(whole, config["model_type"])
        if gguf_name is None:
            raise ConfigError(
                f"A .gguf file of architecture {config['model_type']!r} has no place for the tensor {whole}."
            )
        shape = source.shape(parts[0])
        shape = shape if parts == [whole] else (len(parts), *shape)
        yield StoredTensor(gguf_name, shape, _type_of(gguf_name, shape, kind, head), tuple(parts))


def _type_of(name: str, shape: Shape, kind: str, head: str) -> str:
    if len(shape) == 1 or kind == "f32" or name.endswith(("ffn_gate_inp.weight", ".bias")):
        return "f32"
    if name == head:
        return NARROW if shape[-1] % SCHEMES[WIDE].block else WIDE
    if kind == MXFP4 and len(shape) < 3:
        kind = NARROW
    if shape[-1] % (BLOCK if kind == MXFP4 else SCHEMES[kind].block):
        raise ConfigError(
            f"The tensor {name} is {shape[-1]} wide, which blocks of {kind} do not divide; use --gguf f32."
        )
    return kind


def _text_fields(config: Mapping[str, Any]) -> dict[str, Field]:
    vocabulary = ByteVocabulary(int(config["vocab_size"]))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.kinds,
        "tokenizer.ggml.merges": [" ".join(MERGE)],
        "tokenizer.ggml.bos_token_id": vocabulary.specials[END],
        "tokenizer.ggml.eos_token_id": vocabulary.specials[END_OF_TURN],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def _encoded(tensor: StoredTensor, source: RandomWeights) -> Iterator[Callable[[], memoryview]]:
    """Calls that give the stored rows, a part of a tensor each."""

    def encode(draw: Callable[[], Tensor]) -> memoryview:
        return raw_bytes(_stored(draw(), tensor.kind))

    return (partial(encode, draw) for name in tensor.parts for draw in source.draws(name))


def _stored(values: Tensor, kind: str) -> Tensor:
    if kind == MXFP4:
        return from_values(values)
    return values if kind == "f32" else quantize(values, kind).parts["blocks"]
