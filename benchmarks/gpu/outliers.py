"""LLM.int8() of random weights: random inputs have no outliers, so that some columns of each matrix are chosen."""

from __future__ import annotations

from dataclasses import replace

import torch

from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.outliers import OutlierSource
from bankfull.weights.requantized import KEEP, Requantized, is_inner_matrix
from bankfull.weights.source import ModelFiles

SHARE = 1000
"""One of so many columns is an outlier."""


def with_outliers(files: ModelFiles, device: torch.device) -> ModelFiles:
    source = files.source
    columns = {
        name: list(range(SHARE // 2, source.shape(name)[-1], SHARE))
        for name in source.names()
        if is_inner_matrix(source, name, False)
    }
    others = Requantized(source, (INT8_ROW,), False, device, dict.fromkeys(columns, KEEP))
    return replace(files, source=OutlierSource(others, columns, device))
