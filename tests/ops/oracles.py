"""Independent definitions of the operations: numpy, float64, one token, head or channel at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import Epilogue, HeadNorms, PagedMeta, RecurrentMeta, Unnormed
from bankfull.weights.qtensor import QTensor

Array = np.ndarray


def f64(tensor: Tensor) -> Array:
    return tensor.detach().to(torch.float64).numpy().copy()


def linear(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    out = f64(x) @ f64(weight.dequantize(x.dtype)).T
    return out if bias is None else out + f64(bias)


def linear_bf16(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    """Eight bits of mantissa, ties to even; rounded from float32."""
    mantissa, exponent = np.frexp(x.to(torch.float32).numpy())
    rows = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    return linear(torch.from_numpy(rows).to(x.dtype), weight, bias)


def linear_int8(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    """Codes are rounded in the operation's precision: a tie must fall the same way."""
    rows = x.numpy().copy() if x.dtype == torch.float64 else x.to(torch.float32).numpy().copy()
    for row in rows.reshape(-1, rows.shape[-1]):
        for at in range(0, len(row), 32):
            group = row[at : at + 32]
            largest = abs(group).max()
            if largest > 0:
                group[:] = np.rint(group * (group.dtype.type(127) / largest)) * (largest / group.dtype.type(127))
    return linear(torch.from_numpy(rows).to(x.dtype), weight, bias)


def hadamard_rows(x: Tensor) -> Array:
    """Column j of 64 is the sum of all columns, with the parity of the common bits of both indices as sign, over 8;
    summed
    and rounded in the operation's precision, to codes with one scale per row."""
    rows = x.numpy().copy() if x.dtype == torch.float64 else x.to(torch.float32).numpy().copy()
    for row in rows.reshape(-1, rows.shape[-1]):
        for at in range(0, len(row), 64):
            for apart in (1, 2, 4, 8, 16, 32):
                for i in range(at, at + 64):
                    if not (i - at) & apart:
                        row[i], row[i + apart] = row[i] + row[i + apart], row[i] - row[i + apart]
        row /= row.dtype.type(8)
        largest = abs(row).max()
        if largest > 0:
            row[:] = np.rint(row * (row.dtype.type(127) / largest)) * (largest / row.dtype.type(127))
    return rows


def linear_hadamard(x: Tensor, weight: QTensor, bias: Tensor | None = None) -> Array:
    out = hadamard_rows(x).astype(np.float64) @ hadamard_rows(weight.dequantize(x.dtype)).astype(np.float64).T
    return out if bias is None else out + f64(bias)


def read(x: Unnormed) -> Tensor:
    stream = torch.from_numpy(f64(x.x) + f64(x.delta)).to(x.x.dtype)
    return torch.from_numpy(rms_norm(stream, x.weight, x.eps, x.offset)).to(stream.dtype)


def with_epilogue(product: Callable[[Tensor, QTensor, Tensor | None], Array]) -> Callable[..., Array]:
    """The oracle of an operation, from that of its product."""

    def oracle(x: Tensor | Unnormed, weight: QTensor, epilogue: Epilogue) -> Array:
        rows = read(x) if isinstance(x, Unnormed) else x
        outputs = product(rows, weight, epilogue.bias)
        if epilogue.gate:
            gate, up = (torch.from_numpy(half).to(rows.dtype) for half in np.split(outputs, 2, -1))
            outputs = activate_mul(gate, up, epilogue.gate)
        return outputs.argmax(-1) if epilogue.best else outputs

    return oracle


def embedding(ids: Tensor, table: QTensor, dtype: torch.dtype, scale: float = 1.0) -> Array:
    return f64(table.dequantize(dtype))[ids.numpy()] * scale


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Array:
    rows, gain = f64(x), f64(weight)
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * (gain + offset)


