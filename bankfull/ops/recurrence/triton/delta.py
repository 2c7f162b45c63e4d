"""The gated delta rule over ragged batches: a program handles one sequence, one head and a block of columns.

Many tokens are taken in chunks (`linear_attention.chunk_for`). Within a chunk, the corrections u of all
tokens solve a triangular system, (1 + A) u = beta (v - decay k h), A[i, j] = beta[i] (k[i] k[j]) decay(j -> i) for j <
i. A first kernel inverts 1 + A for all chunks at once; a second one walks through the chunks of a sequence with matrix
products. Tokens whose states are kept, and short sequences, are taken one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bankfull.ops.pointwise.triton import softplus
from bankfull.ops.recurrence.delta import delta_rule
from bankfull.ops.recurrence.ssm import RecurrentMeta
from bankfull.ops.recurrence.triton.linear_attention import LAUNCH, AttentionTile, chunk_for, columns_for
from bankfull.ops.recurrence.triton.operands import (
    HeadInputs,
    SequenceStates,
    keys_of,
    queries_of,
    read_slot,
    span,
    values_of,
    written_slot,
)
from bankfull.ops.triton.launch import cdiv, overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import HeadRows, accepts, contiguous_rows, preloadable, supported

MOST_PIECES = 64
"""Programs that share the chunks of one sequence when their systems are inverted."""


@triton.jit
def units(x, token, head, row, used, has_row, scale):
    """Queries or keys of a chunk, divided by their lengths."""
    rows = used[:, None] & has_row[None, :]
    part = tl.load(x.at + token[:, None] * x.token + head * x.head + row[None, :], rows, 0.0).to(tl.float32)
    return part * (scale / tl.sqrt(tl.sum(part * part, 1) + 1e-6))[:, None]


@triton.jit
def unit(x, token, head, row, has_row, scale):
    part = tl.load(x.at + token * x.token + head * x.head + row, has_row, 0.0).to(tl.float32)
    return part * (scale / tl.sqrt(tl.sum(part * part, 0) + 1e-6))


@triton.jit
def passed(a, a_token, token, head, rate, shift, used):
    """The logarithm of the decay from the chunk's beginning to each token."""
    logs = rate * softplus(tl.load(a + token * a_token + head, used, 0.0).to(tl.float32) + shift)
    return tl.cumsum(tl.where(used, logs, 0.0), 0)


@triton.jit
def strengths(b, b_token, token, head, used):
    raw = tl.load(b + token * b_token + head, used, 0.0).to(tl.float32)
    return tl.where(used, 1.0 / (1.0 + tl.exp(-raw)), 0.0)


@triton.jit
def decays(log, place):
    """exp of the decay between two tokens of a chunk; 0 above the diagonal, where it would overflow."""
    lower = place[:, None] >= place[None, :]
    return tl.where(lower, tl.exp(tl.where(lower, log[:, None] - log[None, :], 0.0)), 0.0)


