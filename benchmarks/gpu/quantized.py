"""python -m benchmarks.gpu.quantized --types int4_g128,int3_g128 --rows 1,16 [--sweep | --compare]

Read bandwidth of quantized linear layers, for the shapes of an 8B model, with the kernels that layers take. A chain of
launches over more weights than any cache holds is captured and replayed, as in a decode step. The time of all layers of
a step ends each type's list. --sweep tries other tilings and prints the best: it gives the constants of
`bankfull/ops/products/triton/quantized/`. --compare does so for the two kernels for few rows (`quantized_compare`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bankfull.ops import Epilogue
from bankfull.ops.products.triton.quantized.layout import LAYOUTS, WordWeight, repack
from bankfull.ops.products.triton.quantized.linear import run_linear
from bankfull.ops.products.triton.quantized.persistent import GemvPlan, one_row, supports
from bankfull.ops.products.triton.quantized.rows import RowsPlan, few_rows
from bankfull.ops.products.triton.quantized.tiles import Tiling, many_rows
from bankfull.weights.formats import READ_ONLY, SCHEMES
from bankfull.weights.formats.mxfp4 import BIAS, MXFP4
from bankfull.weights.qtensor import QTensor

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
LAYERS = 32
"""Layers of the model; its last shape, the head, counts once."""
TRAFFIC = 600e6
"""Bytes of weights in a chain, at least."""
Product = Callable[[Tensor, WordWeight, None], Tensor]


def random_codes(name: str, shape: tuple[int, ...]) -> QTensor:
    scheme = {**SCHEMES, **READ_ONLY}[name]
    parts = scheme.empty(shape, "cuda")
    for part in parts.values():
        if part.dtype in (torch.float16, torch.float32):
            part.fill_(0.01)
        else:
            # Bytes below 60 form only finite float16 and float8 numbers.
            part.view(torch.uint8).random_(60)
    if name == MXFP4:
        parts["blocks"].random_(256)
        parts["blocks"].view(-1, scheme.block_bytes)[:, 0] = BIAS - 7
    return QTensor(scheme, parts, shape)


def random_weight(name: str, outputs: int, columns: int) -> WordWeight:
    return repack(random_codes(name, (outputs, columns)))


def seconds(product: Product, x: Tensor, weights: list[WordWeight]) -> float:
    return chain_seconds([partial(product, x, weight, None) for weight in weights])


def chain_seconds(calls: list[Callable[[], object]]) -> float:
    """Seconds of one of these calls, one after the other in a graph; the best of several replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000 / len(calls))
    return best


def ways(rows: int, weight: WordWeight) -> Iterator[tuple[str, Product]]:
    if rows == 1 and supports(weight.form, weight.shape[1], torch.bfloat16):
        for outputs in (2, 4, 8, 16):
            for words, groups in ((4, 1), (8, 1), (4, 2)):
                for registers in (None, 128):
                    for programs in (1, 2, 3, 4, 6, 8):
                        plan = GemvPlan(outputs, programs, groups, words, registers)
                        yield f"persistent: {plan}", partial(one_row, plan=plan)
    if rows <= 2:
        for outputs in (2, 4, 8, 16):
            for warps in (1, 2, 4, 8):
                yield f"rows: {outputs} outputs, {warps} warps", partial(few_rows, plan=RowsPlan(outputs, warps))
    if 1 < rows <= 64:
        block = max(16, 1 << (rows - 1).bit_length())
        for outputs in (64, 128):
            for stages in (3, 4, 6):
                for splits in (1, 2, 4, 8):
                    tiling = Tiling(block, outputs, 4, stages, splits=splits)
                    yield f"tiles: {tiling}", partial(many_rows, tiling=tiling)
    if rows > 64:
        for block, outputs, warps in ((64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (256, 128, 8)):
            for stages in (2, 3, 4):
                for late in (True, False):
                    tiling = Tiling(block, outputs, warps, stages, late, splits=1)
                    yield f"tiles: {tiling}", partial(many_rows, tiling=tiling)


def measured(name: str, outputs: int, columns: int, rows: int, sweep: bool) -> float:
    """Seconds with the kernel that layers take."""
    first = random_weight(name, outputs, columns)
    copies = max(2, min(64, int(TRAFFIC / first.nbytes) + 1))
    weights = [first] + [random_weight(name, outputs, columns) for _ in range(copies - 1)]
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    def shown(label: str, taken: float) -> str:
        rate, work = first.nbytes / taken / 1e12, 2 * rows * outputs * columns / taken / 1e12
        return f"{taken * 1e6:9.1f} us  {rate:6.3f} TB/s  {work:7.1f} TFLOP/s  {label}"

    now = seconds(lambda x, weight, bias: run_linear(x, weight, Epilogue(bias)), x, weights)
    print(f"{name} {outputs} x {columns}, {rows} rows:", shown("as it is", now), flush=True)
    if not sweep:
        return now
    found: list[tuple[float, str]] = []
    expected = run_linear(x, first).float()
    for label, product in ways(rows, first):
        try:
            error = (product(x, first, None).float() - expected).abs().max().item()
            assert error <= 0.02 * expected.abs().max().item(), f"{label}: wrong by {error}"
            found.append((seconds(product, x, weights), label))
        except Exception as error:  # a tiling that does not fit the device is skipped
            if isinstance(error, AssertionError):
                raise
    for taken, label in sorted(found)[:6]:
        print("    ", shown(label, taken), flush=True)
    return now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="int4_g128,int8_row,fp8,q4_k,q8_0,q6_k")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--compare", action="store_true")
    asked = parser.parse_args()
    names = asked.types.split(",")
    if unknown := [name for name in names if name not in LAYOUTS]:
        print(f"{unknown[0]!r} is not a quantized type; use {', '.join(LAYOUTS)}.", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and this machine has none.", file=sys.stderr)
        return 2
    shapes = [(int(outputs), int(columns)) for outputs, columns in (s.split("x") for s in asked.shapes.split(","))]
    with torch.inference_mode():
        if asked.compare:
            from benchmarks.gpu.quantized_compare import compared

            return compared(names, shapes, int(asked.rows.split(",")[0]))
        for name in names:
            for rows in asked.rows.split(","):
                taken = [measured(name, *shape, int(rows), asked.sweep) for shape in shapes]
                if len(shapes) == len(SHAPES):
                    step = LAYERS * sum(taken[:-1]) + taken[-1]
                    print(f"{name}, {rows} rows: {step * 1e3:.3f} ms for the linear layers of a step", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