def add(x: Tensor, delta: Tensor) -> Array:
    return f64(x) + f64(delta)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Array, Array]:
    # The residual stream is rounded to its dtype before the norm: the next block sees the rounded one.
    rows = f64(x + delta)
    gain = f64(weight)
    return f64(x) + f64(delta), rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * (gain + offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Array:
    rows = f64(x)
    centred = rows - rows.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * f64(weight) + f64(bias)


def soft_cap(x: Tensor, cap: float) -> Array:
    return cap * np.tanh(f64(x) / cap)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Array:
    """Each pair of dimensions is a complex number, rotated by multiplication."""
    out, half = f64(x), cos.shape[1]
    turn = (f64(cos) + 1j * f64(sin))[:, None]
    turned = (out[..., :half] + 1j * out[..., half : 2 * half]) * turn
    out[..., :half], out[..., half : 2 * half] = turned.real, turned.imag
    return out


def write_pages(new: Tensor, pages: Tensor, slots: Tensor) -> Array:
    """The pages afterwards."""
    out, values = f64(pages), f64(new)
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, out.shape[1])
        out[page, offset] = values[token]
    return out


def move_tokens(frames: Tensor, segments: Any, page_tokens: int, source: Tensor, target: Tensor) -> Array:
    """The frames afterwards, one move after the other."""
    out = frames.numpy().copy()
    for first, size in segments:
        for there, here in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
            (a, i), (b, j) = divmod(there, page_tokens), divmod(here, page_tokens)
            out[b, first + j * size : first + (j + 1) * size] = out[a, first + i * size : first + (i + 1) * size].copy()
    return out.astype(np.float64)


def write_pages_int8(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> tuple[Array, Array]:
    """Codes and scales afterwards. The arithmetic is float32, so that ties are well defined."""
    codes, steps, numbers = pages.numpy().copy(), scales.numpy().copy(), new.to(torch.float32).numpy()
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, codes.shape[1])
        for head, line in enumerate(numbers[token]):
            step = np.abs(line).max() / np.float32(127)
            codes[page, offset, head] = np.rint(line / step) if step else 0
            steps[page, offset, head] = step
    return codes, steps


def write_pages_fp8(
    new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor, fixed: Tensor | None = None
) -> tuple[Array, Array]:
    """The code nearest to each number, of all codes."""
    codes, steps, numbers = f64(pages), scales.numpy().copy(), new.to(torch.float32).numpy()
    known = torch.arange(127, dtype=torch.uint8).view(pages.dtype).to(torch.float64).numpy()
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, codes.shape[1])
        for head, line in enumerate(numbers[token]):
            step = np.abs(line).max() / np.float32(448) if fixed is None else np.float32(fixed[head])
            sizes = np.abs(line / step).astype(np.float64) if step else np.zeros(len(line))
            # Of two codes at the same distance the even one: they alternate.
            away = np.abs(known - sizes[:, None])
            nearest = [np.flatnonzero(row == row.min()) for row in away]
            chosen = [int(min(near, key=lambda code: code % 2)) for near in nearest]
            codes[page, offset, head] = np.copysign(known[chosen], line)
            steps[page, offset, head] = step
    return codes, steps


