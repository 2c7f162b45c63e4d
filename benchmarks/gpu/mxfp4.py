"""Random weights of a model whose experts are stored as MXFP4, as in gpt-oss's files."""

from __future__ import annotations

import re
import zlib
from math import log2

import torch

from bankfull.synthetic.random_weights import RandomWeights
from bankfull.weights.formats.mxfp4 import BIAS, BLOCK, SCHEME, VALUES
from bankfull.weights.qtensor import QTensor
from bankfull.weights.scheme import Scheme

_EXPERTS = re.compile(r"\.experts\..*\.weight")
_SPREAD = (sum(value * value for value in VALUES) / len(VALUES)) ** 0.5
"""Standard deviation of values with random codes and the scale 1."""


class MXFP4Experts(RandomWeights):
    """Codes are uniform; all scales of a matrix are the power of two that keeps the activations' magnitude best."""

    def scheme(self, name: str) -> Scheme:
        return SCHEME if self._is_packed(name) else super().scheme(name)

    def get(self, name: str) -> QTensor:
        if not self._is_packed(name):
            return super().get(name)
        self._read.add(name)
        shape = self.shape(name)
        random = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed}/{name}".encode()))
        blocks = torch.randint(
            256, (*shape[:-1], SCHEME.row_bytes(shape[-1])), generator=random, dtype=torch.uint8, device=self._device
        )
        blocks.view(-1, SCHEME.block_bytes)[:, 0] = BIAS - round(log2(_SPREAD * shape[-1] ** 0.5))
        return QTensor(SCHEME, {"blocks": blocks}, shape)

    def _is_packed(self, name: str) -> bool:
        return bool(_EXPERTS.search(name)) and len(self.shape(name)) > 1 and self.shape(name)[-1] % BLOCK == 0
