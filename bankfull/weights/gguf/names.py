"""GGUF tensors under their Hugging Face names, with the converter's layout changes undone.

Only names and row order change, never values, so quantized tensors stay quantized.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

import torch

from bankfull.errors import ModelError
from bankfull.weights.gguf import classic, experts, latent, linear, state_space
from bankfull.weights.gguf.file import Container, TensorInfo
from bankfull.weights.qtensor import QTensor, Scheme

_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z0-9_]+)(?:\.(weight|bias))?")

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OUTER_OF: dict[str, dict[str, str]] = (
    {
        "mamba": {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    }
    | classic.OUTER
    | state_space.OUTER
)
"""Names outside of the layers, of architectures that differ from `_OUTER`."""
_PREFIX = {"mamba": "backbone.layers"} | classic.PREFIX | state_space.PREFIX
"""Prefix of the layers, of architectures where it is not model.layers."""

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = _ATTENTION | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = _ATTENTION | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_MAMBA = {
    "attn_norm": "norm",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    # The file holds -exp(A_log), so it is named A.
    "ssm_a": "mixer.A",
    "ssm_d": "mixer.D",
    "ssm_out": "mixer.out_proj",
}
_LAYERS: dict[str, dict[str, str]] = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "phi3": _PHI3,
    "mamba": _MAMBA,
} | classic.LAYERS
_EXPERTS = experts.LAYERS | latent.LAYERS | linear.LAYERS
_LAYERS |= {kind: _ATTENTION | names for kind, names in _EXPERTS.items()}
_LAYERS |= state_space.LAYERS
# Their RoPE rotates adjacent pairs, so the converter interleaved the two halves of each head.
_INTERLEAVED = ("llama", "mistral", "mixtral", "smollm3", *classic.INTERLEAVED, *state_space.INTERLEAVED)
# Already in the config: `rope_scaling` holds these values.
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

Transform = Callable[[QTensor], QTensor]


def hf_name(name: str, model_type: str) -> str:
    """The Hugging Face name; a tensor unknown to the architecture keeps its name and stays unread."""
    stem, _, suffix = name.rpartition(".")
    outer = _OUTER_OF.get(model_type, _OUTER)
    if stem in outer and suffix in ("weight", "bias"):
        return f"{outer[stem]}.{suffix}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, table = f"{_PREFIX.get(model_type, 'model.layers')}.{match[1]}", _LAYERS.get(model_type, _ATTENTION)
    if (whole := table.get(f"{match[2]}.{match[3] or ''}")) is not None:
        return f"{layer}.{whole}"
    inner = table.get(match[2])
    return name if inner is None else f"{layer}.{inner}" + (f".{match[3]}" if match[3] else "")


def gguf_name(name: str, model_type: str) -> str | None:
    """The inverse of `hf_name`; None if files of the architecture have no such tensor."""
    stem, _, suffix = name.rpartition(".")
    outer = {inner: in_file for in_file, inner in _OUTER_OF.get(model_type, _OUTER).items()}
    if stem in outer:
        return f"{outer[stem]}.{suffix}"
    prefix = f"{_PREFIX.get(model_type, 'model.layers')}."
    table = {inner: in_file for in_file, inner in _LAYERS.get(model_type, _ATTENTION).items()}
    number, _, whole = name.removeprefix(prefix).partition(".")
    if name.startswith(prefix) and "." in table.get(whole, ""):  # a name that the file spells with another ending
        return f"blk.{number}.{table[whole]}"
    number, _, inner = stem.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or inner not in table:
        return None
    return f"blk.{number}.{table[inner]}.{suffix}"


def interleaved_rows(name: str, config: Mapping[str, Any]) -> torch.Tensor | None:
    """The order in which a file stores the rows of a query or key projection; None: as they are."""
    if config["model_type"] not in _INTERLEAVED:
        return None
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    if name.endswith((".k_proj.weight", ".k_proj.bias")):
        heads = int(config.get("num_key_value_heads") or heads)
    elif not name.endswith((".q_proj.weight", ".q_proj.bias")):
        return None
    return head_halves(heads * size, heads).argsort()


@lru_cache(maxsize=8)  # all layers use the same order
def head_halves(rows: int, heads: int) -> torch.Tensor:
    """Row order that restores the two halves of each head from interleaved pairs."""
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()


class GGUFSource:
    """The tensors of a GGUF file under Hugging Face names."""

    def __init__(self, container: Container, config: dict[str, Any]) -> None:
        self._name = container.path.name
        self._tensors: dict[str, TensorInfo] = {}
        self._transforms: dict[str, Transform] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._read: set[str] = set()
        model_type: str = config["model_type"]
        for original, info in container.tensors.items():
            if original in _IN_CONFIG:
                continue
            name = hf_name(original, model_type)
            if name in self._tensors:
                raise ModelError(f"{self._name} has two tensors for '{name}': the file is damaged")
            self._tensors[name] = info
            self._shapes[name] = info.shape
            if model_type in _INTERLEAVED:
                self._undo_interleaving(name, info, config)
            if name.endswith(".shared_expert_gate.weight") and len(info.shape) == 1:
                self._shapes[name] = (1, *info.shape)
                self._transforms[name] = lambda tensor: tensor.reshape_leading(1)
            convolved = model_type in (*state_space.CONVOLVED, *linear.LAYERS)
            if len(info.shape) == 2 and convolved and name.endswith(".conv1d.weight"):
                self._restore_conv(name, info)
            if info.scheme.is_dense and model_type in state_space.WITH_HEADS:
                self._flatten(name, info)

    def names(self) -> list[str]:
        return list(self._tensors)

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        self._demand(name)
        return self._shapes[name]

    def scheme(self, name: str) -> Scheme:
        self._demand(name)
        return self._tensors[name].scheme

    def get(self, name: str) -> QTensor:
        self._demand(name)
        self._read.add(name)
        tensor = self._tensors[name].load()
        transform = self._transforms.get(name)
        return tensor if transform is None else transform(tensor)

    def unread(self) -> list[str]:
        return [name for name in self._tensors if name not in self._read]

    def release(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # unmodified pages are read from the file again
            for data in {id(info.data): info.data for info in self._tensors.values()}.values():
                data.madvise(mmap.MADV_DONTNEED)

    def _demand(self, name: str) -> None:
        if name not in self._tensors:
            raise ModelError(f"{self._name} lacks the tensor '{name}': the file does not hold the whole model")

    def _undo_interleaving(self, name: str, info: TensorInfo, config: dict[str, Any]) -> None:
        if name.endswith((".q_proj.weight", ".q_proj.bias")):
            heads = config["num_attention_heads"]
        elif name.endswith((".k_proj.weight", ".k_proj.bias")):
            heads = config["num_key_value_heads"]
        else:
            return
        rows = info.shape[0]
        has_rows = len(info.shape) > 1 or info.scheme.is_dense
        if not has_rows or rows != heads * config["head_dim"] or rows // heads % 2:
            raise ModelError(f"{self._name} has '{name}' of shape {info.shape}, not {heads} heads: it is damaged")
        self._transforms[name] = lambda tensor: tensor.reordered(head_halves(rows, heads))

    def _flatten(self, name: str, info: TensorInfo) -> None:
        """Vectors of Mamba-2 that the file stores with two dimensions."""
        if len(info.shape) == 2 and name.endswith(state_space.FLATTENED):
            self._shapes[name] = (prod(info.shape),)
            self._transforms[name] = QTensor.flattened

    def _restore_conv(self, name: str, info: TensorInfo) -> None:
        channels, kernel = info.shape
        self._shapes[name] = (channels, 1, kernel)
        self._transforms[name] = lambda tensor: tensor.reshape_leading(channels, 1)