def write_pages_int4(new: Tensor, pages: Tensor, scales: Tensor, slots: Tensor) -> tuple[Array, Array]:
    codes, steps, numbers = pages.numpy().copy(), scales.clone(), new.to(torch.float32).numpy()
    group = new.shape[-1] // scales.shape[-1]
    for token, slot in enumerate(slots.tolist()):
        page, offset = divmod(slot, codes.shape[1])
        for head, line in enumerate(numbers[token]):
            for first in range(0, len(line), group):
                part = line[first : first + group]
                largest = part.max() if part.max() >= -part.min() else part.min()
                step = torch.tensor(largest / np.float32(-8)).to(torch.bfloat16)
                levels = np.rint(part / np.float32(float(step))) if float(step) else np.zeros(group)
                levels = np.clip(levels, -8, 7) + 8
                whole = levels.astype(np.uint8)
                codes[page, offset, head, first // 2 : (first + group) // 2] = whole[::2] + 16 * whole[1::2]
                steps[page, offset, head, first // group] = step
    return codes, f64(steps)


def held(pages: Tensor, scales: Tensor | None) -> Array:
    if scales is None:
        return f64(pages)
    if pages.dtype is not torch.uint8:
        return f64(pages) * f64(scales)[..., None]
    bytes_ = pages.numpy().astype(np.int64)
    codes = np.stack((bytes_ % 16, bytes_ // 16), -1).reshape(*bytes_.shape[:-1], -1) - 8
    return codes * np.repeat(f64(scales), codes.shape[-1] // scales.shape[-1], -1)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Array:
    """A dense softmax over exactly the visible keys."""
    queries, keys, values = f64(q), held(k_pages, k_scales), held(v_pages, v_scales)
    heads, per_key = q.shape[1], q.shape[1] // k_pages.shape[2]
    out = np.zeros((*q.shape[:2], values.shape[-1]))
    for i, length in enumerate(meta.kv_len.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        for t in range(first, last):
            mask = 0 if meta.ancestors is None else int(meta.ancestors[t])
            path = [j for j in range(last - first) if mask >> j & 1] or range(t - first + 1)
            order = [*range(length - (last - first)), *(length - (last - first) + j for j in path)]
            seen = order[0 if window is None else max(0, len(order) - window) :]
            places = [(int(meta.pages[i, p // meta.page_tokens]), p % meta.page_tokens) for p in seen]
            for h in range(heads):
                scores = np.array([queries[t, h] @ keys[page, o, h // per_key] for page, o in places]) * scale
                if cap is not None:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[h]) - scores.max()))
                out[t, h] = sum(w * values[page, o, h // per_key] for w, (page, o) in zip(weights, places, strict=True))
    return out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: PagedMeta,
    angles: tuple[Tensor, Tensor] | None,
    norms: HeadNorms | None,
    scale: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Array, Array, Array]:
    """The outputs, and both kinds of pages afterwards; intermediate results are rounded like activations."""

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None and norms is not None:
            x = torch.from_numpy(rms_norm(x, weight, norms.eps, norms.offset)).to(x.dtype)
        return x if angles is None else torch.from_numpy(rotate(x, *angles)).to(x.dtype)

    keys, values = k_pages.clone(), v_pages.clone()
    own = turned(k, norms and norms.k)
    for t, slot in enumerate(meta.slots.tolist()):
        keys[slot // meta.page_tokens, slot % meta.page_tokens] = own[t]
        values[slot // meta.page_tokens, slot % meta.page_tokens] = v[t]
    out = paged_attention(turned(q, norms and norms.q), keys, values, meta, scale, window, cap, sinks=sinks)
    return out, f64(keys), f64(values)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, meta: RecurrentMeta
) -> tuple[Array, Array]:
    """The outputs and the state afterwards, one token at a time."""
    inputs, taps, before, after = f64(x), f64(weight), f64(state), f64(state)
    out = np.zeros_like(inputs)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        line = before[int(meta.read[i])]
        for t in range(first, last):
            line = np.concatenate((line, inputs[t][:, None]), axis=1)
            out[t] = (line * taps).sum(1) + (0 if bias is None else f64(bias))
            line = line[:, 1:]
            if last - t <= kept:
                after[int(meta.write[i, kept - (last - t)])] = line
    return out, after


def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> tuple[Array, Array]:
    """The outputs and the state afterwards, one token and one channel at a time."""
    xs, steps, decay, enter, leave, skip = (f64(tensor) for tensor in (x, delta, a, b, c, d))
    before, after = f64(state), f64(state)
    out = np.zeros_like(xs)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        h = before[int(meta.read[i])].copy()
        for t in range(first, last):
            for channel in range(xs.shape[1]):
                step = steps[t, channel]
                h[channel] = np.exp(step * decay[channel]) * h[channel] + step * enter[t] * xs[t, channel]
                out[t, channel] = leave[t] @ h[channel] + skip[channel] * xs[t, channel]
            if last - t <= kept:
                after[int(meta.write[i, kept - (last - t)])] = h
    return out, after


def causal_conv_silu(*args: Any) -> tuple[Array, Array]:
    y, after = causal_conv(*args)
    return y / (1 + np.exp(-y)), after


def gather_columns(x: Tensor, columns: Tensor) -> Array:
    return np.stack([f64(x)[..., column] for column in columns.tolist()], -1)


def scale_columns(x: Tensor, factors: Tensor) -> Array:
    return f64(x) * f64(factors)


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    bias: Tensor,
    limits: tuple[float, float],
    state: Tensor,
    meta: RecurrentMeta,
) -> tuple[Array, Array]:
    """The outputs and the state afterwards, one token and one head at a time."""
    xs, raw, decay, enter, leave, skip, shift = (f64(tensor) for tensor in (x, dt, a, b, c, d, bias))
    before, after = f64(state), f64(state)
    out = np.zeros_like(xs)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        h = before[int(meta.read[i])].copy()
        for t in range(first, last):
            for head in range(xs.shape[1]):
                group = head * enter.shape[1] // xs.shape[1]
                step = np.clip(np.log1p(np.exp(raw[t, head] + shift[head])), *limits)
                h[head] = np.exp(step * decay[head]) * h[head] + step * np.outer(xs[t, head], enter[t, group])
                out[t, head] = h[head] @ leave[t, group] + skip[head] * xs[t, head]
            if last - t <= kept:
                after[int(meta.write[i, kept - (last - t)])] = h
    return out, after


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int, before: bool) -> Array:
    rows, opened = f64(x), f64(gate) / (1 + np.exp(-f64(gate)))
    if not before:
        rows = rows * opened
    for part in np.split(rows, groups, axis=-1):  # views
        part /= np.sqrt((part**2).mean(-1, keepdims=True) + eps)
    return rows * f64(weight) * (opened if before else 1.0)


def diagonal_scan(
    x: Tensor, decay: Tensor, out: Tensor, d: Tensor, state: Tensor, meta: RecurrentMeta
) -> tuple[Array, Array]:
    """In complex numbers, one token at a time."""
    xs, skip = f64(x), f64(d)
    factor, leave = (re + 1j * im for re, im in (f64(decay), f64(out)))
    before, after = f64(state)[:, 0] + 1j * f64(state)[:, 1], f64(state)
    y = np.zeros_like(xs)
    for i, kept in enumerate(meta.kept.tolist()):
        first, last = meta.q_start[i : i + 2].tolist()
        h = before[int(meta.read[i])]
        for t in range(first, last):
            h = factor * h + xs[t]
            y[t] = (leave * h).sum(0).real + skip * xs[t]
            if last - t <= kept:
                after[int(meta.write[i, kept - (last - t)])] = h.real, h.imag
    return y, after


def rope_angles(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Array, Array]:
    # The product is rounded to the frequencies' dtype: models were trained with that rounding.
    angles = f64(positions[:, None].to(frequencies.dtype) * frequencies[None, :])
    return np.cos(angles) * scale, np.sin(angles) * scale


def _activation(x: Tensor, kind: str) -> Array:
    from scipy.special import erf, expit

    values = f64(x)
    if kind == "silu":
        return values * expit(values)
    if kind == "relu":
        return np.maximum(values, 0)
    if kind == "sigmoid":
        return expit(values)
    if kind == "softplus":
        return np.where(values > 20, values, np.logaddexp(values, 0))  # the reference is the identity from there on
    if kind == "gelu":
        return values * 0.5 * (1 + erf(values / np.sqrt(2)))
    assert kind == "gelu_tanh"
    return values * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))


def activate(x: Tensor, kind: str) -> Array:
    return _activation(x, kind)


def activate_mul(gate: Tensor, up: Tensor, kind: str) -> Array:
    return _activation(gate, kind) * f64(up)


ORACLES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        embedding,
        rms_norm,
        add,
        attend,
        add_rms_norm,
        layer_norm,
        soft_cap,
        rotate,
        move_tokens,
        write_pages,
        write_pages_int8,
        write_pages_fp8,
        write_pages_int4,
        paged_attention,
        causal_conv,
        causal_conv_silu,
        selective_scan,
        gather_columns,
        scale_columns,
        ssd_scan,
        gated_rms_norm,
        diagonal_scan,
        rope_angles,
        activate,
        activate_mul,
    )
}
ORACLES |= {product.__name__: with_epilogue(product) for product in (linear, linear_bf16, linear_int8, linear_hadamard)}


from tests.ops import (  # noqa: E402  (last: they use what stands above)
    oracles_collectives,
    oracles_experts,
    oracles_latent,
    oracles_linear,
    oracles_outliers,
    oracles_partial,
    oracles_ranks,
    oracles_w8a8,
)

for more in (
    oracles_collectives,
    oracles_experts,
    oracles_latent,
    oracles_linear,
    oracles_outliers,
    oracles_partial,
    oracles_ranks,
    oracles_w8a8,
):
    ORACLES |= more.ORACLES
