"""The tiny models of `tests.models` in widths and heads that two ranks can share, saved as files."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.cases import CASES
from tests.models.oracle import TOKENS, reference_logits
from tests.models.shapes import any_width

EVEN = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "n_inner",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_folder = tempfile.TemporaryDirectory(prefix="bankfull-even-")


def _even(name: str, value: int) -> int:
    """The next even number; for key heads of 3 a divisor of the query heads."""
    if name == "num_key_value_heads":
        return {1: 1, 3: 2}.get(value, value)
    return value + value % 2 if name != "linear_num_key_heads" else {3: 2}.get(value, value)


@cache
def even_model(case: str, **changes: int) -> tuple[Path, Tensor]:
    """A folder with the model, and the reference's logits of TOKENS. `changes`: of the configuration."""
    torch.manual_seed(11)
    first = CASES[case]()
    config = first.config.to_dict()
    for name in EVEN:
        if isinstance(config.get(name), int):
            config[name] = _even(name, config[name])
    config |= changes
    kind = type(first.config)
    reference: Any = any_width(type(first)(kind(**config)).eval())
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.3 * noise)
    path = Path(_folder.name) / "-".join((case, *map(str, changes.values())))
    reference.save_pretrained(path)
    return path, reference_logits(reference, TOKENS)
