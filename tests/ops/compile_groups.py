"""Launches that prove that every kernel compiles. Models are on the meta device: only their shapes matter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, cast

import numpy as np
import torch
import triton
import triton.language as tl

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import (
    OPERATIONS,
    Epilogue,
    Kit,
    PagedMeta,
    RecurrentMeta,
    Unnormed,
    kit_for,
    linear,
    linear_outliers,
)
from bankfull.ops.attention.triton.rope import Turn, launch_rotate_and_write
from bankfull.ops.pages.rounded import ROUNDED
from bankfull.ops.pages.side import Cache, Pages
from bankfull.ops.products.triton import linear as dense
from bankfull.ops.products.triton.quantized.layout import repack
from bankfull.ops.products.triton.quantized.rows import few_rows
from bankfull.ops.sampling.triton.sampling import choose
from bankfull.ops.triton.rounded_columns import rounded_columns
from bankfull.runtime.captured import Captured
from bankfull.runtime.forward import Eager
from bankfull.runtime.rehearsal import every_kind, rehearsal
from bankfull.runtime.rows import Rows
from bankfull.sample.table import Chooser
from bankfull.state.mask import Mask
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.synthetic.random_weights import RandomWeights, random_model
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import is_inner_matrix
from tests.ops import cases
from tests.ops.compiled import Launch
from tests.ops.forms import FORMS, providers_of

META = torch.device("meta")
DTYPE = torch.bfloat16
LAYERS = 2
"""The first layer of a model has no residual branch to add; the others are alike."""
LATER = ([1], [2], [5], [12], [100], [2000], [300] * 4, [700, 1, 1, 1], [256, 3], [33, 9, 1], [40] * 60)
"""New tokens per sequence in steps of a running engine."""
PAST = (0, 7, 40)
"""Tokens before them."""
MAMBA = {
    "model_type": "mamba",
    "vocab_size": 50280,
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "state_size": 16,
    "conv_kernel": 4,
    "expand": 2,
    "intermediate_size": 5120,
    "time_step_rank": 160,
    "tie_word_embeddings": True,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
}
WEIGHTLESS_SEEDS = 12
"""Enough for operations without a weight, whose kernels differ only by dtype and layout."""
Two = tuple[Iterable[Launch], Iterable[Launch]]
"""Launches compiled ahead, and launches made afterwards."""


class _Shapes(RandomWeights):
    def get(self, name: str) -> QTensor:
        self._read.add(name)
        return QTensor.dense(torch.empty(self.shape(name), dtype=DTYPE, device=META))


class _SparseShapes(_Shapes):
    """Inner matrices are 2:4 sparse."""

    def get(self, name: str) -> QTensor:
        if not is_inner_matrix(self, name):
            return _Shapes.get(self, name)
        self._read.add(name)
        scheme, shape = cases.WEIGHTS["bf16_2of4"], self.shape(name)
        return QTensor(scheme, scheme.empty(shape, META), shape)


class _Device:
    """A GPU, as far as launching steps is concerned."""

    torch = META

    def capture(self, forward: Eager, kit: Kit) -> Captured:
        return Captured(forward)

    def chooser(self, kit: Kit) -> Chooser:
        return choose

    def ship(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(META)


def model_of(config: Mapping[str, Any], weights: type[_Shapes] = _Shapes) -> tuple[Decoder, Kit]:
    files = random_model("shapes", {**config, "num_hidden_layers": LAYERS}, DTYPE, META)
    source = weights({name: files.source.shape(name) for name in files.source.names()}, DTYPE, META)
    kit = kit_for("cuda")
    return build_model(files.config, Build(source, kit, DTYPE, META)), kit


def start(config: Mapping[str, Any], widths: Sequence[int], weights: type[_Shapes] = _Shapes) -> Two:
    """A model: its ahead-of-time compilation, then steps with other row counts, prompts and mixtures than expected."""
    model, kit = model_of(config, weights)
    layout, device = layout_of(model.states(), 16), cast(Any, _Device())

    def kinds(rows: int, tokens: int) -> Iterator[Launch]:
        steps = every_kind(model, layout, device, kit, rows, tokens, widths)
        return ((f"step {number} for {rows} rows", step) for number, step in enumerate(steps))

    later = [
        (f"step {new} behind {past}", rehearsal(model, layout, device, new, past)) for new in LATER for past in PAST
    ]
    return kinds(256, 8192), chain(kinds(256, 8192), kinds(77, 8192), later)


def drafts() -> Two:
    """Steps of several tokens per sequence."""
    model, _ = model_of(shape_config("llama-3-8b"))
    layout = layout_of(model.states(), 16)
    captured = Captured(Eager(model, layout, Storage(layout, 0, 1, META).layers))
    rows = Rows(64, 64, layout, model.vocab, META, _Device().ship)
    trees = Rows(64, 64, layout, model.vocab, META, _Device().ship, 31)

    def kinds() -> Iterator[Launch]:
        steps = chain(captured.kinds(rows, (4, 16), choose), captured.kinds(trees, (8, 32), choose))
        return ((f"step {number}", step) for number, step in enumerate(steps))

    return kinds(), kinds()


def quantized(*formats: str) -> Two:
    """The linears of an 8B model, for one row, and for tiles of each size."""
    made = []
    for name in formats:
        for outer, inner in ((6144, 4096), (28672, 4096), (4096, 14336)):
            weight = QTensor(cases.WEIGHTS[name], cases.WEIGHTS[name].empty((outer, inner), META), (outer, inner))
            gated, kit = outer > 2 * inner, kit_for("cuda")
            facts = {"dtype": DTYPE, "weight": weight, "gated": gated}
            run, ready = kit.bind(linear, **facts), kit.prepare(linear, weight, **facts)
            for rows in (1, 16, 64, 128):
                x = torch.empty(rows, inner, dtype=DTYPE, device=META)
                call = partial(run, x, ready, Epilogue(gate="silu" if gated else ""))
                made.append((f"{name} {outer}x{inner}, {rows} rows", call))
    return made, made


def outliers() -> Two:
    """The layers of an 8B model with outlier columns, for one row, tiles and the GEMM."""
    made = []
    scheme, kit = cases.WEIGHTS["int8_row"], kit_for("cuda")
    for fused, outer, inner in (
        ("normed", 6144, 4096),
        ("", 4096, 4096),
        ("normed gated", 28672, 4096),
        ("", 4096, 14336),
    ):
        normed, gated = "normed" in fused, "gated" in fused
        for count in (4, 64, inner // 16):
            columns = torch.empty(count, dtype=torch.int64, device=META)
            kept = torch.empty(outer, count, dtype=DTYPE, device=META)
            weight = QTensor(scheme, scheme.empty((outer, inner), META), (outer, inner), outliers=(columns, kept))
            facts = {"dtype": DTYPE, "weight": weight, "normed": normed, "gated": gated}
            run, ready = kit.bind(linear_outliers, **facts), kit.prepare(linear_outliers, weight, **facts)
            for rows in (1, 16, 64, 128):
                x = torch.empty(rows, inner, dtype=DTYPE, device=META)
                row = Unnormed(x, x, x[0], 1e-5, 0.0, x) if normed else x
                call = partial(run, row, ready, Epilogue(gate="silu" if gated else ""))
                made.append((f"{fused} {outer}x{inner}, {count} columns, {rows} rows", call))
    return made, made


def stacked_experts(*formats: str) -> Two:
    """Experts of gpt-oss-20b, and of Qwen3-30B-A3B where their rows divide into blocks, for every number of tokens with
    kernels of its own."""
    made = []
    for name, (hidden, inner, experts, per_token) in product(formats, ((2880, 2880, 32, 4), (2048, 768, 128, 8))):
        scheme = cases.WEIGHTS[name]
        if hidden % scheme.block or inner % scheme.block:
            continue
        shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        weights = tuple(QTensor(scheme, scheme.empty(shape, META), shape) for shape in shapes)
        kit, operation = kit_for("cuda"), OPERATIONS["expert_mlp"]
        facts = {"dtype": DTYPE, "weight": weights[0], "weights": weights}
        run = kit.bind(operation, **facts)
        ready = [kit.prepare(operation, weight, **facts) for weight in weights]
        biases = [torch.empty(experts, outputs, dtype=DTYPE, device=META) for outputs in (inner, inner, hidden)]
        for tokens in (1, 4, 16, 64, 200, 1000, 8000):
            x = torch.empty(tokens, hidden, dtype=DTYPE, device=META)
            chosen, factors = (
                torch.empty(tokens, per_token, dtype=dtype, device=META) for dtype in (torch.int32, torch.float32)
            )
            call = partial(run, x, chosen, factors, *ready, *biases, "clamped_swiglu")
            made.append((f"{name} {hidden}x{inner}, {tokens} tokens", call))
    return made, made


def heads(*formats: str) -> Two:
    """The argmax of an 8B model's head for one row, with and without a fused norm."""
    made = []
    for name in formats:
        outer, inner = 128256, 4096
        weight = QTensor(cases.WEIGHTS[name], cases.WEIGHTS[name].empty((outer, inner), META), (outer, inner))
        x = torch.empty(1, inner, dtype=DTYPE, device=META)
        for normed, row in ((False, x), (True, Unnormed(x, x, x[0], 1e-5, 0.0, x))):
            kit, facts = kit_for("cuda"), {"dtype": DTYPE, "weight": weight, "normed": normed, "best": True}
            run, ready = kit.bind(linear, **facts), kit.prepare(linear, weight, **facts)
            made.append((f"best of {name}, normed {normed}", partial(run, row, ready, Epilogue(best=True))))
    return made, made


