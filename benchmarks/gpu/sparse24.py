"""python -m benchmarks.gpu.sparse24 --rows 1,16,64,256,2048,16384 [--sweep]

2:4 sparse linear layers beside dense ones in bfloat16, for the shapes of an 8B model. Chains of launches over more
weights than any cache holds are captured and replayed in turns. TFLOP/s count the zeros, too, so that both columns mean
the same work. --sweep times other plans of our kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bankfull.ops.products.triton import linear as dense_layers
from bankfull.ops.products.triton.sparse24 import library as sparse24_library
from bankfull.ops.products.triton.sparse24 import linear as sparse24
from bankfull.ops.products.triton.sparse24.layout import SparseWeight, prepare
from bankfull.ops.products.triton.sparse24.rows import RowPlan, one_row
from bankfull.ops.products.triton.sparse24.tiles import MOST_ROWS, TilePlan, expanded_product, tiles
from bankfull.ops.products.triton.w8a8 import int8_product
from bankfull.quantize.sparse import parse_pattern, pruned_by
from bankfull.synthetic.random_weights import RandomWeights
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import is_inner_matrix
from bankfull.weights.sparse_source import compressed

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}
ROWS = "1,16,64,256,2048,16384"
TRAFFIC = 600e6
"""Bytes of dense weights in a chain, at least: several times the cache."""
PAIRS = 7
Product = Callable[[], object]


def pruned(matrix: Tensor) -> Tensor:
    """The two largest of each four columns."""
    return pruned_by(matrix.abs(), matrix, parse_pattern("2:4"), by_row=True)


class PrunedWeights(RandomWeights):
    """Random weights whose inner matrices are 2:4 sparse, with their zeros."""

    def get(self, name: str) -> QTensor:
        found = RandomWeights.get(self, name)
        return QTensor.dense(pruned(found.parts["data"])) if is_inner_matrix(self, name) else found


def chain(products: Sequence[Product]) -> torch.cuda.CUDAGraph:
    for product in products[:2]:  # compiles
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    return graph


def seconds(graph: torch.cuda.CUDAGraph, count: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / count


def alone(products: Sequence[Product]) -> float:
    """Seconds of one product, the best of some replays."""
    graph = chain(products)
    return min(seconds(graph, len(products)) for _ in range(5))


def in_turns(dense: Sequence[Product], sparse: Sequence[Product]) -> tuple[float, float, float]:
    """Seconds of a dense and of a sparse product, and the median of the ratios."""
    graphs = chain(dense), chain(sparse)
    pairs = [tuple(seconds(graph, len(dense)) for graph in graphs) for _ in range(PAIRS + 1)][1:]
    both = [median(taken) for taken in zip(*pairs, strict=True)]
    return both[0], both[1], median(one / other for one, other in pairs)


class Layer:
    """Copies of a layer's weight, dense and sparse."""

    def __init__(self, outputs: int, columns: int) -> None:
        self.shape = outputs, columns
        copies = max(2, min(24, int(TRAFFIC / (2 * outputs * columns)) + 1))
        matrices = [
            pruned(torch.randn(outputs, columns, device="cuda").mul_(columns**-0.5).to(torch.bfloat16))
            for _ in range(copies)
        ]
        self.dense = [QTensor.dense(matrix) for matrix in matrices]
        self.sparse = [prepare(compressed(whole, torch.bfloat16, "a weight")) for whole in self.dense]

    def shown(self, rows: int, taken: float, nbytes: int) -> str:
        work = 2 * rows * self.shape[0] * self.shape[1] / taken / 1e12
        return f"{taken * 1e6:9.1f} us {work:7.1f} TFLOP/s {nbytes / taken / 1e12:6.3f} TB/s"

    def measured(self, name: str, rows: int, sweep: bool) -> tuple[float, float]:
        x = torch.randn(rows, self.shape[1], device="cuda", dtype=torch.bfloat16)
        wanted, found = (
            dense_layers.run_linear(x, self.dense[0]).float(),
            sparse24.run_linear(x, self.sparse[0]).float(),
        )
        error = float((found - wanted).norm() / wanted.norm())
        dense, sparse, ratio = in_turns(
            [partial(dense_layers.run_linear, x, weight) for weight in self.dense],
            [partial(sparse24.run_linear, x, weight) for weight in self.sparse],
        )
        print(
            f"{name:8} {self.shape[0]:>5} x {self.shape[1]:<5} {rows:>5} rows | dense "
            f"{self.shown(rows, dense, self.dense[0].nbytes)} | sparse "
            f"{self.shown(rows, sparse, self.sparse[0].nbytes)} | {ratio:5.2f}x, error {error:.1e}",
            flush=True,
        )
        if sweep:
            self.swept(rows, x)
        return dense, sparse

    def swept(self, rows: int, x: Tensor) -> None:
        found: list[tuple[float, str]] = []
        for label, product in ways(rows, x, self.sparse[0]):
            try:
                found.append((alone([partial(product, weight) for weight in self.sparse]), label))
            except Exception as error:  # a plan that does not fit the device
                torch.cuda.synchronize()
                print(f"         {label}: {' '.join(str(error).split())[:100]}")
        for taken, label in sorted(found)[:8]:
            print(f"         {self.shown(rows, taken, self.sparse[0].nbytes)}  {label}", flush=True)


