"""Every operation that a model may use. Importing this package registers the torch bodies and the providers."""

from bankfull.ops.attention.body import HeadNorms, PagedMeta, attend, paged_attention, write_pages
from bankfull.ops.attention.partial import merge_partials, partial_attention
from bankfull.ops.cost import Cost
from bankfull.ops.experts.body import RoutingRule, add_gated, expert_mlp, expert_mlp_bf16, expert_mlp_int8, route
from bankfull.ops.latent.body import (
    HeadWeights,
    absorb_queries,
    expanded_attention,
    head_products,
    latent_attention,
    write_latents,
)
from bankfull.ops.norm.body import add, add_rms_norm, layer_norm, rms_norm
from bankfull.ops.pages.body import move_tokens
from bankfull.ops.pages.rounded import write_pages_fp8, write_pages_int4, write_pages_int8
from bankfull.ops.pointwise.body import ACTIVATIONS, activate, activate_mul, gather_columns, scale_columns, soft_cap
from bankfull.ops.products.body import (
    Epilogue,
    Unnormed,
    embedding,
    linear,
    linear_bf16,
    linear_hadamard,
    linear_int8,
)
from bankfull.ops.products.outliers import linear_outliers
from bankfull.ops.products.w8a8 import linear_w8a8
from bankfull.ops.ranks.collectives import (
    all_reduce,
    exchange_parts,
    gather_outputs,
    gather_rows,
    receive_rows,
    reduce_scatter,
    send_rows,
    spread_embedding,
    spread_rms_norm,
)
from bankfull.ops.ranks.cross import Sides, cross
from bankfull.ops.ranks.dispatch import combine, dispatch
from bankfull.ops.recurrence.delta import delta_rule
from bankfull.ops.recurrence.linear_attention import linear_attention, taylor_features, taylor_size
from bankfull.ops.recurrence.s4 import diagonal_scan
from bankfull.ops.recurrence.ssd import gated_rms_norm, ssd_scan
from bankfull.ops.recurrence.ssm import RecurrentMeta, causal_conv, causal_conv_silu, selective_scan
from bankfull.ops.registry import OPERATIONS, Kit, Operation, kit_for, training_kit
from bankfull.ops.rope.body import rope_angles, rotate

__all__ = [
    "ACTIVATIONS",
    "OPERATIONS",
    "Cost",
    "Epilogue",
    "HeadNorms",
    "HeadWeights",
    "Kit",
    "Operation",
    "PagedMeta",
    "RecurrentMeta",
    "RoutingRule",
    "Sides",
    "Unnormed",
    "absorb_queries",
    "all_reduce",
    "activate",
    "activate_mul",
    "add",
    "add_gated",
    "add_rms_norm",
    "attend",
    "causal_conv",
    "causal_conv_silu",
    "combine",
    "cross",
    "diagonal_scan",
    "delta_rule",
    "dispatch",
    "embedding",
    "expert_mlp",
    "expert_mlp_bf16",
    "expert_mlp_int8",
    "exchange_parts",
    "expanded_attention",
    "gated_rms_norm",
    "gather_columns",
    "gather_outputs",
    "gather_rows",
    "head_products",
    "kit_for",
    "latent_attention",
    "layer_norm",
    "linear",
    "linear_attention",
    "linear_bf16",
    "linear_int8",
    "linear_w8a8",
    "linear_hadamard",
    "linear_outliers",
    "merge_partials",
    "move_tokens",
    "paged_attention",
    "receive_rows",
    "partial_attention",
    "reduce_scatter",
    "send_rows",
    "rms_norm",
    "rope_angles",
    "rotate",
    "route",
    "scale_columns",
    "selective_scan",
    "soft_cap",
    "spread_embedding",
    "spread_rms_norm",
    "ssd_scan",
    "taylor_features",
    "taylor_size",
    "training_kit",
    "write_latents",
    "write_pages",
    "write_pages_fp8",
    "write_pages_int4",
    "write_pages_int8",
]

from bankfull.ops import native as _native_providers  # noqa: F401  (last: providers attach to the operations above)
