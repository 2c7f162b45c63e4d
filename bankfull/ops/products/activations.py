"""Formats of the activations that enter products, and the rule that gives each weight its own.

The option `--activations` names a rule. Every layer asks the rule once, when it is built, for each of its weights; its
operations follow from the answer. So matrices of one model may differ: in a checkpoint whose head is not quantized, or
whose layers have different bits, each product rounds what its own weight allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from bankfull.ops.products.body import GROUP
from bankfull.ops.products.w8a8 import SCHEMES as BY_ROW
from bankfull.weights.formats.rows import BF16_ROW
from bankfull.weights.qtensor import QTensor, Scheme


class ActivationFormat(StrEnum):
    """The activations of one product. All but FLOAT are lossy."""

    FLOAT = "float"
    """Activations in the computation's dtype."""
    BF16 = "bf16"
    """Activations rounded to bfloat16; a dense weight is bfloat16, too."""
    INT8 = "int8"
    """Activations rounded to int8 in groups of 32 columns. A kernel may keep them in bfloat16 for many rows."""
    HADAMARD = "hadamard"
    """Activations of few rows as in INT8; many rows are transformed and rounded as a whole, with a second copy of the
    weight."""
    TOKEN = "token"
    """Activations rounded to the weight's own 8-bit type with one scale per token. A kernel may keep those of few
    rows."""
    OUTLIERS = "outliers"
    """Activations as in INT8, except columns that are kept as they are (LLM.int8())."""


FLOAT, BF16, INT8, HADAMARD, TOKEN, OUTLIERS = ActivationFormat
FLOATS = (FLOAT, TOKEN)
"""Formats whose few rows a kernel may leave as they are, and for which GPU kernels fuse norms and gates."""


@dataclass(frozen=True, slots=True)
class ActivationRule:
    """Which activations a weight wants, by its scheme. The formats of `blocks` and `by_row` need rounded weights: a
    dense weight gets `dense`."""

    name: str
    """The option's value."""
    dense: ActivationFormat = FLOAT
    blocks: ActivationFormat = FLOAT
    """The format for quantized weights."""
    by_row: ActivationFormat = FLOAT
    """The format for 8-bit weights with one scale per row."""
    copies: bool = False
    """Whether a second copy of a weight may be made, for products of many rows."""

    def of(self, scheme: Scheme, columns: int) -> ActivationFormat:
        """The format for a weight in this scheme with this number of columns."""
        if scheme.is_dense or scheme.name == BF16_ROW:
            return self.dense
        if scheme.is_sparse:
            return FLOAT
        chosen = self.by_row if scheme.name in BY_ROW else self.blocks
        return FLOAT if chosen is INT8 and columns % GROUP else chosen

    def of_weight(self, weight: QTensor) -> ActivationFormat:
        return OUTLIERS if weight.outliers is not None else self.of(weight.scheme, weight.shape[-1])

    def of_experts(self, weights: Sequence[QTensor]) -> ActivationFormat:
        """The one format for the matrices of experts: that of all, or FLOAT. No kernel rounds them per token."""
        formats = {self.of_weight(weight) for weight in weights}
        return formats.pop() if len(formats) == 1 and formats <= {BF16, INT8} else FLOAT

    @property
    def rounds(self) -> bool:
        """Whether some products round their activations. On a CPU such a model computes in float32: only operands of
        products are rounded. Their kernels keep copies of the weights, so that the file's memory can be released."""
        return any(format is not FLOAT for format in (self.dense, self.blocks, self.by_row))

    @property
    def narrows_pages(self) -> bool:
        """Whether keys and values are kept in bfloat16 unless the user names a dtype: where all quantized weights, or
        all weights, meet rounded activations."""
        return self.blocks is not FLOAT

    def matrices(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of matrices that are not in blocks, for a computation in `dtype`."""
        return torch.bfloat16 if self.dense is BF16 else dtype


EXACT = ActivationRule("float")
RULES: dict[str, ActivationRule] = {
    rule.name: rule
    for rule in (
        EXACT,
        ActivationRule("bf16", BF16, BF16, BF16),
        ActivationRule("int8", FLOAT, INT8, INT8, copies=True),
        ActivationRule("int8-few", FLOAT, INT8, INT8),
        ActivationRule("token", by_row=TOKEN),
    )
}
"""Value of the option -> its rule. `auto` chooses one of these."""