def generated(seeds: range) -> Two:
    """Every operation and provider on generated inputs: odd sizes, views, all dtypes and formats."""
    made = []
    for operation in FORMS.values():
        for provider in (one for one in providers_of(operation) if one.on == "cuda"):
            weightless = "weight" not in cases.case(operation.label, 0).facts
            for seed in seeds[:WEIGHTLESS_SEEDS] if weightless else seeds:
                given = cases.case(operation.label, seed)
                kit = Kit("cuda", (provider.name,))
                run = kit.bind(operation, **given.facts)
                if set(kit.chosen[operation.label]) == {provider.name}:
                    prepare = partial(kit.prepare, operation, **given.facts)
                    args = [prepare(arg) if isinstance(arg, QTensor) else arg for arg in given.args]
                    made.append((f"{operation.label} {provider.name}, seed {seed}", partial(run, *args)))
    return made, made


def plans() -> Two:
    """Every plan of a dense linear layer, for every dtype, and what no layer runs."""
    made = []
    for dtype in dense.DTYPES:
        for plan in dense.TILES:
            x, weight = (torch.empty(n, 512, dtype=dtype, device=META) for n in (64, 128))
            made.append((f"{plan.name} {dtype}", partial(dense.run_plan, plan, x, weight, None)))
    for plan in dense.SPLIT:
        x, weight = (torch.empty(n, 512, dtype=DTYPE, device=META) for n in (32, 128))
        made.append((plan.name, partial(dense.run_plan, plan, x, weight, None)))
    square, block = torch.empty(300, 300, device=META), torch.empty(128, 4096, device=META)
    made.append(("GPTQ", partial(rounded_columns, block, block, square[:128, :128], block, block, 0, 15)))
    return made, made


