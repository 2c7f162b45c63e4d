"""Models of known shapes with random weights, as standard .gguf files.

For models whose weights are not available, and for sizes that no engine was tuned for: speed does not depend on the
values. Matrices are Q4_0; the embedding, which is also the head, has the wider type that is customary: Q6_K if its
blocks of 256 divide the width, otherwise Q8_0.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.install import CannotInstall

MATRICES = "q4_0"
END = "<|endoftext|>"
ELEMENTS_AT_ONCE = 1 << 24
"""Elements of a tensor generated at a time; bounds the memory for writing a file."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama architecture with a tied embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    theta: float
    context: int

    @property
    def table_type(self) -> str:
        return "q8_0" if self.hidden % 256 else "q6_k"

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Name, shape (slowest dimension first) and storage type, in file order."""
        yield "token_embd.weight", (self.vocab, self.hidden), self.table_type
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        for layer in range(self.layers):
            at = f"blk.{layer}"
            yield f"{at}.attn_norm.weight", (self.hidden,), "f32"
            yield f"{at}.attn_q.weight", (queries, self.hidden), MATRICES
            yield f"{at}.attn_k.weight", (keys, self.hidden), MATRICES
            yield f"{at}.attn_v.weight", (keys, self.hidden), MATRICES
            yield f"{at}.attn_output.weight", (self.hidden, queries), MATRICES
            yield f"{at}.ffn_norm.weight", (self.hidden,), "f32"
            yield f"{at}.ffn_gate.weight", (self.ffn, self.hidden), MATRICES
            yield f"{at}.ffn_up.weight", (self.ffn, self.hidden), MATRICES
            yield f"{at}.ffn_down.weight", (self.hidden, self.ffn), MATRICES
        yield "output_norm.weight", (self.hidden,), "f32"


SHAPES = {
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 64, 8192, 128256, 500000.0, 131072),
    "llama-3.2-3b": Shape(3072, 28, 24, 8, 128, 8192, 128256, 500000.0, 131072),
    "smollm2-360m": Shape(960, 32, 15, 5, 64, 2560, 49152, 100000.0, 8192),
    # Sizes of Qwen2.5-0.5B, without its biases.
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936, 1000000.0, 32768),
}


def shape_file(name: str, folder: Path) -> Path:
    """`folder/models/<name>.random.Q4_0.gguf`; written once."""
    target = folder / "models" / f"{name}.random.{MATRICES.upper()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        write(SHAPES[name], name, partial)
        partial.rename(target)
    return target


def write(shape: Shape, name: str, path: Path) -> None:
    """Reproducible for a shape and name; holds only part of a tensor in memory."""
    try:
        import gguf
    except ImportError:
        raise CannotInstall("writing files of random weights needs the package gguf: pip install gguf") from None
    import numpy

    from bankfull.weights.formats import SCHEMES

    writer = gguf.GGUFWriter(path, "llama")
    describe(writer, shape, name)
    stored = {kind: gguf.GGMLQuantizationType[kind.upper()] for kind in ("f32", MATRICES, shape.table_type)}
    for tensor, size, kind in shape.tensors():
        row = SCHEMES[kind].row_bytes(size[-1])
        as_bytes, count = (*size[:-1], row), prod(size[:-1]) * row
        if kind == "f32":
            writer.add_tensor_info(tensor, size, numpy.dtype(numpy.float32), count)
        else:
            writer.add_tensor_info(tensor, as_bytes, numpy.dtype(numpy.uint8), count, raw_dtype=stored[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    out = writer.fout[0]
    for tensor, size, kind in shape.tensors():
        writer.write_padding(out, out.tell())
        for part in _encoded(name, tensor, size, kind):
            out.write(part.tobytes())
    writer.write_padding(out, out.tell())
    writer.close()


def describe(writer: Any, shape: Shape, name: str) -> None:
    """Write all required metadata, with a vocabulary of all bytes and as many made-up words as fit."""
    mostly_q4_0, quantization_version = 2, 2
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(mostly_q4_0)
    writer.add_quantization_version(quantization_version)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, kinds = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{tokens[ord('t')]} {tokens[ord('h')]}"])
    writer.add_bos_token_id(shape.vocab - 1)
    writer.add_eos_token_id(shape.vocab - 1)
    writer.add_add_bos_token(False)


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """A byte-level vocabulary: token n < 256 is byte n, then the only merge, then words; the last ends a text."""
    normal, control = 1, 3
    letters = _byte_letters()
    words = [f"{letters[ord(' ')]}w{number}" for number in range(size - 256 - 2)]
    return [*letters, "th", *words, END], [normal] * (size - 1) + [control]


def _byte_letters() -> list[str]:
    """Each byte in the encoding of byte-level vocabularies: itself if printable, otherwise a character from 256 up."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def _encoded(name: str, tensor: str, size: tuple[int, ...], kind: str) -> Iterator[Any]:
    """The stored rows of a tensor, a block at a time: norms are ones, and matrices keep the activations' magnitude
    through the layers."""
    import torch

    from bankfull.weights.quantize import quantize

    if kind == "f32":
        yield torch.ones(size).numpy()
        return
    rows, columns = size
    random = torch.Generator().manual_seed(zlib.crc32(f"{name}/{tensor}".encode()))
    step = max(1, ELEMENTS_AT_ONCE // columns)
    for at in range(0, rows, step):
        values = torch.randn(min(step, rows - at), columns, generator=random) * columns**-0.5
        yield quantize(values, kind).parts["blocks"].numpy()