@triton.jit
def delta_inverse_kernel(
    k,
    k_token,
    k_head,
    a,
    a_token,
    b,
    b_token,
    rate,
    shift,
    inverse,
    starts,
    kepts,
    heads,
    shared,
    key,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: programs that take a sequence's chunks in turns, 1: heads, 2: sequences."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, place = tl.arange(0, TILE.key), tl.arange(0, TILE.chunk)
    has_row = row < key
    own_rate, own_shift = tl.load(rate + head).to(tl.float32), tl.load(shift + head).to(tl.float32)
    key_rows = HeadRows(k, k_token, k_head)
    first, last, kept = span(starts, kepts, sequence)
    end = last - kept
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for start in range(first + tl.program_id(0) * TILE.chunk, end, tl.num_programs(0) * TILE.chunk):
        token = start + place
        used = token < end
        keys = units(key_rows, token, head // shared, row, used, has_row, 1.0)
        log = passed(a, a_token, token, head, own_rate, own_shift, used)
        beta = strengths(b, b_token, token, head, used)
        system = tl.dot(keys, tl.trans(keys), input_precision=TILE.precision) * decays(log, place) * beta[:, None]
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        found = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for i in range(1, TILE.chunk):  # each row follows from those above it
            chosen = place[:, None] == i
            factors = tl.sum(tl.where(chosen, system, 0.0), 0)
            found -= tl.where(chosen, tl.sum(factors[:, None] * found, 0)[None, :], 0.0)
        places = inverse + (token[:, None] * heads + head) * TILE.chunk + place[None, :]
        tl.store(places, found, used[:, None] & (place[None, :] < TILE.chunk))


@triton.jit(do_not_specialize=["write_stride"])
def delta_rule_kernel(
    inputs,
    a,
    a_token,
    b,
    b_token,
    rate,
    shift,
    inverse,
    states,
    y,
    write_stride,
    heads,
    shared,
    key,
    value,
    scale,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of columns, 1: heads, 2: sequences."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, TILE.key), tl.program_id(0) * TILE.columns + tl.arange(0, TILE.columns)
    has_row, has_column = row < key, column < value
    inside = has_row[:, None] & has_column[None, :]
    own_rate, own_shift = tl.load(rate + head).to(tl.float32), tl.load(shift + head).to(tl.float32)
    q, k, v = queries_of(inputs), keys_of(inputs), values_of(inputs)
    # Counts and states were written before this step, so they may be read before the inputs are ready.
    first, last, kept = span(states.starts, states.kepts, sequence)
    past = read_slot(states, sequence) * states.slot
    own = head * states.head + row[:, None] * states.row + column[None, :] * states.column
    h = tl.load(states.at + past + own, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin = first
    if TILE.chunk > 0:
        place = tl.arange(0, TILE.chunk)
        dtype: tl.constexpr = q.at.dtype.element_ty
        end = last - kept
        for start in range(first, end, TILE.chunk):
            token = start + place
            used = token < end
            cells = used[:, None] & has_column[None, :]
            # Operands are rounded to the inputs' dtype, except those of the solved system; sums stay in float32.
            queries = units(q, token, head // shared, row, used, has_row, scale).to(dtype)
            keys = units(k, token, head // shared, row, used, has_row, 1.0)
            log = passed(a, a_token, token, head, own_rate, own_shift, used)
            since = tl.exp(log)[:, None]
            before = h.to(dtype)
            values = tl.load(v.at + token[:, None] * v.token + head * v.head + column[None, :], cells, 0.0).to(
                tl.float32
            )
            errors = values - since * tl.dot(keys.to(dtype), before, input_precision="ieee")
            errors *= strengths(b, b_token, token, head, used)[:, None]
            places = inverse + (token[:, None] * heads + head) * TILE.chunk + place[None, :]
            solved = tl.load(places, used[:, None] & (place[None, :] < TILE.chunk), 0.0)
            new = tl.dot(solved, errors, input_precision=TILE.precision).to(dtype)
            scores = tl.dot(queries, tl.trans(keys.to(dtype)), input_precision="ieee") * decays(log, place)
            out = since * tl.dot(queries, before, input_precision="ieee")
            out += tl.dot(scores.to(dtype), new, input_precision="ieee")
            tl.store(y + (token[:, None] * heads + head) * value + column[None, :], out.to(y.dtype.element_ty), cells)
            # Unused places add nothing to the sums, so the last one has the decay of the whole chunk.
            whole = tl.sum(tl.where(place == TILE.chunk - 1, log, 0.0), 0)
            remaining = (keys * tl.exp(whole - log)[:, None]).to(dtype)
            h = tl.exp(whole) * h + tl.dot(tl.trans(remaining), new, input_precision="ieee")
        begin = tl.maximum(first, end)
    for token in range(begin, last):
        query = unit(q, token, head // shared, row, has_row, scale)
        into = unit(k, token, head // shared, row, has_row, 1.0)
        new = tl.load(v.at + token * v.token + head * v.head + column, has_column, 0.0).to(tl.float32)
        gate = tl.load(a + token * a_token + head).to(tl.float32) + own_shift
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_token + head).to(tl.float32)))
        h = tl.exp(own_rate * softplus(gate)) * h
        new = beta * (new - tl.sum(into[:, None] * h, 0))
        h += into[:, None] * new[None, :]
        result = tl.sum(query[:, None] * h, 0)
        tl.store(y + (token * heads + head) * value + column, result.to(y.dtype.element_ty), has_column)
        number = kept - (last - token)
        if number >= 0:
            slot = written_slot(states, sequence, number, write_stride) * states.slot
            tl.store(states.at + slot + own, h.to(states.at.dtype.element_ty), inside)


@delta_rule.provider("triton", on="cuda", accepts=accepts)
def run_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    shift: Tensor,
    state: Tensor,
    meta: RecurrentMeta,
) -> Tensor:
    if not supported(q, k, v, a, b, rate, shift, state) or not preloadable(rate, shift):
        return delta_rule.body(q, k, v, a, b, rate, shift, state, meta)
    (tokens, key_heads, key), (heads, value), sequences = q.shape, v.shape[1:], len(meta.q_start) - 1
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    inner = max(16, power_of_two(key))
    chunk = chunk_for(tokens, sequences, meta.write.shape[1], q.dtype, inner)
    block = columns_for(inner, value, sequences * heads, v.device)
    tile = AttentionTile(chunk, inner, block, "ieee" if q.dtype == torch.float32 else "tf32")
    if not y.numel() or not sequences:
        return y
    inputs, states = HeadInputs.of(q, k, v), SequenceStates.of(state, meta)
    gates, betas = contiguous_rows(a), contiguous_rows(b)
    strengths = gates, gates.stride(0), betas, betas.stride(0), rate, shift
    shared, inverse = heads // key_heads, y
    if chunk:
        inverse = torch.empty(tokens, heads, chunk, dtype=torch.float32, device=v.device)
        grid = min(MOST_PIECES, cdiv(tokens - sequences + 1, chunk)), heads, sequences
        keys, sizes = (inputs.k, inputs.k_token, inputs.k_head), (heads, shared, key, tile._replace(columns=0))
        arguments = (*keys, *strengths, inverse, states.starts, states.kepts, *sizes)
        delta_inverse_kernel[grid](*arguments, **LAUNCH, **overlapped(v))
    delta_rule_kernel[(cdiv(value, block), heads, sequences)](
        inputs,
        *strengths,
        inverse,
        states,
        y,
        meta.write.stride(0),
        heads,
        shared,
        key,
        value,
        key**-0.5,
        tile,
        **LAUNCH,
        **overlapped(v),
    )
    return y
