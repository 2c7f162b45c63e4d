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
from bankfull.ops.recurrence.triton.linear_attention import LAUNCH, chunk_for, columns_for
from bankfull.ops.recurrence.triton.ssm import on_device
from bankfull.ops.triton.launch import overlapped, power_of_two, start_next, wait_for_inputs
from bankfull.ops.triton.rows import accepts, contiguous_rows, preloadable, supported

MOST_PIECES = 64
"""Programs that share the chunks of one sequence when their systems are inverted."""


@triton.jit
def units(x, token, head, x_token, x_head, row, used, has_row, scale):
    """Queries or keys of a chunk, divided by their lengths."""
    rows = used[:, None] & has_row[None, :]
    part = tl.load(x + token[:, None] * x_token + head * x_head + row[None, :], rows, 0.0).to(tl.float32)
    return part * (scale / tl.sqrt(tl.sum(part * part, 1) + 1e-6))[:, None]


@triton.jit
def unit(x, token, head, x_token, x_head, row, has_row, scale):
    part = tl.load(x + token * x_token + head * x_head + row, has_row, 0.0).to(tl.float32)
    return part * (scale / tl.sqrt(tl.sum(part * part, 0) + 1e-6))


@triton.jit
def passed(a, token, a_token, head, rate, shift, used):
    """The logarithm of the decay from the chunk's beginning to each token."""
    logs = rate * softplus(tl.load(a + token * a_token + head, used, 0.0).to(tl.float32) + shift)
    return tl.cumsum(tl.where(used, logs, 0.0), 0)


