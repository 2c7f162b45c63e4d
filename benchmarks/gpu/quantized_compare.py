"""Compares kernels for few rows of quantized weights: on CUDA cores, and for float8 on tensor cores in every tiling.

All of them are compiled first, in parallel processes, which leave their results in the compiler's cache. Results are
checked before anything is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from bankfull.ops.products.triton.quantized.fp8_rows import Fp8Plan, fp8_rows, supports
from bankfull.ops.products.triton.quantized.fp8_rows import plan_for as wide_cut_for
from bankfull.ops.products.triton.quantized.rows import few_rows
from bankfull.ops.products.triton.quantized.tiles import many_rows
from benchmarks.gpu.quantized import TRAFFIC, Product, random_weight, seconds

CUTS = (
    Fp8Plan(16, 4),
    Fp8Plan(16, 4, together=4),
    Fp8Plan(16, 4, 4),
    Fp8Plan(16, 4, 4, 4),
    Fp8Plan(32, 4),
    Fp8Plan(32, 4, 16),
    Fp8Plan(16, 8),
    Fp8Plan(16, 8, 4),
    Fp8Plan(32, 8),
    Fp8Plan(16, 2),
    Fp8Plan(16, 16, 4, 1),
)
PROCESSES = 14
LAYERS = 32
"""Layers of the model whose step is summed; its last shape, the head, counts once."""
FEW = 64
"""Outputs of the weights that are compiled for."""
WRONG = 0.01
"""Relative error of the largest result above which a kernel is wrong; bfloat16 is off by less than half of that."""
Task = tuple[str, int, int, Fp8Plan | None]


def before(rows: int) -> Product:
    return few_rows if rows == 1 else many_rows


def compile_one(task: Task) -> str:
    """Runs in its own process."""
    name, columns, rows, plan = task
    with torch.inference_mode():
        weight = random_weight(name, FEW, columns)
        x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        try:
            if plan is None:
                before(rows)(x, weight, None)
            elif supports(weight, x.dtype):
                fp8_rows(x, weight, None, plan=plan)
            torch.cuda.synchronize()
        except Exception as error:  # a tiling that does not fit the device is skipped
            return f"{task}: {error}".splitlines()[0]
    return ""


def compile_all(names: Sequence[str], shapes: Sequence[tuple[int, ...]], rows: int) -> None:
    columns = sorted({shape[1] for shape in shapes}, reverse=True)
    tasks: list[Task] = [(name, width, rows, plan) for width in columns for plan in (None, *CUTS) for name in names]
    begin = time.perf_counter()
    # A forked child cannot use the CUDA device.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1), mp_context=context) as pool:
        failed = [line for line in pool.map(compile_one, tasks) if line]
    print(f"{len(tasks)} kernels compiled in {time.perf_counter() - begin:.1f} s", *failed, sep="\n", flush=True)


def relative_error(product: Product, x: Tensor, weight, expected: Tensor) -> float:  # type: ignore[no-untyped-def]
    return ((product(x, weight, None).float() - expected).abs().max() / expected.abs().max()).item()


def compared_one(name: str, outputs: int, columns: int, rows: int) -> tuple[list[str], float, float, float]:
    """Table lines, and seconds: before, with the default tiling, and with the best."""
    first = random_weight(name, outputs, columns)
    copies = max(2, min(64, int(TRAFFIC / first.nbytes) + 1))
    weights = [first] + [random_weight(name, outputs, columns) for _ in range(copies - 1)]
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    expected = before(rows)(x, first, None).float()
    old = seconds(before(rows), x, weights)
    found: list[tuple[float, float, str]] = []
    now = old
    for plan in CUTS if supports(first, x.dtype) else ():
        product = partial(fp8_rows, plan=plan)
        try:
            error = relative_error(product, x, first, expected)
            if not error <= WRONG:
                print(f"{name} {outputs} x {columns}: {plan} is wrong by {error:.3g}", flush=True)
                continue
            taken = seconds(product, x, weights)
        except (RuntimeError, ValueError) as problem:
            print(f"{name} {outputs} x {columns}: {plan}: {problem}".splitlines()[0], flush=True)
            continue
        found.append((taken, error, str(plan)))
        if plan == wide_cut_for(first):
            now = taken

    def rate(taken: float) -> str:
        return f"{taken * 1e6:7.1f} us {first.nbytes / taken / 1e12:6.3f} TB/s"

    lines = [f"{name} {outputs} x {columns}, {rows} rows: before {rate(old)}, now {rate(now)}"]
    lines += [f"    {rate(taken)}  off by {error:.1e}  {label}" for taken, error, label in sorted(found)[:4]]
    return lines, old, now, min([old, *(taken for taken, _, _ in found)])


def compared(names: Sequence[str], shapes: Sequence[tuple[int, ...]], rows: int) -> int:
    compile_all(names, shapes, rows)
    table: list[str] = []
    for name in names:
        steps = [0.0, 0.0, 0.0]
        for outputs, columns in shapes:
            lines, *times = compared_one(name, outputs, columns, rows)
            table += lines
            often = 1 if (outputs, columns) == shapes[-1] and len(shapes) > 1 else LAYERS
            steps = [step + often * taken for step, taken in zip(steps, times, strict=True)]
            torch.cuda.empty_cache()
        labels = ("before", "now", "best")
        text = ", ".join(f"{label} {1e3 * step:.3f} ms" for label, step in zip(labels, steps, strict=True))
        table.append(f"{name}: the linears of a step ({LAYERS} layers and the last shape once): {text}")
    print("\n".join(table))
    return 0
