"""Inputs of the size of real models for every operation, drawn on the device itself, other ones in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.attention import Heads
from bankfull.ops import Epilogue, HeadNorms, PagedMeta, RecurrentMeta, RoutingRule, Unnormed
from bankfull.ops.attention.body import TREE_TOKENS
from bankfull.ops.pages.rounded import INT4, INT4_LOWEST, int4_group, is_rounded
from bankfull.runtime.trees import paths_of
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.dense import BY_DTYPE, DTYPES
from bankfull.weights.formats.two_of_four import BY_DTYPE as SPARSE
from bankfull.weights.formats.two_of_four import FOUR
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import TYPES, quantize
from bankfull.weights.scheme import Scheme
from bankfull.weights.sparse_source import compressed, fits_kernels
from tests.gpu.place import CUDA, DEVICE
from tests.ops.cases import Case

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    ffn: int
    heads: int
    kv: int
    head: int
    vocab: int
    channels: int
    """Of a recurrent mixer."""
    context: int
    cached: int
    """Tokens that the pages of one case hold, at most."""
    tokens: tuple[int, ...]


LLAMA_8B = Sizes(4096, 14336, 32, 8, 128, 32064, 5120, 3000, 200_000, (1, 3, 16, 64, 1000))
"""A quarter of its vocabulary: several processes share the device. The token counts are one for each way through the
kernels: one row, a few, tiles of either size, and more than one tile."""
SMALL = Sizes(64, 96, 4, 2, 16, 300, 48, 60, 400, (1, 7))
SIZES = LLAMA_8B if CUDA else SMALL
RARE = (1, 64)
COMMON = ("int8_row", "fp8", "int4_g128", "q8_0", "q4_0", "q4_k", "q6_k")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
GATED, BEST = Epilogue(gate="silu"), Epilogue(best=True)


class Draw:
    """Numbers from one seed, but for the weights."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype, self.pick = dtype, Random(seed)
        self._numbers = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self._numbers, device=DEVICE).to(dtype or self.dtype)

    def ids(self, count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=self._numbers, device=DEVICE)


@lru_cache(maxsize=32)
def weight_of(scheme: Scheme, outer: int, inner: int) -> QTensor:
    """As a layer has it: outputs about as large as inputs. Kept for a while: to quantize a large one takes long."""
    numbers = torch.randn(outer, inner, device=DEVICE) * inner**-0.5
    if scheme.is_sparse:
        fours = numbers.unflatten(-1, (-1, FOUR))
        numbers = fours.scatter(-1, fours.abs().argsort(-1)[..., :2], 0).flatten(-2)
        return compressed(QTensor.dense(numbers), scheme.parts[0].dtype, "a weight")
    return QTensor.dense(numbers.to(DTYPES[scheme.name])) if scheme.is_dense else quantize(numbers, scheme.name)


Made = Iterator[tuple[str, Case]]
"""What is special about a case, and the case."""


def schemes_for(draw: Draw, inner: int, tokens: int) -> list[Scheme]:
    """The computation's own dtype, sparse in it, and every quantized one that can be made for so many columns. Each
    combination is compiled anew: what is rare (quantized weights without bfloat16, other formats) is tried with few
    token counts."""
    floats = [BY_DTYPE[draw.dtype], *([SPARSE[draw.dtype]] if fits_kernels((1, inner), draw.dtype) else [])]
    if draw.dtype is torch.float16 or (draw.dtype is torch.float32 and tokens not in RARE):
        return floats
    names = [name for name in TYPES if name in COMMON or (tokens in RARE and draw.dtype is torch.bfloat16)]
    fitting = [SCHEMES[name] for name in names if inner % SCHEMES[name].block == 0]
    return [*floats, *fitting]


def linear(draw: Draw, tokens: int) -> Made:
    s = SIZES
    shapes = [(s.heads * s.head + 2 * s.kv * s.head, s.hidden), (s.hidden, s.ffn)]
    for i, (outer, inner) in enumerate(shapes):
        for scheme in schemes_for(draw, inner, tokens):
            weight = weight_of(scheme, outer, inner)
            bias = draw.normal(outer) if i == 0 else None
            args = draw.normal(tokens, inner), weight, Epilogue(bias)
            yield f"{scheme.name} {outer}x{inner}", _case(draw, args, weight)
    if tokens <= 64:
        head = weight_of(BY_DTYPE[draw.dtype], s.vocab, s.hidden)
        yield "head", _case(draw, (draw.normal(tokens, s.hidden), head, Epilogue()), head)


