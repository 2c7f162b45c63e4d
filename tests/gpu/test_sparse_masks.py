"""A model whose layers have sparse masks: its logits on the device are those of the bodies on the host."""

from __future__ import annotations

import pytest
import torch

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.gpu.place import CPU, DEVICE, require_device
from tests.tiny import VOCAB, folder_of

require_device()


def sparse(dtype: torch.dtype, device: torch.device, providers: str) -> Decoder:
    files = open_model(folder_of("sparse"))
    return build_model(files.config, Build(files.source, kit_for(device.type, providers), dtype, device))


@pytest.mark.parametrize("chunks", [(), (1,) * 12, (100, 1, 16, 17, 66)], ids=["whole", "one by one", "chunks"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=str)
def test_logits_are_those_of_the_host(dtype: torch.dtype, most: float, chunks: tuple[int, ...]) -> None:
    count = sum(chunks) or 200
    tokens = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    expected = naive.logits(sparse(torch.float64, CPU, "torch"), tokens, CPU)
    found = naive.logits(sparse(dtype, DEVICE, "auto"), tokens, DEVICE, chunks).cpu().double()
    assert (found - expected).abs().max() <= most * expected.abs().max()