def edges() -> Two:
    """Cases that no model has yet: dtypes and sizes that differ between tensors, groups smaller than a warp's part."""
    made: list[Launch] = []
    for q_dtype, dtype, size, values in ((torch.float32, DTYPE, 16, 16), (DTYPE, DTYPE, 128, 64)):
        q, k, v = (torch.empty(9, 2, n, dtype=q_dtype, device=META) for n in (size, size, values))
        cache = Cache(*(Pages.of(torch.empty(3, 16, 2, n, dtype=dtype, device=META)) for n in (size, values)))
        slots = torch.empty(9, dtype=torch.int64, device=META)
        angles = torch.empty(9, size // 2, dtype=q_dtype, device=META)
        for keep in (False, True):
            call = partial(launch_rotate_and_write, q, k, v, cache, slots, Turn.of((angles, angles), None), keep)
            made.append((f"{q_dtype} queries of {size}, {dtype} pages, values of {values}, {keep}", call))
    made += over_rounded_pages(torch.float32, ([40], 100))
    made += sparse(((torch.float32, 16), Mask(5, 4, global_tokens=3)), ((DTYPE, 128), Mask(8, stride=8)))
    for name in ("int4_g128", "int4_g32", "q4_k", "int8_row"):
        for groups in (1, 3):
            inner = groups * max(64, cases.WEIGHTS[name].block)
            weight = repack(cases.Maker(0).weight(cases.WEIGHTS[name], 9, inner))
            for dtype in (torch.float32, DTYPE):
                call = partial(few_rows, torch.empty(1, inner, dtype=dtype), weight, None)
                made.append((f"{name} 9x{inner}, a row of {dtype}", call))
    return made, made


def sparse(*shapes: tuple[tuple[torch.dtype, int], Mask]) -> list[Launch]:
    """Attention under sparse masks: single tokens, a few (also in trees), and prompts."""
    made = []
    run = OPERATIONS["paged_attention"].providers["triton"].run
    for (dtype, size), mask in shapes:
        for counts, trees in (([1] * 3, False), ([5], True), ([200, 1], False)):
            q = torch.empty(sum(counts), 8, size, dtype=dtype, device=META)
            pages = torch.empty(99, 16, 2, size, dtype=dtype, device=META)
            table, slots = (torch.empty(n, dtype=torch.int64, device=META) for n in ((len(counts), 20), (len(q),)))
            ancestors = slots if trees else None
            meta = PagedMeta(np.cumsum([0, *counts]), np.array(counts) + 90, table, slots, 16, ancestors=ancestors)
            made.append((f"{mask} {dtype} {counts}", partial(run, q, pages, pages, meta, 0.1, mask)))
    return made


def sparse_kinds() -> Two:
    masks = (Mask(9, aligned=True), Mask(8, stride=8, columns=2, aligned=True), Mask(6, global_tokens=4))
    made = sparse(*(((dtype, 64), mask) for mask in masks for dtype in (DTYPE, torch.float32)))
    return made, made


def rounded_pages() -> Two:
    """Attention of an 8B model over rounded keys and values, and their writes: decodes, and a prompt's chunk."""
    made = over_rounded_pages(DTYPE, ([1] * 64, 4095), ([2000], 100))
    return made, made


def over_rounded_pages(queries: torch.dtype, *steps: tuple[list[int], int]) -> list[Launch]:
    """`steps`: new tokens of each sequence, and tokens before them."""
    made: list[Launch] = []
    kv, size = 8, 128
    for name, dtype in ROUNDED.items():
        stored, scales = (size // 2, (kv, size // 32)) if name == "int4" else (size, (kv,))
        kind = torch.bfloat16 if name == "int4" else torch.float32
        pages = torch.empty(300, 16, kv, stored, dtype=dtype, device=META)
        held = torch.empty(300, 16, *scales, dtype=kind, device=META)
        write, attend = OPERATIONS[f"write_pages_{name}"], OPERATIONS["paged_attention"]
        for counts, past in steps:
            starts = np.concatenate(([0], np.cumsum(counts)))
            lengths = np.array(counts) + past
            table = torch.empty(len(counts), 300, dtype=torch.int64, device=META)
            slots = torch.empty(int(starts[-1]), dtype=torch.int64, device=META)
            small = (torch.empty(len(n), dtype=torch.int32, device=META) for n in (starts, lengths))
            meta = PagedMeta(starts, lengths, table, slots, 16, *small)
            new, q = (torch.empty(len(slots), n, size, dtype=queries, device=META) for n in (kv, 4 * kv))
            made.append((f"write {name}", partial(write.providers["triton"].run, new, pages, held, slots)))
            args = (q, pages, pages, meta, size**-0.5, None, None, held, held)
            made.append((f"attend {name} {counts[0]}", partial(attend.providers["triton"].run, *args)))
    return made


def linear_recurrences() -> Two:
    """Linear attention and the delta rule in the shapes of MiniMax-Text-01, BASED and Qwen3-Next, step and chunks."""
    made: list[Launch] = []
    for counts in ([1] * 8, [2000, 1]):
        tokens, sequences = sum(counts), len(counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        numbers = (torch.empty(n, dtype=torch.int32, device=META) for n in (sequences + 1, sequences))
        slots = (torch.empty(shape, dtype=torch.int64, device=META) for shape in ((sequences,), (sequences, 1)))
        meta = RecurrentMeta(starts, np.ones(sequences, np.int64), *slots, *numbers)
        for dtype in (DTYPE, torch.float32):

            def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device=META)

            for heads, key, value, normalized in ((64, 128, 128, False), (16, 273, 64, True)):
                q, v = empty(tokens, heads, key), empty(tokens, heads, value)
                state, sums = (empty(9, *shape, dtype=torch.float32) for shape in ((heads, key, value), (heads, key)))
                rest = (empty(heads, dtype=torch.float32), state, sums if normalized else None, meta)
                run = OPERATIONS["linear_attention"].providers["triton"].run
                made.append((f"{key} x {value} {dtype} {counts[0]}", partial(run, q, q, v, *rest)))
            q, v, a = empty(tokens, 16, 128), empty(tokens, 32, 128), empty(tokens, 32)
            rate, state = empty(32, dtype=torch.float32), empty(9, 32, 128, 128, dtype=torch.float32)
            run = OPERATIONS["delta_rule"].providers["triton"].run
            made.append((f"delta {dtype} {counts[0]}", partial(run, q, q, v, a, a, rate, rate, state, meta)))
    return made, made


def state_spaces() -> Two:
    """Mamba-2 (2.7B, Granite 4, Falcon-H1) and S4, step and chunks."""
    made: list[Launch] = []
    for counts in ([1] * 64, [1], [2000, 1]):
        tokens, sequences = sum(counts), len(counts)
        starts = np.concatenate(([0], np.cumsum(counts)))
        numbers = (torch.empty(n, dtype=torch.int32, device=META) for n in (sequences + 1, sequences))
        slots = (torch.empty(shape, dtype=torch.int64, device=META) for shape in ((sequences,), (sequences, 1)))
        meta = RecurrentMeta(starts, np.ones(sequences, np.int64), *slots, *numbers)
        for dtype in (DTYPE, torch.float32):

            def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
                return torch.empty(shape, dtype=dtype, device=META)

            run = OPERATIONS["ssd_scan"].providers["triton"].run
            for heads, size, groups, n in ((80, 64, 1, 128), (48, 64, 1, 128), (32, 64, 2, 256)):
                vectors = [empty(heads, dtype=torch.float32) for _ in range(3)]
                x, dt, b = empty(tokens, heads, size), empty(tokens, heads), empty(tokens, groups, n)
                state = empty(9, heads, size, n, dtype=torch.float32)
                args = (x, dt, vectors[0], b, b, vectors[1], vectors[2], (0.0, float("inf")), state, meta)
                made.append((f"ssd {n} {dtype} {counts[0]}", partial(run, *args)))
            x, weight = empty(tokens, 5120), empty(5120)
            run = OPERATIONS["gated_rms_norm"].providers["triton"].run
            made.append((f"gated norm {dtype}", partial(run, x, x, weight, 1e-5, 1, False)))
            run = OPERATIONS["causal_conv_silu"].providers["triton"].run
            state = empty(9, 5120, 3, dtype=torch.float32)
            made.append((f"convolution {dtype} {counts[0]}", partial(run, x, empty(5120, 4), weight, state, meta)))
            run, pairs = OPERATIONS["diagonal_scan"].providers["triton"].run, empty(2, 32, 5120, dtype=torch.float32)
            state, skip = empty(9, 2, 32, 5120, dtype=torch.float32), empty(5120, dtype=torch.float32)
            made.append((f"s4 {dtype} {counts[0]}", partial(run, x, pairs, pairs, skip, state, meta)))
    return made, made


def partial_pages() -> Two:
    """Attention of an 8B model over the pages of a context rank: decodes, drafts in a tree, and a prompt's chunk."""
    made: list[Launch] = []
    run = OPERATIONS["partial_attention"].providers["triton"].run
    pages = torch.empty(300, 16, 8, 128, dtype=DTYPE, device=META)
    for counts, past, trees in (([1] * 8, 4095, False), ([5], 4095, True), ([2000], 100, False)):
        starts = np.concatenate(([0], np.cumsum(counts)))
        table = torch.empty(len(counts), 300, dtype=torch.int64, device=META)
        slots = torch.empty(int(starts[-1]), dtype=torch.int64, device=META)
        small = [torch.empty(n, dtype=torch.int32, device=META) for n in (len(starts), len(counts))]
        q = torch.empty(len(slots), 32, 128, dtype=DTYPE, device=META)
        for window in (None, 1024):
            args = (starts, np.array(counts) + past, table, slots, 16, *small)
            meta = PagedMeta(*args, ancestors=slots if trees else None)
            made.append((f"partial {counts[0]} {window}", partial(run, q, pages, pages, meta, 2, 0.1, window)))
    return made, made


@triton.jit
def refused(x):
    tl.store(x + tl.arange(0, 3), 0.0)  # 3 is not a power of two


def broken() -> Two:
    made = [("three numbers", lambda: refused[(1,)](torch.empty(3)))]
    return made, made


GROUPS: dict[str, Callable[[], Two]] = {
    "start": partial(start, shape_config("llama-3-8b"), (1,)),
    "two-of-four": partial(start, shape_config("llama-3-8b"), (1,), _SparseShapes),
    "experts": partial(start, shape_config("qwen3-30b-a3b"), (1,)),
    "recurrent": partial(start, MAMBA, (1, 4)),
    "state-spaces": state_spaces,
    "linear-recurrences": linear_recurrences,
    "drafts": drafts,
    "rounded-pages": rounded_pages,
    "partial-pages": partial_pages,
    "broken": broken,
    "plans": plans,
    "edges": edges,
    "sparse": sparse_kinds,
    "heads": partial(heads, "int4_g128", "int8_row"),
    "heads-more": partial(heads, "mxfp4", "int3_g128"),
    "quantized": partial(quantized, "int4_g128"),
    "outliers": outliers,
    "quantized-more": partial(quantized, "int8_row", "fp8", "q4_k", "mxfp4", "int3_g128", "uint3_g64", "int2_g128"),
    "quantized-experts": partial(stacked_experts, "mxfp4"),
    "quantized-experts-more": partial(
        stacked_experts, "int4_g128", "int4_g32", "int3_g64", "uint3_g32", "q4_k", "q6_k"
    ),
    "generated": partial(generated, range(3)),
    "generated-more": partial(generated, range(3, len(cases.FLOATS) * len(cases.WEIGHTS))),
}
