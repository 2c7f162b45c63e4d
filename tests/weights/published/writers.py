"""Writers of published formats, bit by bit from their descriptions: nothing is shared with the readers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from bankfull.weights.source import TensorSource, open_model

Tensors = dict[str, torch.Tensor]
CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}


@dataclass(frozen=True)
class Coded:
    """A matrix of unsigned codes, and the scale and zero point of each group of columns."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    places: np.ndarray
    """The group of each column."""

    @property
    def values(self) -> torch.Tensor:
        whole = self.codes.astype(np.float64) - self.zeros[:, self.places]
        return torch.from_numpy(whole * self.scales[:, self.places].astype(np.float64))


def drawn(
    bits: int,
    rows: int,
    columns: int,
    group: int,
    seed: int = 0,
    symmetric: bool = False,
    shuffled: bool = False,
) -> Coded:
    random = np.random.default_rng(seed)
    groups = columns // group
    scales = (random.random((rows, groups)) * 0.1 + 0.01).astype(np.float16)
    middle = np.full((rows, groups), 2 ** (bits - 1))
    zeros = middle if symmetric else random.integers(0, 2**bits, (rows, groups))
    places = np.arange(columns) // group
    if shuffled:
        random.shuffle(places)
    return Coded(random.integers(0, 2**bits, (rows, columns)), scales, zeros, places)


def stream(codes: list[int], bits: int) -> list[int]:
    """32-bit words that hold the codes one after the other, the lowest bit first."""
    all_bits = [code >> bit & 1 for code in codes for bit in range(bits)]
    all_bits += [0] * (-len(all_bits) % 32)
    return [sum(bit << i for i, bit in enumerate(all_bits[at : at + 32])) for at in range(0, len(all_bits), 32)]


def words(rows: list[list[int]]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32).copy())


def gptq(module: str, made: Coded, bits: int, version: int = 1) -> Tensors:
    """Codes run down the inputs; zero points along the outputs, minus one in version 1."""
    packed = words([stream(row.tolist(), bits) for row in made.codes]).T
    zeros = []
    for group in made.zeros.T.tolist():
        if version == 1 and bits == 3:
            zeros.append(stream([(zero - 1) % 8 for zero in group], bits))
        elif version == 1:
            one = stream([1] * len(group), bits)
            zeros.append([(word - less) % 2**32 for word, less in zip(stream(group, bits), one, strict=True)])
        else:
            zeros.append(stream(group, bits))
    return {
        f"{module}.qweight": packed.contiguous(),
        f"{module}.qzeros": words(zeros),
        f"{module}.scales": torch.from_numpy(made.scales.T.copy()),
        f"{module}.g_idx": torch.from_numpy(made.places.astype(np.int32)),
    }


def _awq_words(row: list[int]) -> list[int]:
    made = []
    for at in range(0, len(row), 8):
        word = 0
        for nibble, which in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            word |= row[at + which] << (4 * nibble)
        made.append(word)
    return made


def awq(module: str, made: Coded) -> Tensors:
    """Codes of eight outputs share a word, even ones first."""
    return {
        f"{module}.qweight": words([_awq_words(column) for column in made.codes.T.tolist()]),
        f"{module}.qzeros": words([_awq_words(group) for group in made.zeros.T.tolist()]),
        f"{module}.scales": torch.from_numpy(made.scales.T.copy()),
    }


def packed(module: str, made: Coded, bits: int, dtype: torch.dtype = torch.float16, symmetric: bool = True) -> Tensors:
    """compressed-tensors: codes along the inputs, zero points along the outputs."""
    tensors = {
        f"{module}.weight_packed": words([stream(row, bits) for row in made.codes.tolist()]),
        f"{module}.weight_scale": torch.from_numpy(made.scales).to(dtype),
        f"{module}.weight_shape": torch.tensor(made.codes.shape),
    }
    if not symmetric:
        tensors[f"{module}.weight_zero_point"] = words([stream(group, bits) for group in made.zeros.T.tolist()]).T
        tensors[f"{module}.weight_zero_point"] = tensors[f"{module}.weight_zero_point"].contiguous()
    return tensors


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    made = (config or CONFIG) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(made))
    return folder


def source(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> TensorSource:
    return open_model(write(folder, tensors, quantization)).source


def compressed(form: str, bits: int, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **weights}}},
        "ignore": ["lm_head"],
    }
