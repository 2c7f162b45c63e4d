"""The ceilings of a CUDA device, measured: read bandwidth and matmul rates.

torch's reductions and a matrix-vector product measure reading; products of large square matrices of random numbers
measure arithmetic. CUDA events time them. They show what very good code reaches, and may be exceeded slightly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from bankfull.limits.machine.ceilings import FORMAT, Ceilings, cached_or_measured

Product = Callable[[], object]
CUDA = "torch reductions and matmul on the device, best of several"
READ_SET = 4 << 30
LEAST_TIMES_CACHE = 4
"""Minimum working set in L2 caches; a smaller one would partly be read from the cache."""
SIDE = 8192
"""Rows and columns of the matrices that are multiplied."""
READ_TURNS, PRODUCT_TURNS, PRODUCTS_AT_ONCE = 12, 5, 4
SMALLEST_SET = 1 << 20
COPIED, COPY_TURNS = 256 << 20, 6
FLOATS = ("bfloat16", "float16", "float32", "float64")
NOT_THERE = (RuntimeError, AttributeError)
"""Errors of torch for a product that this device or this torch does not support."""


def measure(device: torch.device, refresh: bool = False) -> Ceilings | None:
    """Ceilings from the cache file, or measured in a second or two and cached; None if too little memory is free."""
    device = _numbered(device)
    properties = torch.cuda.get_device_properties(device)
    try:
        return cached_or_measured(identity_of(device), lambda: _measure(device, properties), refresh)
    except NoRoom:
        return None


def identity_of(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    properties = torch.cuda.get_device_properties(_numbered(device))
    return {
        "format": FORMAT,
        "device": properties.name,
        "memory": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def read_curve(device: torch.device) -> list[tuple[int, float]]:
    """Bandwidth in bytes per second by working set, from far below the L2 cache up to the free memory; empty if too
    little is free."""
    device = _numbered(device)
    with torch.cuda.device(device), torch.inference_mode():
        try:
            large = _filled(device, int(torch.cuda.get_device_properties(device).L2_cache_size))
        except NoRoom:
            return []
        sizes = [SMALLEST_SET << doubling for doubling in range(large.nbytes.bit_length())]
        curve = [(size, _read_rate(large[: size // 4])) for size in sizes if size <= large.nbytes]
        del large
        torch.cuda.empty_cache()
    return curve


def copy_rates(device: torch.device) -> tuple[float, float] | None:
    """Bytes per second from pinned host memory to the device, and back; None if there is no room to measure."""
    device = _numbered(device)
    try:
        with torch.cuda.device(device), torch.inference_mode():
            there = torch.empty(COPIED, dtype=torch.uint8, device=device)
            here = torch.ones(COPIED, dtype=torch.uint8, pin_memory=True)
            to_device = COPIED / shortest(lambda: there.copy_(here, non_blocking=True), COPY_TURNS)
            from_device = COPIED / shortest(lambda: here.copy_(there, non_blocking=True), COPY_TURNS)
    except (torch.OutOfMemoryError, RuntimeError):  # RuntimeError: the host cannot pin that much
        return None
    return to_device, from_device


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


class NoRoom(Exception):
    """The device has too little free memory to measure."""


def _measure(device: torch.device, properties: Any) -> Ceilings:
    with torch.cuda.device(device), torch.inference_mode():
        cache = int(properties.L2_cache_size)
        large = _filled(device, cache)
        small = large[: max(cache // 8, 1024)]  # half the cache, in 4-byte numbers
        read, cached = _read_rate(large), _read_rate(small)
        sizes = large.nbytes, small.nbytes
        del large, small
        flops = {name: rate for name, rate in _product_rates(device) if rate is not None}
        torch.cuda.empty_cache()
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return Ceilings(
        read,
        max(read, cached),
        flops,
        properties.multi_processor_count,
        properties.name,
        when,
        *sizes,
        cache,
        CUDA,
        "multiprocessors",
    )


def _filled(device: torch.device, cache: int) -> torch.Tensor:
    """Random numbers, as many as fit the device, up to READ_SET bytes."""
    size, least = READ_SET, LEAST_TIMES_CACHE * cache
    while size >= least:
        try:
            return torch.rand(size // 4, device=device)
        except torch.OutOfMemoryError:
            size //= 2
    raise NoRoom


def _read_rate(buffer: torch.Tensor) -> float:
    """Bytes per second with the fastest of several ways to read the buffer."""
    columns = 4096
    matrix = buffer.view(torch.bfloat16)[: buffer.numel() * 2 // columns * columns].view(-1, columns)
    vector = torch.ones(columns, dtype=torch.bfloat16, device=buffer.device)
    ways: tuple[Callable[[], object], ...] = (
        buffer.sum,
        buffer.amax,
        lambda: torch.dot(buffer, buffer),
        lambda: torch.mv(matrix, vector),
    )
    return buffer.nbytes / min(shortest(way, READ_TURNS) for way in ways)


def _product_rates(device: torch.device) -> list[tuple[str, float | None]]:
    makers: dict[str, Callable[[], Product]] = {name: partial(_floats, name, device) for name in FLOATS}
    makers |= {"float8": partial(_float8, device), "int8": partial(_int8, device)}
    return [(name, _rate(make)) for name, make in makers.items()]


def _rate(make: Callable[[], Product]) -> float | None:
    """Operations per second; None if the product is unsupported or does not fit."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        product = make()

        def several() -> None:
            for _ in range(PRODUCTS_AT_ONCE):
                product()

        return 2.0 * SIDE**3 * PRODUCTS_AT_ONCE / shortest(several, PRODUCT_TURNS)
    except NOT_THERE:
        return None
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def _floats(name: str, device: torch.device) -> Product:
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=getattr(torch, name)) for _ in range(2))
    return lambda: left @ right


def _float8(device: torch.device) -> Product:
    left, right = (torch.randn(SIDE, SIDE, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)


def _int8(device: torch.device) -> Product:
    """The faster of our kernel and the library's, which reaches 883 TOP/s on an H200 where ours reaches 1,228."""
    from bankfull.ops.products.triton.w8a8 import int8_product

    left, right = (torch.randint(-127, 128, (SIDE, SIDE), device=device, dtype=torch.int8) for _ in range(2))
    ours, library = partial(int8_product, left, right), partial(torch._int_mm, left, right.t())
    return min((library, ours), key=lambda product: shortest(product, 2))


def shortest(work: Callable[[], object], turns: int) -> float:
    """Best time of `turns` in seconds, by CUDA events, after two warm-up turns."""
    best = math.inf
    for turn in range(turns + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if turn >= 2:
            best = min(best, begin.elapsed_time(end) / 1e3)
    return max(best, 1e-9)
