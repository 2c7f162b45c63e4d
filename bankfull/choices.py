"""Values of the engine's options as data: what each means, what it needs, and what it cannot run beside.

Ways of speculative decoding are in `speculation`, policies and batching in `scheduling`, layouts in `mesh`.
"""

from __future__ import annotations

from collections.abc import Mapping

from bankfull.declared import Declared, Trait

Table = Mapping[str, Declared]
AUTO = "auto"

DTYPES: Table = {
    AUTO: Declared("the checkpoint's"),
    "float32": Declared("exact: no intermediate rounding"),
    "bfloat16": Declared("16 bits, as most checkpoints"),
    "float16": Declared("16 bits, with more digits and less range"),
    "float64": Declared("for comparisons; slow"),
}
"""Dtypes of the computation."""

_NO_PAGES = {Trait.PAGES: "{asked} has no use here: this model keeps no keys and values; leave it out."}
_FLOATING = {
    Trait.LATENT: "Latent attention keeps its KV cache in floating point, which {asked} would round; use "
    "kv_dtype=bfloat16."
}
_PAIRS = {
    Trait.ODD_HEADS: "An int4 KV cache needs heads whose size is a multiple of 8, and those of this model are not; use "
    "kv_dtype=int8."
}
PAGE_TYPES: Table = {
    AUTO: Declared("the model's, or bfloat16 where activations are rounded"),
    "float32": Declared("exact", _NO_PAGES),
    "bfloat16": Declared("half of float32", _NO_PAGES),
    "int8": Declared("about half of bfloat16 (lossy)", _NO_PAGES, _FLOATING),
    "fp8": Declared("about half of bfloat16 (lossy)", _NO_PAGES, _FLOATING),
    "int4": Declared("about a quarter of bfloat16 (lossier)", _NO_PAGES, _FLOATING | _PAIRS),
}
"""Types of keys and values in the KV cache."""

EVICTION = Declared(
    "tokens between the first and the last ones are forgotten (lossy)",
    {Trait.FULL_ATTENTION: "{asked} has no use here: no layer of this model has full attention; leave it out."},
    {
        Trait.LATENT: "{asked} has no use here: latent attention sees and keeps all tokens; leave it out.",
        Trait.DIFFUSION: "{asked} needs causal attention, and tokens of this model see later ones; leave it out.",
    },
)

_NO_BLOCKS = {
    Trait.BLOCKS: "{asked} has no use here: no matrix of {file} is in blocks when it is multiplied (a CPU multiplies "
    "fp8 as bfloat16); use 'bf16' or 'float', or quantize the model."
}
_FOR_A_CPU = {
    Trait.GPU: "{asked} is for a CPU: no kernel of a GPU rounds so; leave activations out, use dtype='bfloat16', or "
    "'token' with weights in 8 bits that have one scale per row."
}
_COLUMNS = {
    Trait.OUTLIERS: "{asked} has no use here: {file} keeps columns beside int8 matrices (LLM.int8()), whose other "
    "activations are int8; leave activations out."
}
ACTIVATIONS: Table = {
    AUTO: Declared(
        "on a GPU token for checkpoints made for it and --quantize fp8; on a CPU int8 for quantized weights except fp8 "
        "(int8-few if the copy would take more than a quarter of the free memory) and bf16 for a checkpoint in "
        "bfloat16; else float"
    ),
    "int8": Declared(
        "for quantized weights on a CPU (lossy); a second copy of the weights, one byte each, makes large batches "
        "faster",
        _NO_BLOCKS,
        _FOR_A_CPU,
    ),
    "int8-few": Declared("int8 for few rows, bf16 for many, without a copy", _NO_BLOCKS, _FOR_A_CPU),
    "token": Declared(
        "rounded per token to the 8-bit type of weights with one scale per row, int8:row or fp8 (lossy)",
        {
            Trait.BY_ROW: "{asked} has no use here: no matrix of {file} is in 8 bits with one scale per row when it is "
            "multiplied (a CPU multiplies fp8 as bfloat16); quantize the model to 'int8:row', or to 'fp8' on a GPU, or "
            "leave activations out."
        },
    ),
    "bf16": Declared("on a CPU; dense weights become bfloat16, too", {}, _FOR_A_CPU | _COLUMNS),
    "float": Declared("the dtype of the computation, exact with --dtype float32"),
}
"""Types of activations in matrix products."""

