"""Context ranks and sequence parallelism: ranks that divide tokens compute what the whole model computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.shard import Shard
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests.models.cases import CASES
from tests.models.oracle import CPU, PASSES, TOKENS, TOLERANCE
from tests.parallel.even import even_model
from tests.parallel.threads import ThreadRank, on_mesh

APART = ("gemma3", "gemma3-untied", "hunyuan-shared", "hunyuan-shared-biased")
"""Cases whose configuration cannot be changed from outside."""
RECURRENT = ("mamba", "mamba-odd")


def model_of_rank(name: str, tp: ThreadRank, cp: ThreadRank, sequence: str) -> Decoder:
    files = open_model(even_model(name)[0])
    build = Build(
        files.source,
        kit_for("cpu", "torch"),
        torch.float32,
        CPU,
        shard=None if tp.size == 1 else Shard(tp),
        context=None if cp.size == 1 else cp,
        sequence=sequence,
    )
    return build_model(files.config, build)


def check(name: str, tp: int, cp: int, sequence: str, cut: str) -> None:
    def work(first: ThreadRank, second: ThreadRank) -> Tensor:
        return naive.logits(model_of_rank(name, first, second, sequence), TOKENS, CPU, PASSES[cut])

    expected = even_model(name)[1]
    for found in on_mesh((tp, cp), work):
        assert float((found - expected).abs().max()) < TOLERANCE
