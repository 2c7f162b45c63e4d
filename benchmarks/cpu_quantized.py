"""Speed of a linear layer on this CPU in each weight scheme: python -m benchmarks.cpu_quantized

Every scheme multiplies the same shape at 1, 8, 32 and 512 rows, all schemes in turn, several rounds. A cell has the
median of its rounds and, as a percentage of it, half of the distance between the quartiles. Few rows read so many
matrices that they come from memory; from MANY_ROWS on, fewer suffice. Activations are int8 in groups of 32 unless
the line says otherwise: `bf16` has bfloat16 weights and activations, `w8a8` one activation scale per row, `hadamard`
transforms many rows, `outliers` (LLM.int8()) keeps one column in a thousand in bfloat16. GB/s counts packed weights,
GOP/s multiplications and additions; the last line has the measured ceilings. Other work on the machine shows in the
spread: run it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bankfull.ops import Kit, Operation, linear_bf16, linear_hadamard, linear_int8, linear_outliers, linear_w8a8, native
from bankfull.weights.formats import mxfp4
from bankfull.weights.qtensor import QTensor
from bankfull.weights.quantize import quantize

BF16 = "bf16"
SCHEMES = (
    BF16,
    "q8_0",
    "q8_0:hadamard",
    "int8_row:w8a8",
    "int8_row:outliers",
    "q4_0",
    "int4_g64",
    "int4_g128",
    "uint4_g128",
    "mxfp4",
    "int3_g64",
    "int3_g128",
    "int2_g64",
)
MANY_ROWS = 32
OPERATIONS: dict[str, Operation] = {
    "": linear_int8,
    "w8a8": linear_w8a8,
    "hadamard": linear_hadamard,
    "outliers": linear_outliers,
}


@dataclass(slots=True)
class Line:
    """One scheme: its packed matrices, and the seconds of each round by row count."""

    name: str
    run: Callable[..., Tensor]
    matrices: list[Any]
    seconds: dict[int, list[float]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return int(self.matrices[0].nbytes)

    def time(self, x: Tensor, count: int) -> None:
        began = time.perf_counter()
        for matrix in self.matrices[:count]:
            self.run(x, matrix, None)
        self.seconds.setdefault(len(x), []).append((time.perf_counter() - began) / count)


def weight_of(name: str, outputs: int, columns: int) -> QTensor:
    values = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    if name == BF16:
        return QTensor.dense(values.to(torch.bfloat16))
    if name != mxfp4.MXFP4:
        return quantize(values, name)
    blocks = torch.randint(256, (outputs, columns // mxfp4.BLOCK, mxfp4.BLOCK_BYTES), dtype=torch.uint8)
    blocks[..., 0] = mxfp4.BIAS - 8
    return QTensor(mxfp4.SCHEME, {"blocks": blocks.flatten(1)}, (outputs, columns))


def line_of(name: str, outputs: int, columns: int, megabytes: int) -> Line | None:
    """None if no kernel of this machine has the operation."""
    scheme, _, kind = name.partition(":")
    operation = linear_bf16 if scheme == BF16 else OPERATIONS[kind]
    kit = Kit("cpu", ("native",))
    weight = weight_of(scheme, outputs, columns)
    if operation is linear_outliers:
        kept = torch.arange(0, columns, 1000)
        weight = replace(weight, outliers=(kept, torch.randn(outputs, len(kept)).to(torch.bfloat16)))
    facts = {"dtype": torch.float32, "weight": weight}
    if not kit.offers(operation, **facts):
        return None
    first = kit.prepare(operation, weight, **facts)
    count = max(1, -(-megabytes * 2**20 // first.nbytes))
    rest = [kit.prepare(operation, weight, **facts) for _ in range(count - 1)]
    return Line(name, kit.bind(operation, **facts), [first, *rest])


def measured(lines: list[Line], columns: int, rows: list[int], rounds: int) -> None:
    for count in rows:
        x = torch.randn(count, columns)
        for number in range(rounds + 1):
            for line in lines:
                line.time(x, len(line.matrices) if count < MANY_ROWS else 1 + (len(line.matrices) > 1))
                if number == 0:  # the first round warms up
                    line.seconds[count].clear()


def spread_of(seconds: list[float]) -> float:
    low, _, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / statistics.median(seconds)


def results(lines: list[Line], outputs: int, columns: int, rows: list[int]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        cells = {}
        for count in rows:
            median = statistics.median(line.seconds[count])
            cells[str(count)] = {
                "seconds": median,
                "spread": spread_of(line.seconds[count]),
                "gb_per_s": line.nbytes / median / 1e9,
                "gop_per_s": 2 * count * outputs * columns / median / 1e9,
                "of_bf16": statistics.median(lines[0].seconds[count]) / median if lines[0].name == BF16 else None,
            }
        bits = line.nbytes * 8 / outputs / columns
        found.append({"scheme": line.name, "bits_per_weight": bits, "rows": cells})
    return found


def table(found: list[dict[str, Any]], rows: list[int]) -> str:
    text = [f"{'scheme':16}{'bits':>7}" + "".join(f"{f'{count} rows: GB/s, GOP/s, x bf16':>36}" for count in rows)]
    for line in found:
        cells = ""
        for count in rows:
            cell = line["rows"][str(count)]
            times = "" if cell["of_bf16"] is None else f"{cell['of_bf16']:6.2f}x"
            cells += f"{cell['gb_per_s']:14.1f}{cell['gop_per_s']:9.0f}{times:>8}{cell['spread']:5.0%}"
        text.append(f"{line['scheme']:16}{line['bits_per_weight']:7.3f}{cells}")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="comma-separated; the first should be bf16")
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--shape", default="4096x4096", help="OUTPUTSxCOLUMNS")
    parser.add_argument("--megabytes", type=int, default=320, help="packed matrices per scheme, for few rows")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: as the engine chooses")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.threads:
        native.set_threads(asked.threads)
    from bankfull.limits.machine.ceilings import measure

    outputs, columns = (int(part) for part in asked.shape.split("x"))
    rows = [int(part) for part in asked.rows.split(",")]
    made = {name: line_of(name, outputs, columns, asked.megabytes) for name in asked.schemes.split(",")}
    lines = [line for line in made.values() if line is not None]
    measured(lines, columns, rows, max(2, asked.rounds))
    found, ceilings = results(lines, outputs, columns, rows), measure()
    if asked.json:
        print(json.dumps({"shape": [outputs, columns], "schemes": found, "ceilings": ceilings.as_json()}))
        return
    print(table(found, rows))
    for name in (name for name, line in made.items() if line is None):
        print(f"{name}: no kernel of this machine")
    peaks = ", ".join(f"{kind} {rate / 1e9:,.0f} GOP/s" for kind, rate in ceilings.flops.items())
    print(f"ceilings: {ceilings.read_bytes_per_s / 1e9:.1f} GB/s from memory; {peaks}; {ceilings.threads} threads")


if __name__ == "__main__":
    main()