def best_linear(draw: Draw, tokens: int) -> Made:
    for scheme in schemes_for(draw, SIZES.hidden, tokens)[:4]:
        weight = weight_of(scheme, SIZES.vocab, SIZES.hidden)
        yield scheme.name, _case(draw, (draw.normal(min(tokens, 64), SIZES.hidden), weight, BEST), weight)


def gated_linear(draw: Draw, tokens: int) -> Made:
    for scheme in schemes_for(draw, SIZES.hidden, tokens):
        weight = weight_of(scheme, 2 * SIZES.ffn, SIZES.hidden)
        yield scheme.name, _case(draw, (draw.normal(tokens, SIZES.hidden), weight, GATED), weight)


def linear_w8a8(draw: Draw, tokens: int) -> Made:
    """Exact codes: a kernel may scale in another order, which moves ties."""
    for name in ("int8_row", "fp8"):
        weight = weight_of(SCHEMES[name], SIZES.hidden, SIZES.ffn)
        made = _case(draw, (_codes(draw, tokens, SIZES.ffn, name), weight, Epilogue(draw.normal(SIZES.hidden))), weight)
        # Many rows are multiplied by the library, which sums float8 products of whole rows in matrix units, with about
        # 14 bits: 2.7e-3 over 14,336 columns.
        yield name, replace(made, provided=torch.bfloat16 if name == "fp8" else None)


def best_linear_w8a8(draw: Draw, tokens: int) -> Made:
    for name in ("int8_row", "fp8"):
        weight = weight_of(SCHEMES[name], SIZES.vocab // 32 * 32, SIZES.hidden)
        yield name, _case(draw, (_codes(draw, min(tokens, 64), SIZES.hidden, name), weight, BEST), weight)


def gated_linear_w8a8(draw: Draw, tokens: int) -> Made:
    for name in ("int8_row", "fp8"):
        weight = weight_of(SCHEMES[name], 2 * SIZES.ffn, SIZES.hidden)
        yield name, _case(draw, (_codes(draw, tokens, SIZES.hidden, name), weight, GATED), weight)


def normed_linear_w8a8(draw: Draw, tokens: int) -> Made:
    """Normed numbers are not exact codes: a few of them may differ by one."""
    for name in ("int8_row", "fp8"):
        weight = weight_of(SCHEMES[name], SIZES.hidden, SIZES.hidden)
        made = _case(draw, (unnormed(draw, tokens), weight, Epilogue()), weight)
        yield name, replace(made, provided=torch.float8_e4m3fn)


def normed_gated_linear_w8a8(draw: Draw, tokens: int) -> Made:
    for name in ("int8_row", "fp8"):
        weight = weight_of(SCHEMES[name], 2 * SIZES.ffn, SIZES.hidden)
        made = _case(draw, (unnormed(draw, tokens), weight, GATED), weight)
        yield name, replace(made, provided=torch.float8_e4m3fn)


def _codes(draw: Draw, tokens: int, columns: int, scheme: str) -> Tensor:
    """Numbers near one that the 8-bit type holds, if the largest one of a row is its largest."""
    largest, rounded = (448.0, torch.float8_e4m3fn) if scheme == "fp8" else (127.0, torch.int8)
    numbers = (draw.normal(tokens, columns, dtype=torch.float32) * largest / 4).clamp(-largest, largest).round()
    numbers = numbers.to(rounded).float()
    numbers[:, 0] = largest
    return (numbers / 32).to(draw.dtype)


def _case(draw: Draw, args: tuple[Any, ...], weight: QTensor) -> Case:
    return Case(args, draw.dtype, {"weight": weight})


def unnormed(draw: Draw, tokens: int) -> Unnormed:
    x, delta = draw.normal(tokens, SIZES.hidden), draw.normal(tokens, SIZES.hidden)
    return Unnormed(x, delta, draw.normal(SIZES.hidden), 1e-5, draw.pick.choice((0.0, 1.0)), torch.full_like(x, NAN))


def normed_linear(draw: Draw, tokens: int) -> Made:
    for label, made in linear(draw, tokens):
        if made.args[0].shape[1] == SIZES.hidden:
            yield label, replace(made, args=(unnormed(draw, tokens), *made.args[1:]))


def normed_best_linear(draw: Draw, tokens: int) -> Made:
    for label, made in best_linear(draw, tokens):
        yield label, replace(made, args=(unnormed(draw, len(made.args[0])), *made.args[1:]))


def normed_gated_linear(draw: Draw, tokens: int) -> Made:
    for label, made in gated_linear(draw, tokens):
        yield label, replace(made, args=(unnormed(draw, tokens), *made.args[1:]))


def embedding(draw: Draw, tokens: int) -> Made:
    for scheme in schemes_for(draw, SIZES.hidden, tokens):
        table = weight_of(scheme, SIZES.vocab, SIZES.hidden)
        args = (draw.ids(tokens, SIZES.vocab), table, draw.dtype, draw.pick.choice((1.0, 5.5)))
        yield scheme.name, _case(draw, args, table)


def rms_norm(draw: Draw, tokens: int) -> Made:
    s = SIZES
    for offset in (0.0, 1.0):
        yield "stream", Case((draw.normal(tokens, s.hidden), draw.normal(s.hidden), 1e-5, offset), draw.dtype)
        of_heads = draw.normal(tokens, (s.heads + s.kv) * s.head).unflatten(1, (-1, s.head))[:, : s.heads]
        yield "heads", Case((of_heads, draw.normal(s.head), 1e-5, offset), draw.dtype)


def add(draw: Draw, tokens: int) -> Made:
    yield "", Case((draw.normal(tokens, SIZES.hidden), draw.normal(tokens, SIZES.hidden)), draw.dtype)


def add_rms_norm(draw: Draw, tokens: int) -> Made:
    x, delta = draw.normal(tokens, SIZES.hidden), draw.normal(tokens, SIZES.hidden)
    for offset in (0.0, 1.0):
        yield "", Case((x, delta, draw.normal(SIZES.hidden), 1e-5, offset), draw.dtype)


def layer_norm(draw: Draw, tokens: int) -> Made:
    x = draw.normal(tokens, SIZES.hidden) * 3 + 1
    yield "", Case((x, draw.normal(SIZES.hidden), draw.normal(SIZES.hidden), 1e-5), draw.dtype)


def activate(draw: Draw, tokens: int) -> Made:
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "softplus"):
        yield kind, Case((draw.normal(tokens, SIZES.ffn), kind), draw.dtype)