def ways(rows: int, x: Tensor, first: SparseWeight) -> Iterator[tuple[str, Callable[[SparseWeight], Tensor]]]:
    """Other ways to compute a product."""
    if first.packed is not None and not rows % sparse24_library.ROWS:
        yield "cuSPARSELt", lambda weight: sparse24_library.library.multiply(weight.packed, x, None)
    if first.words is None:
        return
    if rows == 1:
        for outputs in (2, 4, 8, 16):
            for quads in (32, 64, 128, 256):
                for warps in (1, 2, 4, 8):
                    if outputs * quads * 4 // (32 * warps) <= 64:
                        own_row = RowPlan(outputs, quads, warps)
                        yield str(own_row), lambda w, p=own_row: one_row(x, w.words, None, plan=p)
    elif rows <= MOST_ROWS:
        for outputs in (64, 128):
            for words in (16, 32, 64):
                for stages in (3, 4, 6):
                    for splits in (1, 2, 4, 8):
                        if not first.shape[1] // 4 % (splits * words):
                            own_tile = TilePlan(outputs, words, stages, splits)
                            yield str(own_tile), lambda w, p=own_tile: tiles(x, w.words, None, plan=p)
    else:
        yield "expanded", lambda w: expanded_product(x, w.words, None)


def int8_compared(rows: int) -> None:
    """What sparse int8 could reach: the products alone, without scales."""
    outputs, columns = SHAPES["gate, up"]
    codes = torch.randint(-127, 128, (outputs, columns), device="cuda", dtype=torch.int8)
    x = torch.randint(-127, 128, (rows, columns), device="cuda", dtype=torch.int8)
    kept = codes.unflatten(-1, (-1, 4)).clone()
    kept[..., 1:3] = 0
    work = 2 * rows * outputs * columns / 1e12
    taken = alone([partial(int8_product, x, codes)] * 4)
    print(f"int8     {rows} rows | dense {work / taken:7.1f} TOP/s", end="")
    try:
        packed = torch._cslt_compress(kept.flatten(-2))
        kind = {"out_dtype": torch.bfloat16, "transpose_result": True}
        again = alone([lambda: torch._cslt_sparse_mm(packed, x.t(), **kind)] * 4)
        print(f" | sparse {work / again:7.1f} TOP/s | {taken / again:5.2f}x")
    except RuntimeError as error:
        print(f" | sparse: {' '.join(str(error).split())[:120]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and this machine has none.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    reason = sparse24_library.missing(device, torch.bfloat16)
    version = getattr(torch.backends.cusparselt, "version", lambda: None)()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuSPARSELt {version}: {reason or 'it is used'}")
    counts = [int(text) for text in asked.rows.split(",")]
    totals = {rows: [0.0, 0.0] for rows in counts}
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            layer = Layer(*shape)
            if name == "qkv":
                shared = "shared with our kernels" if layer.sparse[0].words is not None else "in an order of its own"
                print(
                    f"kept numbers: {shared}; {layer.sparse[0].nbytes / layer.dense[0].nbytes:.4f} of the dense bytes"
                )
            for rows in counts:
                for i, taken in enumerate(layer.measured(name, rows, asked.sweep)):
                    totals[rows][i] += taken
            del layer
            torch.cuda.empty_cache()
        for rows, (dense, sparse) in totals.items():
            both = f"dense {dense * 1e6:9.1f} us, sparse {sparse * 1e6:9.1f} us"
            print(f"a layer of {rows:>5} rows: {both}, {dense / sparse:.2f}x")
        if asked.sweep and reason is None:
            int8_compared(16384)
    return 0


if __name__ == "__main__":
    sys.exit(main())
