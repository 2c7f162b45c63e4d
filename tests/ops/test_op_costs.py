"""Declared costs compared with what the bodies do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from bankfull.ops import OPERATIONS, Cost, Epilogue, Unnormed
from bankfull.ops.attention.sight import live_from, visible_pairs
from bankfull.ops.cost import nbytes
from bankfull.ops.meter import Meter
from bankfull.ops.pages.rounded import head_numbers, is_rounded
from bankfull.weights.formats import SCHEMES
from bankfull.weights.qtensor import QTensor
from tests.ops import cases
from tests.ops.compare import tensors
from tests.ops.forms import FORMS

SEEDS = range(12)


def counted_flops(name: str, args: tuple[Any, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        FORMS[name].body(*args)
    return counter.get_total_flops()


def touched(name: str, made: cases.Case) -> tuple[int, int]:
    """Bytes that the body reads and writes, observed from outside: an element is read if a result depends on it
    (nonzero
    gradient), and written if it is new or has changed."""
    leaves: dict[int, Tensor] = {}
    args = list(made.args)
    for i, arg in enumerate(args):
        if isinstance(arg, QTensor):
            leaves[i] = arg.parts["data"].requires_grad_()
        elif isinstance(arg, Epilogue) and arg.bias is not None:
            leaves[i] = arg.bias.detach().clone().requires_grad_()
            args[i] = arg._replace(bias=leaves[i].clone())
        elif isinstance(arg, Tensor) and arg.is_floating_point():
            leaves[i] = arg.detach().clone().requires_grad_()
            args[i] = leaves[i].clone()
    before = {i: args[i].detach().clone() for i in made.written}
    results = tensors(FORMS[name].body(*args))
    # A changed argument counts as a result only where it was written.
    written = {i: (args[i].detach() != before[i]) & ~(args[i].detach().isnan() & before[i].isnan()) for i in before}
    outputs = [*results, *(args[i][mask] for i, mask in written.items())]
    noise = torch.Generator().manual_seed(1)
    total = sum((out * torch.rand(out.shape, generator=noise, dtype=out.dtype).add(1)).sum() for out in outputs)
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    read = sum(
        int((gradient.nan_to_num() != 0).sum()) * gradient.element_size() for gradient in found if gradient is not None
    )
    read += sum(nbytes(arg) for arg in made.args if isinstance(arg, Tensor) and not arg.is_floating_point())
    write = sum(nbytes(out) for out in results) + sum(int(m.sum()) * args[i].element_size() for i, m in written.items())
    return read, write


def settled(name: str, made: cases.Case) -> bool:
    """Excludes inputs for which "each operand moves once" and "results depend on it" differ."""
    if name == "ssd_scan" and made.args[7] != (0.0, float("inf")):
        return False  # a time step beyond a limit has no gradient
    if name in (
        "causal_conv",
        "causal_conv_silu",
        "selective_scan",
        "ssd_scan",
        "diagonal_scan",
        "linear_attention",
        "delta_rule",
    ):
        return len(set(made.args[-1].read.tolist())) == len(
            made.args[-1].read
        )  # a slot read by two sequences moves twice
    if name == "embedding":
        return len(set(made.args[0].tolist())) == len(made.args[0])  # so does a row
    if name == "gated_linear":
        return bool(made.args[-1].gate != "relu")  # flat: half of the inputs have no gradient
    if name in ("activate", "activate_mul"):
        return made.args[-1] != "relu"  # flat: half of the inputs have no gradient
    if name == "expert_mlp":  # the cost is an expectation, which is certain where all tokens use the same experts
        chosen, kind = made.args[1], made.args[-1]
        return kind not in ("relu", "clamped_swiglu") and (len(chosen) == 1 or chosen.shape[1] == made.args[3].shape[0])
    if name == "soft_cap":
        return made.args[1] > 10  # a low cap is flat for large inputs
    if name in ("rms_norm", "add_rms_norm", "layer_norm"):
        return made.args[0].shape[-1] > 2  # one element is its own mean; for two only their order matters
    if name == "merge_partials":
        return len(made.args[0]) > 1  # alone, a part has all weight
    if name == "paged_attention":
        if is_rounded(made.facts["pages"]):
            return False  # codes have no gradient
        meta, window = made.args[3], made.args[5]  # a query that sees one key ignores the key
        return window != 1 and bool((meta.kv_len > np.diff(meta.q_start)).all())
    return True


NO_SLOPE = {
    "linear_bf16",
    "linear_int8",
    "linear_hadamard",
    "best_linear",
    "best_linear_bf16",
    "best_linear_int8",
    "best_linear_hadamard",
    "linear_w8a8",
    "best_linear_w8a8",
}
"""Rounding and argmax: they have no gradient. They are linear layers with another output."""
EXPERTS = {"route", "expert_mlp_bf16", "expert_mlp_int8"}
"""Rounding and integers again: see test_experts.py."""


@pytest.mark.parametrize("name", sorted(NO_SLOPE))
def test_a_rounded_linear_or_argmax_reads_what_a_linear_reads(name: str) -> None:
    for seed in range(20):
        made = cases.case(name, seed)
        cost, plain = FORMS[name].cost(*made.args), FORMS["linear"].cost(*made.args)
        assert (cost.flops, cost.read) == (plain.flops, plain.read)
        assert cost.write == nbytes(FORMS[name].body(*made.args))


ROUNDED_TO = {
    "own": ["linear", "best_linear", "gated_linear", "normed_linear", "normed_gated_linear", "normed_best_linear"],
    "bf16": ["linear_bf16", "best_linear_bf16", "expert_mlp_bf16"],
    "int8": ["linear_int8", "best_linear_int8", "linear_hadamard", "best_linear_hadamard", "expert_mlp_int8"],
    "its weight": [name for name in FORMS if name.endswith("w8a8")],
}


@pytest.mark.parametrize(("name", "operands"), [(name, kind) for kind, names in ROUNDED_TO.items() for name in names])
def test_products_are_counted_on_the_operands_that_they_multiply(name: str, operands: str) -> None:
    for seed in range(20):
        made = cases.case(name, seed)
        cost = FORMS[name].cost(*made.args)
        wanted = operands
        if operands == "its weight":
            wanted = "fp8" if made.args[1].scheme.name == "fp8" else "int8"
        norm = made.args[0].cost.flops if isinstance(made.args[0], Unnormed) else 0.0
        assert getattr(cost, wanted) == (cost.flops if wanted == "own" else cost.flops - norm) > 0
        assert cost.own + cost.bf16 + cost.int8 + cost.fp8 == pytest.approx(cost.flops)


def test_attention_over_narrow_pages_may_multiply_in_bfloat16() -> None:
    q, k, v, *rest = cases.case("paged_attention", 0).args
    for dtype, pages, wanted in (
        (torch.float32, torch.float32, "own"),
        (torch.float32, torch.bfloat16, "bf16"),
        (torch.bfloat16, torch.bfloat16, "own"),
        (torch.float64, torch.float64, "own"),
    ):
        cost = FORMS["paged_attention"].cost(q.to(dtype), k.to(pages), v.to(pages), *rest)
        assert cost.operands == [wanted], (dtype, pages)


def test_outlier_columns_cost_a_product_of_their_own() -> None:
    for seed in range(20):
        x, weight, epilogue = cases.case("linear_outliers", seed).args
        columns, kept = weight.outliers
        cost, plain = (
            FORMS["linear_outliers"].cost(x, weight, epilogue),
            FORMS["linear"].cost(x, weight.as_stored, epilogue),
        )
        assert cost.flops - plain.flops == 2 * x.numel() // x.shape[-1] * kept.numel()
        assert cost.read - plain.read == nbytes(columns, kept)
        assert cost.write == plain.write
        assert cost.int8 == plain.flops


OUTLIERS = {name for name in FORMS if name.endswith("_outliers")}
"""They round, and have their own tests."""
LATENT = {"head_products", "absorb_queries", "write_latents", "latent_attention", "expanded_attention"}
GATED_W8A8 = {"gated_linear_w8a8", "normed_linear_w8a8", "normed_gated_linear_w8a8"}
COMPOSED = {"attend", "normed_linear", "normed_best_linear", "normed_gated_linear", *GATED_W8A8, *LATENT}
"""Their operands are inside records, which have no gradient: compared with their parts instead."""


@pytest.mark.parametrize("name", [name.removeprefix("normed_") for name in sorted(FORMS) if name.startswith("normed_")])
def test_a_fused_norm_saves_memory_traffic(name: str) -> None:
    for seed in range(40):
        made = cases.case(f"normed_{name}", seed)
        x, *others = made.args
        joined = FORMS["add_rms_norm"].cost(x.x, x.delta, x.weight, x.eps, x.offset)
        apart, together = joined + FORMS[name].cost(x.x, *others), FORMS[f"normed_{name}"].cost(*made.args)
        assert together.flops == apart.flops
        assert together.read == apart.read - nbytes(x.x)
        assert together.write == apart.write - nbytes(x.x)


INTEGERS = {"write_pages_int8", "write_pages_fp8", "write_pages_int4", "move_tokens"}
"""They write integers, which have no gradient: see below."""

RANKS = {"cross", "dispatch"}
"""Rows that come from other ranks have no gradient here, nor do numbers of rows: see tests/parallel."""

SPREAD = {
    "all_reduce",
    "exchange_parts",
    "gather_outputs",
    "gather_rows",
    "partial_attention",
    "reduce_scatter",
    "spread_embedding",
    "spread_rms_norm",
    "receive_rows",
    "send_rows",
}
"""Operands or keys are on other ranks, which have no gradient here: see test_rank_costs.py."""


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "name", sorted(set(FORMS) - NO_SLOPE - OUTLIERS - EXPERTS - COMPOSED - INTEGERS - RANKS - SPREAD)
)
def test_declared_bytes_are_the_bytes_touched(name: str) -> None:
    checked = 0
    for seed in range(90):
        make = cases.Maker(seed, torch.float64)
        make.scheme = lambda: SCHEMES["f64"]  # type: ignore[method-assign]
        made = cases.GENERATORS[name](make)
        if not settled(name, made):
            continue
        declared = FORMS[name].cost(*made.args)
        read, write = touched(name, made)
        assert (declared.read, declared.write) == (read, write), f"seed {seed}"
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("scheme", cases.WEIGHTS)
def test_a_weight_costs_the_bytes_of_its_scheme(scheme: str) -> None:
    make = cases.Maker(3, torch.float32)
    block = cases.WEIGHTS[scheme].block
    inner = 512 if block > 1 else 96
    weight = make.weight(cases.WEIGHTS[scheme], 10, inner)
    stored = 10 * cases.WEIGHTS[scheme].row_bytes(inner)
    x, ids = torch.zeros(4, inner), torch.tensor([1, 5, 9])
    flops = 2 * 4 * 10 * inner * cases.WEIGHTS[scheme].density
    assert FORMS["linear"].cost(x, weight) == Cost(flops, 4 * inner * 4 + stored, 4 * 10 * 4)
    expected = Cost(0, 3 * stored / 10 + 3 * 8, 3 * inner * 2)
    assert FORMS["embedding"].cost(ids, weight, torch.bfloat16) == expected


def test_state_in_another_dtype_is_moved_in_that_dtype() -> None:
    new, pages, slots = torch.zeros(3, 2, 5), torch.zeros(4, 8, 2, 5, dtype=torch.bfloat16), torch.tensor([1, 9, 30])
    assert FORMS["write_pages"].cost(new, pages, slots) == Cost(0, 3 * 2 * 5 * 4 + 3 * 8, 3 * 2 * 5 * 2)


def test_a_moved_token_costs_the_bytes_of_its_segments() -> None:
    frames, slots = torch.zeros(4, 800, dtype=torch.uint8), torch.tensor([[3, 4], [17, 30]])
    moved = FORMS["move_tokens"].cost(frames, ((0, 40), (320, 10)), 8, slots, slots)
    assert moved == Cost(0, 4 * 50 + 2 * 4 * 8, 4 * 50)


def test_int8_state_costs_a_byte_per_element_and_a_scale_per_head() -> None:
    new, slots = torch.zeros(3, 2, 5, dtype=torch.bfloat16), torch.tensor([1, 9, 30])
    pages, scales = torch.zeros(4, 8, 2, 5, dtype=torch.int8), torch.zeros(4, 8, 2)
    written = FORMS["write_pages_int8"].cost(new, pages, scales, slots)
    assert (written.read, written.write) == (3 * 2 * 5 * 2 + 3 * 8, 3 * 2 * 5 + 3 * 2 * 4)
    q = torch.zeros(3, 4, 5)
    meta = cases.PagedMeta(np.array([0, 1, 3]), np.array([7, 9]), torch.ones(2, 2, dtype=torch.long), slots, 8)
    read = FORMS["paged_attention"].cost(q, pages, pages, meta, 1.0, None, None, scales, scales)
    plain = FORMS["paged_attention"].cost(q, pages.float(), pages.float(), meta, 1.0)
    assert read.read == nbytes(q) + (7 + 9) * 2 * (2 * 5 + 2 * 4)
    assert (read.flops, read.write) == (plain.flops, plain.write)


@pytest.mark.parametrize("name", ["linear", "causal_conv", "causal_conv_silu"])
def test_declared_flops_are_those_that_torch_counts(name: str) -> None:
    for seed in SEEDS:
        made = cases.case(name, seed)
        assert FORMS[name].cost(*made.args).flops == counted_flops(name, made.args)


def test_attention_one_token_at_a_time_declares_what_torch_counts() -> None:
    for seed in SEEDS:
        make = cases.Maker(seed)
        kv, groups, size = make.size(1, 3), make.size(1, 4), make.size(1, 20)
        k_pages, v_pages, meta = cases.paged(make, kv, size, size, None)
        rows = np.arange(len(meta.kv_len) + 1)
        meta = cases.PagedMeta(rows, meta.kv_len, meta.pages, meta.slots, meta.page_tokens)
        args = (make.normal(len(meta.kv_len), kv * groups, size), k_pages, v_pages, meta, 1.0)
        assert FORMS["paged_attention"].cost(*args).flops == counted_flops("paged_attention", args)


def test_attention_of_many_tokens_declares_only_the_visible_part_of_what_the_body_computes() -> None:
    """The body multiplies the whole rectangle and masks it; the cost is the visible part, the minimum."""
    for seed in range(40):
        args = cases.case("paged_attention", seed).args
        q, meta, window = args[0], args[3], args[5]
        width = 2 * q.shape[1] * (q.shape[2] + head_numbers(args[2]))
        rectangle = visible = 0
        for count, length in zip(np.diff(meta.q_start).tolist(), meta.kv_len.tolist(), strict=True):
            begin = live_from(count, length, window) // meta.page_tokens * meta.page_tokens
            rectangle += count * (length - begin)
            keys, queries = np.arange(length)[None], np.arange(length - count, length)[:, None]
            mask = (keys <= queries) & (keys > queries - (window or length))
            visible += int(mask.sum())
            assert int(mask.sum()) == visible_pairs(count, length, window)
        assert counted_flops("paged_attention", args) == width * rectangle
        assert FORMS["paged_attention"].cost(*args).flops == width * visible


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_meter_records_on_meta_what_real_tensors_cost(name: str) -> None:
    meter = Meter()
    run = meter.bind(OPERATIONS[FORMS[name].name], **cases.case(name, 0).facts)
    for seed in SEEDS:
        made = cases.case(name, seed)
        run(*made.to("meta").args)
        assert meter.take().total == {name: FORMS[name].cost(*made.args)}


def test_a_ledger_adds_up_calls_and_costs_by_operation() -> None:
    meter = Meter()
    run = meter.bind(FORMS["soft_cap"])
    for rows in (1, 2):
        run(torch.empty(rows, 3, device="meta"), 2.0)
    first = meter.take()
    assert first.calls == {"soft_cap": 2} and first.sum() == Cost(90.0, 36.0, 36.0)
    first.merge(first, "head")
    assert list(first.calls) == ["soft_cap", "head/soft_cap"] and first.sum() == Cost(180.0, 72.0, 72.0)
    assert meter.take().total == {}


def test_attending_reads_each_key_once_whether_new_or_old() -> None:
    """Keys and values written to the pages are not read from there; the rest is the cost of its parts."""
    for seed in range(40):
        made = cases.case("attend", seed)
        q, k, v, k_pages, v_pages, meta, angles, norms, scale, window, cap, sinks = made.args
        plain = FORMS["paged_attention"].cost(q, k_pages, v_pages, meta, scale, window, cap, sinks=sinks)
        declared = FORMS["attend"].cost(*made.args)
        assert declared.write == plain.write + nbytes(k, v)
        extra = nbytes(meta.slots, *(angles or ())) + (nbytes(norms.q, norms.k) if norms else 0)
        assert declared.read == plain.read + extra
        assert (declared.flops == plain.flops) == (angles is None and norms is None)
        # A layer that shares keys and values writes none.
        shared = FORMS["attend"].cost(q, None, None, *made.args[3:])
        assert shared.write == plain.write and plain.flops <= shared.flops <= declared.flops
        assert shared.read == plain.read + nbytes(*(angles or ())) + (nbytes(norms.q) if norms else 0)