@triton.jit
def strengths(b, token, b_token, head, used):
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
    a,
    b,
    rate,
    shift,
    inverse,
    starts,
    kepts,
    heads,
    shared,
    key,
    k_token,
    k_head,
    a_token,
    b_token,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: programs that take a sequence's chunks in turns, 1: heads, 2: sequences."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, place = tl.arange(0, KEY), tl.arange(0, CHUNK)
    has_row = row < key
    own_rate, own_shift = tl.load(rate + head).to(tl.float32), tl.load(shift + head).to(tl.float32)
    first = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64) - tl.load(kepts + sequence)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    for start in range(first + tl.program_id(0) * CHUNK, end, tl.num_programs(0) * CHUNK):
        token = start + place
        used = token < end
        keys = units(k, token, head // shared, k_token, k_head, row, used, has_row, 1.0)
        log = passed(a, token, a_token, head, own_rate, own_shift, used)
        beta = strengths(b, token, b_token, head, used)
        system = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decays(log, place) * beta[:, None]
        system = tl.where(place[:, None] > place[None, :], system, 0.0)
        found = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
        for i in range(1, CHUNK):  # each row follows from those above it
            chosen = place[:, None] == i
            factors = tl.sum(tl.where(chosen, system, 0.0), 0)
            found -= tl.where(chosen, tl.sum(factors[:, None] * found, 0)[None, :], 0.0)
        places = inverse + (token[:, None] * heads + head) * CHUNK + place[None, :]
        tl.store(places, found, used[:, None] & (place[None, :] < CHUNK))


@triton.jit(do_not_specialize=["write_stride"])
def delta_rule_kernel(
    q,
    k,
    v,
    a,
    b,
    rate,
    shift,
    inverse,
    state,
    y,
    starts,
    kepts,
    read,
    write,
    heads,
    shared,
    key,
    value,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    a_token,
    b_token,
    slot_stride,
    head_stride,
    row_stride,
    column_stride,
    write_stride,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    KEY: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Axis 0: blocks of columns, 1: heads, 2: sequences. CHUNK 0: all tokens one by one."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    row, column = tl.arange(0, KEY), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_row, has_column = row < key, column < value
    inside = has_row[:, None] & has_column[None, :]
    own_rate, own_shift = tl.load(rate + head).to(tl.float32), tl.load(shift + head).to(tl.float32)
    # Counts and states were written before this step, so they may be read before the inputs are ready.
    first, last = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    kept = tl.load(kepts + sequence)
    past = tl.load(read + sequence).to(tl.int64) * slot_stride
    own = head * head_stride + row[:, None] * row_stride + column[None, :] * column_stride
    h = tl.load(state + past + own, inside, 0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)
    begin = first
    if CHUNK > 0:
        place = tl.arange(0, CHUNK)
        dtype: tl.constexpr = q.dtype.element_ty
        end = last - kept
        for start in range(first, end, CHUNK):
            token = start + place
            used = token < end
            cells = used[:, None] & has_column[None, :]
            # Operands are rounded to the inputs' dtype, except those of the solved system; sums stay in float32.
            queries = units(q, token, head // shared, q_token, q_head, row, used, has_row, scale).to(dtype)
            keys = units(k, token, head // shared, k_token, k_head, row, used, has_row, 1.0)
            log = passed(a, token, a_token, head, own_rate, own_shift, used)
            since = tl.exp(log)[:, None]
            before = h.to(dtype)
            values = tl.load(v + token[:, None] * v_token + head * v_head + column[None, :], cells, 0.0).to(tl.float32)
            errors = values - since * tl.dot(keys.to(dtype), before, input_precision="ieee")
            errors *= strengths(b, token, b_token, head, used)[:, None]
            places = inverse + (token[:, None] * heads + head) * CHUNK + place[None, :]
            solved = tl.load(places, used[:, None] & (place[None, :] < CHUNK), 0.0)
            new = tl.dot(solved, errors, input_precision=PRECISION).to(dtype)
            scores = tl.dot(queries, tl.trans(keys.to(dtype)), input_precision="ieee") * decays(log, place)
            out = since * tl.dot(queries, before, input_precision="ieee")
            out += tl.dot(scores.to(dtype), new, input_precision="ieee")
            tl.store(y + (token[:, None] * heads + head) * value + column[None, :], out.to(y.dtype.element_ty), cells)
            # Unused places add nothing to the sums, so the last one has the decay of the whole chunk.
            whole = tl.sum(tl.where(place == CHUNK - 1, log, 0.0), 0)
            remaining = (keys * tl.exp(whole - log)[:, None]).to(dtype)
            h = tl.exp(whole) * h + tl.dot(tl.trans(remaining), new, input_precision="ieee")
        begin = tl.maximum(first, end)
    for token in range(begin, last):
        query = unit(q, token, head // shared, q_token, q_head, row, has_row, scale)
        into = unit(k, token, head // shared, k_token, k_head, row, has_row, 1.0)
        new = tl.load(v + token * v_token + head * v_head + column, has_column, 0.0).to(tl.float32)
        gate = tl.load(a + token * a_token + head).to(tl.float32) + own_shift
        beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_token + head).to(tl.float32)))
        h = tl.exp(own_rate * softplus(gate)) * h
        new = beta * (new - tl.sum(into[:, None] * h, 0))
        h += into[:, None] * new[None, :]
        result = tl.sum(query[:, None] * h, 0)
        tl.store(y + (token * heads + head) * value + column, result.to(y.dtype.element_ty), has_column)
        number = kept - (last - token)
        if number >= 0:
            slot = tl.load(write + sequence * write_stride + number).to(tl.int64) * slot_stride
            tl.store(state + slot + own, h.to(state.dtype.element_ty), inside)


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
    chunk, precision = (
        chunk_for(tokens, sequences, meta.write.shape[1], q.dtype, inner),
        "ieee" if q.dtype == torch.float32 else "tf32",
    )
    block = columns_for(inner, value, sequences * heads, v.device)
    queries, keys, values, gates, betas = (contiguous_rows(part) for part in (q, k, v, a, b))
    starts, kepts = on_device(meta.starts, meta.q_start, v), on_device(meta.kepts, meta.kept, v)
    if not y.numel() or not sequences:
        return y
    inverse = y
    if chunk:
        inverse = torch.empty(tokens, heads, chunk, dtype=torch.float32, device=v.device)
        pieces = min(MOST_PIECES, triton.cdiv(tokens - sequences + 1, chunk))
        delta_inverse_kernel[(pieces, heads, sequences)](
            keys,
            gates,
            betas,
            rate,
            shift,
            inverse,
            starts,
            kepts,
            heads,
            heads // key_heads,
            key,
            *keys.stride()[:2],
            gates.stride(0),
            betas.stride(0),
            CHUNK=chunk,
            PRECISION=precision,
            KEY=inner,
            **LAUNCH,
            **overlapped(v),
        )
    delta_rule_kernel[(triton.cdiv(value, block), heads, sequences)](
        queries,
        keys,
        values,
        gates,
        betas,
        rate,
        shift,
        inverse,
        state,
        y,
        starts,
        kepts,
        meta.read,
        meta.write,
        heads,
        heads // key_heads,
        key,
        value,
        key**-0.5,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        gates.stride(0),
        betas.stride(0),
        *state.stride(),
        meta.write.stride(0),
        CHUNK=chunk,
        PRECISION=precision,
        KEY=inner,
        VALUES=block,
        **LAUNCH,
        **overlapped(v),
    )
    return y
