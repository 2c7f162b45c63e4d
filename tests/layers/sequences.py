"""Random tensors for a layer, and a sequence run through it in any number of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import RecurrentMeta
from bankfull.state.spec import Recurrent


def drawn(seed: int, **shapes: Sequence[int]) -> dict[str, Tensor]:
    """Random tensors; "__" in a name is a dot."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(*shape, generator=numbers, dtype=torch.float64) * 0.4
        for name, shape in shapes.items()
    }


def run(mixer: Any, x: Tensor, cuts: Sequence[int] = ()) -> Tensor:
    """The mixer's result for one sequence that runs in pieces, which end at `cuts`."""
    (spec,) = mixer.states
    assert isinstance(spec, Recurrent)
    ends = [*cuts, len(x)]
    state = {
        part.name: torch.zeros(len(ends) + 1, *part.shape, dtype=getattr(torch, part.dtype)) for part in spec.tensors
    }
    parts, begin = [], 0
    for slot, end in enumerate(ends):
        meta = RecurrentMeta(
            np.array([0, end - begin]), np.array([1]), torch.tensor([slot]), torch.tensor([[slot + 1]])
        )
        parts.append(mixer.run(x[begin:end], (state,), meta, None))
        begin = end
    return torch.cat(parts)