def activate_mul(draw: Draw, tokens: int) -> Made:
    for kind in ("silu", "gelu_tanh"):
        gate, up = draw.normal(tokens, 2 * SIZES.ffn).chunk(2, -1)
        yield kind, Case((gate, up, kind), draw.dtype)


def soft_cap(draw: Draw, tokens: int) -> Made:
    yield "", Case((draw.normal(min(tokens, 64), SIZES.vocab) * 40, 30.0), draw.dtype)


def rope_angles(draw: Draw, tokens: int) -> Made:
    half = SIZES.head // 2
    frequencies = 500000.0 ** (-torch.arange(half, device=DEVICE, dtype=torch.float32) / half)
    yield "", Case((draw.ids(tokens, 8192), frequencies, 1.0, draw.dtype), draw.dtype)


def rotate(draw: Draw, tokens: int) -> Made:
    s = SIZES
    q = draw.normal(tokens, (s.heads + 2 * s.kv) * s.head).unflatten(1, (-1, s.head))[:, : s.heads]
    for half in (s.head // 2, s.head // 4):
        yield f"half {half}", Case((q, *_angles(draw, tokens, half)), draw.dtype)


def _angles(draw: Draw, tokens: int, half: int) -> tuple[Tensor, Tensor]:
    turns = draw.normal(tokens, half, dtype=torch.float32) * 3
    return turns.cos().to(draw.dtype), turns.sin().to(draw.dtype)


@dataclass(frozen=True, slots=True)
class Mix:
    """The sequences of a step: how many queries each has, and how many tokens in all."""

    name: str
    counts: list[int]
    lengths: list[int]


def mixes(draw: Draw, tokens: int) -> list[Mix]:
    s = SIZES
    longest = max(2, min(s.context, s.cached // tokens))
    past = [draw.pick.randint(0, longest - 1) for _ in range(tokens)]
    found = [Mix("decode", [1] * tokens, [1 + length for length in past]), Mix("prompt", [tokens], [tokens])]
    if tokens > 1:
        found.append(Mix("chunk", [tokens], [tokens + s.context // 2]))
        counts = []
        while (left := tokens - sum(counts)) > 0:
            counts.append(draw.pick.choice((1, 1, 4, min(left, max(1, tokens // 3)))))
            counts[-1] = min(counts[-1], left)
        found.append(Mix("mixed", counts, [c + draw.pick.randint(0, longest - 1) for c in counts]))
        counts = [min(TREE_TOKENS, tokens - first) for first in range(0, tokens, TREE_TOKENS)]
        found.append(Mix("trees", counts, [c + draw.pick.randint(0, longest - 1) for c in counts]))
    if tokens == 1:
        found.append(Mix("long", [1], [8 * s.context]))
    return found


def paged(draw: Draw, mix: Mix, dtype: torch.dtype, page: int = 16) -> tuple[Tensor, Tensor, PagedMeta]:
    """Frames in any order, of two layers, poisoned wherever no sequence may look."""
    s = SIZES
    used = [-(-length // page) for length in mix.lengths]
    order = list(range(1, sum(used) + 3))
    draw.pick.shuffle(order)
    table = np.zeros((len(used), max(used)), np.int64)
    for i, count in enumerate(used):
        table[i, :count] = [order.pop() for _ in range(count)]
    live, slots = [], []
    for i, (count, length) in enumerate(zip(mix.counts, mix.lengths, strict=True)):
        at = np.arange(length)
        flat = table[i, at // page] * page + at % page
        live.append(flat[: length - count])
        slots.append(flat[length - count :])
    frames = torch.full((sum(used) + 3, 2, page, 2, s.kv, s.head), NAN, dtype=dtype, device=DEVICE)
    own = frames[:, 1]
    before = torch.from_numpy(np.concatenate(live)).to(DEVICE)
    own[before // page, before % page] = draw.normal(len(before), 2, s.kv, s.head, dtype=dtype)
    q_start = np.concatenate(([0], np.cumsum(mix.counts)))
    lengths = np.array(mix.lengths)
    meta = PagedMeta(
        q_start,
        lengths,
        torch.from_numpy(table).to(DEVICE),
        torch.from_numpy(np.concatenate(slots)).to(DEVICE),
        page,
        _integers(q_start),
        _integers(lengths),
        ancestors=trees(draw, mix.counts) if mix.name == "trees" else None,
    )
    return own[:, :, 0], own[:, :, 1], meta


def trees(draw: Draw, counts: list[int]) -> Tensor:
    """Masks of random trees, deep ones mostly."""
    masks = []
    for count in counts:
        parents = [draw.pick.choice((node - 1, draw.pick.randrange(-1, node))) for node in range(count - 1)]
        masks.append(paths_of(torch.tensor(parents, dtype=torch.long)[None]).ancestors[0])
    return torch.cat(masks).to(DEVICE)


def move_tokens(draw: Draw, tokens: int) -> Made:
    """The keys and values of accepted drafts in eight layers: every second one of eight drafts."""
    s = SIZES
    size = s.kv * s.head * draw.dtype.itemsize
    segments = tuple((i * 16 * size, size) for i in range(16))
    frames = torch.randint(256, (tokens + 1, 16 * 16 * size), dtype=torch.uint8, device=DEVICE)
    first = (1 + torch.arange(tokens, device=DEVICE)[:, None]) * 16 + draw.pick.randint(0, 7)
    source, target = first + torch.tensor([1, 3, 5, 7], device=DEVICE), first + torch.arange(4, device=DEVICE)
    yield "", Case((frames, segments, 16, source, target), draw.dtype, written=(0,))


def _integers(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(DEVICE)


def _heads(window: int | None, cap: float | None) -> Heads:
    s = SIZES
    return Heads(s.heads, s.kv, s.head, s.head**-0.5, window, cap)


def _wishes(mix: Mix) -> list[tuple[int | None, float | None]]:
    """Windows and caps to try: the rare ones only with some mixes, since each case is large."""
    plain: list[tuple[int | None, float | None]] = [(None, None)]
    return [*plain, (SIZES.context // 4, 50.0)] if mix.name in ("mixed", "chunk", "long") else plain


def attend(draw: Draw, tokens: int) -> Made:
    s = SIZES
    for mix in mixes(draw, tokens):
        for window, cap in _wishes(mix):
            heads = _heads(window, cap)
            k_pages, v_pages, meta = paged(draw, mix, draw.dtype)
            fused = draw.normal(tokens, s.heads + 2 * s.kv, s.head)
            q, k, v = fused.split((s.heads, s.kv, s.kv), 1)
            norms = draw.pick.choice((None, HeadNorms(draw.normal(s.head), draw.normal(s.head), 1e-6, 0.0)))
            angles = _angles(draw, tokens, s.head // 2)
            sinks = draw.pick.choice((None, draw.normal(s.heads, dtype=torch.float32)))
            args = (q, k, v, k_pages, v_pages, meta, angles, norms, heads.scale, window, cap, sinks)
            yield mix.name, Case(args, draw.dtype, {"heads": heads, "pages": draw.dtype}, written=(3, 4))


def paged_attention(draw: Draw, tokens: int) -> Made:
    s = SIZES
    for mix in mixes(draw, tokens):
        for window, cap in _wishes(mix):
            for pages in (draw.dtype, torch.int8, INT4):
                heads = _heads(window, cap)
                k_pages, v_pages, meta = paged(draw, mix, torch.float32 if is_rounded(pages) else pages)
                for own in (k_pages, v_pages):
                    at = meta.slots
                    own[at // 16, at % 16] = draw.normal(tokens, s.kv, s.head, dtype=own.dtype)
                scales: tuple[Tensor, ...] = ()
                if is_rounded(pages):
                    rounded = _rounded if pages is torch.int8 else _rounded_in_pairs
                    (k_pages, k_scales), (v_pages, v_scales) = rounded(k_pages), rounded(v_pages)
                    scales = k_scales, v_scales
                sinks = draw.pick.choice((None, draw.normal(s.heads, dtype=torch.float32)))
                q, held = draw.normal(tokens, s.heads, s.head), scales or (None, None)
                args = (q, k_pages, v_pages, meta, heads.scale, window, cap, *held, sinks)
                # Over rounded pages a provider may multiply in bfloat16, as tiles do.
                provided = torch.bfloat16 if is_rounded(pages) else None
                facts = {"heads": heads, "pages": pages}
                yield f"{mix.name} {pages}", Case(args, draw.dtype, facts, provided=provided)


def _rounded(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and scales that are poisoned where the numbers were."""
    scales = pages.abs().amax(-1) / 127
    codes = (pages / scales.unsqueeze(-1)).nan_to_num(0.0).round().to(torch.int8)
    return codes, scales


def _rounded_in_pairs(pages: Tensor) -> tuple[Tensor, Tensor]:
    """The same as int4, each group of a head with a scale of its own."""
    groups = pages.unflatten(-1, (-1, int4_group(pages.shape[-1])))
    scales = (groups.abs().amax(-1) / 7).to(torch.bfloat16)
    numbers = (groups / scales.unsqueeze(-1)).nan_to_num(0.0).round().clamp(INT4_LOWEST, 7)
    codes = (numbers - INT4_LOWEST).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def write_pages(draw: Draw, tokens: int) -> Made:
    s = SIZES
    k_pages, _, meta = paged(draw, mixes(draw, tokens)[0], draw.dtype)
    yield "", Case((draw.normal(tokens, s.kv, s.head), k_pages, meta.slots), draw.dtype, written=(1,))


def write_pages_int8(draw: Draw, tokens: int) -> Made:
    s = SIZES
    k_pages, _, meta = paged(draw, mixes(draw, tokens)[0], torch.float32)
    codes, scales = _rounded(k_pages)
    args = (draw.normal(tokens, s.kv, s.head), codes, scales, meta.slots)
    yield "", Case(args, draw.dtype, {"pages": torch.int8}, written=(1, 2))


def write_pages_fp8(draw: Draw, tokens: int) -> Made:
    for name, made in write_pages_int8(draw, tokens):
        new, codes, scales, slots = made.args
        args = (new, codes.clamp(-100, 100).view(torch.float8_e4m3fn), scales, slots)
        yield name, Case(args, draw.dtype, {"pages": torch.float8_e4m3fn}, written=(1, 2))


def write_pages_int4(draw: Draw, tokens: int) -> Made:
    for name, made in write_pages_int8(draw, tokens):
        new, codes, _, slots = made.args
        groups = torch.zeros(*codes.shape[:3], codes.shape[3] // 32, dtype=torch.bfloat16, device=DEVICE)
        args = (new, codes[..., ::2].contiguous().view(torch.uint8), groups, slots)
        yield name, Case(args, draw.dtype, {"pages": torch.uint8}, written=(1, 2))


def recurrent(draw: Draw, tokens: int) -> Iterator[tuple[str, RecurrentMeta, int]]:
    steps = [[1] * tokens, [tokens]] if tokens <= 64 else [[1] * (tokens // 2), [tokens // 8] * 8]
    for counts in steps:
        kept = [draw.pick.randint(1, min(count, 4)) for count in counts]
        places = list(range(1, 1 + len(counts) + sum(kept)))
        draw.pick.shuffle(places)
        read = [draw.pick.choice((0, places.pop())) for _ in counts]
        write = [[places.pop() for _ in range(k)] + [0] * (max(kept) - k) for k in kept]
        q_start = np.concatenate(([0], np.cumsum(counts)))
        meta = RecurrentMeta(
            q_start,
            np.array(kept),
            torch.tensor(read, device=DEVICE),
            torch.tensor(write, device=DEVICE),
            _integers(q_start),
            _integers(np.array(kept)),
        )
        yield f"{len(counts)} sequences", meta, 1 + len(counts) + sum(kept)


def state_slots(draw: Draw, *shape: int) -> Tensor:
    state = draw.normal(*shape, dtype=torch.float32)
    state[0] = 0
    return state


def causal_conv(draw: Draw, tokens: int) -> Made:
    for label, meta, slots in recurrent(draw, tokens):
        x = draw.normal(int(meta.q_start[-1]), SIZES.channels)
        weight, bias = draw.normal(SIZES.channels, 4), draw.pick.choice((None, draw.normal(SIZES.channels)))
        args = (x, weight, bias, state_slots(draw, slots, SIZES.channels, 3), meta)
        yield label, Case(args, draw.dtype, written=(3,))


def selective_scan(draw: Draw, tokens: int) -> Made:
    for label, meta, slots in recurrent(draw, tokens):
        total, channels, size = int(meta.q_start[-1]), SIZES.channels, 16
        delta = torch.nn.functional.softplus(draw.normal(total, channels))
        a = -draw.normal(channels, size, dtype=torch.float32).exp()
        b, c = draw.normal(total, size), draw.normal(total, size)
        x, d = draw.normal(total, channels), draw.normal(channels, dtype=torch.float32)
        args = (x, delta, a, b, c, d, state_slots(draw, slots, channels, size), meta)
        yield label, Case(args, draw.dtype, written=(6,))


def causal_conv_silu(draw: Draw, tokens: int) -> Made:
    return causal_conv(draw, tokens)


def ssd_scan(draw: Draw, tokens: int) -> Made:
    """Mamba-2's heads: 64 channels, 128 numbers each, one group."""
    heads, size, groups, n = 24, 64, draw.pick.choice((1, 8)), 128
    for label, meta, slots in recurrent(draw, tokens):
        total = int(meta.q_start[-1])
        whole = draw.normal(total, heads * size + 2 * groups * n + heads)
        x, b, c, dt = whole.split((heads * size, groups * n, groups * n, heads), dim=1)
        b, c = (part.unflatten(1, (groups, n)) for part in (b, c))
        a, d, bias = (
            -draw.normal(heads, dtype=torch.float32).exp(),
            *(draw.normal(heads, dtype=torch.float32) for _ in range(2)),
        )
        state = state_slots(draw, slots, heads, size, n)
        limits = draw.pick.choice(((0.0, float("inf")), (0.01, 0.5)))
        args = (x.unflatten(1, (heads, size)), dt, a, b, c, d, bias, limits, state, meta)
        yield label, Case(args, draw.dtype, written=(8,))


def gated_rms_norm(draw: Draw, tokens: int) -> Made:
    columns, groups = 5120, draw.pick.choice((1, 8))
    whole = draw.normal(tokens, columns + 80)
    args = (draw.normal(tokens, columns), whole[:, :columns], draw.normal(columns), 1e-5, groups)
    yield "", Case((*args, draw.pick.choice((True, False))), draw.dtype)


def diagonal_scan(draw: Draw, tokens: int) -> Made:
    for label, meta, slots in recurrent(draw, tokens):
        total, channels, pairs = int(meta.q_start[-1]), SIZES.channels, 32
        turn = draw.normal(pairs, channels, dtype=torch.float32)
        decay = torch.stack((0.9 * turn.cos(), 0.9 * turn.sin()))
        out, d = draw.normal(2, pairs, channels, dtype=torch.float32), draw.normal(channels, dtype=torch.float32)
        args = (draw.normal(total, channels), decay, out, d, state_slots(draw, slots, 2, pairs, channels), meta)
        yield label, Case(args, draw.dtype, written=(4,))


def scale_columns(draw: Draw, tokens: int) -> Made:
    yield "", Case((draw.normal(tokens, SIZES.channels), draw.normal(SIZES.channels)), draw.dtype)


def route(draw: Draw, tokens: int) -> Made:
    """Equal logits among them, which must not change places."""
    for rule in (RoutingRule(128, 8, renormalize=True), RoutingRule(256, 8, "sigmoid", True, 2.5, 8, 4, 2)):
        order = draw.normal(tokens, rule.experts).argsort(-1)
        logits = (order // 2 * 0.125 - 8).to(draw.dtype)  # larger ones have sigmoids that float32 cannot tell apart
        yield f"{rule.experts} experts", Case((logits, None, rule), draw.dtype, {"experts": rule.experts})


def add_gated(draw: Draw, tokens: int) -> Made:
    s = SIZES
    args = draw.normal(tokens, s.hidden), draw.normal(tokens, s.hidden), draw.normal(tokens, 1)
    yield "shared", Case(args, draw.dtype)


def expert_mlp(draw: Draw, tokens: int) -> Made:
    experts, per_token, hidden, inner = 32, 4, 2048, 768
    names = ("int8_row", "int4_g128") if tokens in RARE and draw.dtype is torch.bfloat16 else ()
    for scheme in (BY_DTYPE[draw.dtype], *(SCHEMES[name] for name in names)):
        gate, up, down = (
            weight_of(scheme, experts * outer, columns).reshape_leading(experts, outer)
            for outer, columns in ((inner, hidden), (inner, hidden), (hidden, inner))
        )
        chosen = draw.normal(tokens, experts).argsort(-1)[:, :per_token].to(torch.int32)
        weights = draw.normal(tokens, per_token, dtype=torch.float32).softmax(-1)
        args = (draw.normal(tokens, hidden), chosen, weights, gate, up, down, None, None, None, "silu")
        yield scheme.name, Case(args, draw.dtype, {"weight": gate, "weights": (gate, up, down)})


GENERATORS: dict[str, Callable[[Draw, int], Made]] = {
    function.__name__: function
    for function in (
        route,
        add_gated,
        expert_mlp,
        linear,
        best_linear,
        gated_linear,
        linear_w8a8,
        best_linear_w8a8,
        gated_linear_w8a8,
        normed_linear_w8a8,
        normed_gated_linear_w8a8,
        normed_linear,
        normed_best_linear,
        normed_gated_linear,
        embedding,
        rms_norm,
        add,
        add_rms_norm,
        layer_norm,
        activate,
        activate_mul,
        soft_cap,
        rope_angles,
        rotate,
        attend,
        paged_attention,
        move_tokens,
        write_pages,
        write_pages_int8,
        write_pages_fp8,
        write_pages_int4,
        causal_conv,
        causal_conv_silu,
        selective_scan,
        ssd_scan,
        gated_rms_norm,
        diagonal_scan,
        scale_columns,
    )
}

from tests.gpu import (  # noqa: E402  (last: they draw with what stands above)
    real_latent,
    real_linear,
    real_outliers,
    real_partial,
)

GENERATORS |= real_latent.GENERATORS | real_linear.GENERATORS | real_outliers.GENERATORS | real_partial.GENERATORS
