"""Every operation that a model may use. Importing this package registers the torch bodies and the providers."""

from bankfull.ops.cost import Cost
from bankfull.ops.reference.activation import ACTIVATIONS, activate, activate_mul, soft_cap
from bankfull.ops.reference.attention import (
    HeadNorms,
    PagedMeta,
    attend,
    paged_attention,
    write_pages,
    write_pages_int8,
)
from bankfull.ops.reference.linear import (
    Unnormed,
    best_output,
    best_output_bf16,
    best_output_hadamard,
    best_output_int8,
    embedding,
    gated_linear,
    linear,
    linear_bf16,
    linear_hadamard,
    linear_int8,
    normed_best_output,
    normed_gated_linear,
    normed_linear,
)
from bankfull.ops.reference.norm import add, add_rms_norm, layer_norm, rms_norm
from bankfull.ops.reference.pages import move_tokens
from bankfull.ops.reference.rope import rope_angles, rotate
from bankfull.ops.reference.ssm import RecurrentMeta, causal_conv, selective_scan
from bankfull.ops.registry import OPERATIONS, Kit, Operation, kit_for

__all__ = [
    "ACTIVATIONS",
    "OPERATIONS",
    "Cost",
    "HeadNorms",
    "Kit",
    "Operation",
    "PagedMeta",
    "RecurrentMeta",
    "Unnormed",
    "activate",
    "activate_mul",
    "add",
    "add_rms_norm",
    "attend",
    "best_output",
    "best_output_bf16",
    "best_output_int8",
    "best_output_hadamard",
    "causal_conv",
    "embedding",
    "gated_linear",
    "kit_for",
    "layer_norm",
    "linear",
    "linear_bf16",
    "linear_int8",
    "linear_hadamard",
    "move_tokens",
    "normed_best_output",
    "normed_gated_linear",
    "normed_linear",
    "paged_attention",
    "rms_norm",
    "rope_angles",
    "rotate",
    "selective_scan",
    "soft_cap",
    "write_pages",
    "write_pages_int8",
]

from bankfull.ops import native as _native_providers  # noqa: F401  (last: providers attach to the operations above)
