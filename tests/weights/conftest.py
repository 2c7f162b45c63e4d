"""Files as the usual converter writes them, made from tiny random models."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

torch.set_num_threads(1)

Tensors = dict[str, torch.Tensor]


def gguf_bytes(
    values: Iterable[tuple[str, int, bytes]] = (),
    tensors: Iterable[tuple[str, tuple[int, ...], int, int]] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    tensor_count: int | None = None,
    value_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A GGUF file assembled by hand, so that it can contain what no writer would write."""
    values, tensors = list(values), list(tensors)
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(values) if value_count is None else value_count,
    )
    parts = [b"GGUF", struct.pack("<IQQ", version, *counts)]
    for key, kind, payload in values:
        parts += (text(key), struct.pack("<I", kind), payload)
    for name, shape, kind, offset in tensors:
        parts += (text(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset))
    out = b"".join(parts)
    return out + b"\0" * (-len(out) % alignment) + data


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def interleave(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's row order of q and k for models whose RoPE rotates adjacent pairs."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Tensors,
    layers: int,
    metadata: Callable[[gguf.GGUFWriter], None],
    *,
    change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor,
    extra: Tensors | None = None,
    stored: Callable[[str, torch.Tensor], str] = lambda name, tensor: "F32",
    **options: Any,
) -> Path:
    """Write Hugging Face tensors through the gguf package's own table of names."""
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, layers)
    writer = gguf.GGUFWriter(path, architecture, **options)
    writer.add_block_count(layers)
    metadata(writer)
    for name, tensor in tensors.items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        array = change(name, tensor.detach().float()).contiguous().numpy()
        kind_of = gguf.GGMLQuantizationType[stored(name, tensor)]
        writer.add_tensor(target, gguf.quants.quantize(array, kind_of), raw_dtype=kind_of)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_llama_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.0, 1.0, 2.5])


def tiny_llama_tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (8, 32),
        "model.norm.weight": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        tiny_llama_tensors(),
        1,
        tiny_llama_metadata,
        stored=lambda name, tensor: "Q8_0" if tensor.dim() == 2 else "F32",
    )


@pytest.fixture(scope="session")
def make() -> Any:
    """The functions of this file, for tests to call."""

    class Make:
        gguf_bytes = staticmethod(gguf_bytes)
        text = staticmethod(text)
        interleave = staticmethod(interleave)
        write_gguf = staticmethod(write_gguf)
        tiny_llama_metadata = staticmethod(tiny_llama_metadata)
        tiny_llama_tensors = staticmethod(tiny_llama_tensors)

    return Make