ROUNDING = Declared(
    "matrices are rounded at load (lossy)",
    refuses={
        Trait.QUANTIZED: "{file} is quantized already ({types}), so that {asked} would lose accuracy twice; leave the "
        "option out, or give an unquantized checkpoint."
    },
)
"""Any value of `quantize` but 2:4."""

SPARSE = Declared(
    "zeros of a checkpoint that was pruned to 2:4 are dropped at load",
    {
        Trait.SPARSE_KERNELS: "{asked} has no use here, because {reason}; leave it out: zeros are multiplied as they "
        "are."
    },
    {Trait.QUANTIZED: "{file} is quantized ({types}), so that {asked} has no use; leave it out."},
)
"""2:4, as the value of `quantize`."""

_KEYS = {Trait.PREFIX_CACHE: "kv_host and kv_disk need the prefix cache, whose keys name their content; switch it on."}
_PARTS = {
    Trait.DEALT_PAGES: "kv_host and kv_disk give each rank its part of every page, but {layout} deals whole pages out "
    "to ranks; use tp, pp or sp=ulysses, or leave out the tiers."
}
TIERS: Table = {
    "kv_host": Declared(
        "pinned host memory for state that leaves a GPU: cached prefixes and preempted sequences",
        _KEYS,
        _PARTS
        | {
            Trait.HOST_MEMORY: "kv_host has no use here: the state is in host memory already; give memory more, or use "
            "kv_disk."
        },
    ),
    "kv_disk": Declared("disk space for cached prefixes, which then survive a restart", _KEYS, _PARTS),
}
"""Memory below the device's, by the option of its size."""

DENOISING = Declared(
    "denoising of a diffusion model",
    {Trait.DIFFUSION: "{asked} needs a diffusion model, and this model predicts the next token; leave the option out."},
)
_ONE_BY_ONE = Declared(
    "prompts of a step",
    refuses={
        Trait.DIFFUSION: "{asked} is not for a diffusion model, whose steps compute whole blocks of tokens; leave it "
        "out."
    },
)
RAY = Declared(
    "a Ray cluster runs the ranks after the first",
    refuses={
        Trait.GPU: "{asked} places ranks on CPUs only: rank 0 runs outside of Ray, which may give its GPU to another "
        "rank; leave ray out, or serve the model with --replicas 1 and --ray."
    },
)
SEPARATE = Declared(
    "prompts are computed on other engines than those that decode",
    {Trait.PREFIX_CACHE: "{asked} needs the prefix cache, by which state is found: leave out --no-prefix-cache."},
    {
        Trait.RANKS: "{asked} hands over pages of engines with one rank, and with the layout {layout} each rank keeps "
        "a part of every page: leave out --parallel, or {asked}.",
        Trait.DIFFUSION: "{asked} has no use for a diffusion model: its blocks are computed again in every step, so "
        "there is no finished state to hand over; serve it without.",
    },
)
"""`--separate` of a service, whose engines hand each other pages."""
WRITING = Declared(
    "the weights of a running engine are replaced between two steps",
    refuses={
        Trait.RANKS: "{asked} replaces the weights of an engine with one rank, and with the layout {layout} each rank "
        "holds a part of them: start a new engine with the new weights instead."
    },
)
"""`LLM.write_weights`."""
GIVEN: Table = {
    "kv_evict": EVICTION,
    "diffusion": DENOISING,
    "prefill_tokens": _ONE_BY_ONE,
    "prefill_rows": _ONE_BY_ONE,
    "ray": RAY,
    **TIERS,
}
"""Options that declare the same for all of their values."""
