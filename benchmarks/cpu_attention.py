"""Speed of decode attention on this CPU for each type of KV pages: python -m benchmarks.cpu_attention

One new token per sequence, all types of pages in turn, several rounds; `x bf16` is the median of the ratios of the
rounds, each against bf16 of the same round, and beside it stands half of the distance between their quartiles. Pages
lie in frames as in the engine, in as many layers as are needed for their bytes to come from memory; GB/s counts the
codes and scales that a call has to read. Sequences are fewer at long contexts, where `--megabytes` of bf16 pages would
not hold one layer. Other work on the machine shows in the spread: run it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bankfull.layers.attention import Heads, page_tensors
from bankfull.ops import PagedMeta, native, paged_attention
from bankfull.ops.pages.rounded import ROUNDED, is_rounded
from bankfull.state.spec import Paged, layout_of
from bankfull.state.storage import LayerStates, Storage

BF16 = "bf16"
KINDS: dict[str, torch.dtype] = {BF16: torch.bfloat16, **ROUNDED}
PAGE_TOKENS = 16
CPU = torch.device("cpu")


@dataclass(slots=True)
class Pages:
    """Layers of random pages of one type, and the seconds that each round takes for one layer."""

    kind: str
    layers: list[LayerStates]
    nbytes: int
    """That one layer's attention reads."""
    seconds: list[float] = field(default_factory=list)

    def time(self, q: Tensor, meta: PagedMeta, scale: float) -> None:
        run = paged_attention.providers["native"].run
        began = time.perf_counter()
        for (state,) in self.layers:
            run(q, state["k"], state["v"], meta, scale, None, None, state.get("k_scale"), state.get("v_scale"))
        self.seconds.append((time.perf_counter() - began) / len(self.layers))


def pages_of(kind: str, heads: Heads, sequences: int, context: int, layers: int) -> Pages:
    dtype = KINDS[kind]
    tensors = page_tensors(heads, dtype)
    frames = sequences * -(-context // PAGE_TOKENS)
    storage = Storage(layout_of([[Paged(tensors)]] * layers, PAGE_TOKENS), frames, 0, CPU)
    random = torch.Generator().manual_seed(0)
    for (state,) in storage.layers:
        for name, tensor in state.items():
            if name.endswith("scale"):
                tensor.fill_(0.01)
            elif is_rounded(dtype):
                # Any byte is a code. Of fp8, those without the highest exponent, which has the NaN.
                codes = torch.randint(0, 128, tensor.shape, dtype=torch.uint8, generator=random)
                tensor.view(torch.uint8).copy_(codes & 0x77 if kind == "fp8" else codes)
            else:
                tensor.normal_(generator=random)
    return Pages(kind, storage.layers, sequences * context * sum(tensor.nbytes for tensor in tensors))


def meta_of(sequences: int, context: int) -> PagedMeta:
    """Each sequence has consecutive frames, as after a prompt."""
    width = -(-context // PAGE_TOKENS)
    table = torch.arange(sequences * width).view(sequences, width)
    lengths = np.full(sequences, context)
    return PagedMeta(np.arange(sequences + 1), lengths, table, table[:, -1] * PAGE_TOKENS, PAGE_TOKENS)


def spread_of(numbers: list[float]) -> float:
    low, _, high = statistics.quantiles(numbers, n=4)
    return (high - low) / 2


def measured(
    kinds: Sequence[str], heads: Heads, context: int, most: int, megabytes: int, rounds: int
) -> dict[str, Any]:
    """One shape and context: a record per type of pages."""
    token = sum(tensor.nbytes for tensor in page_tensors(heads, torch.bfloat16))
    sequences = max(1, min(most, megabytes * 2**20 // (token * context)))
    layers = max(1, megabytes * 2**20 // (token * context * sequences))
    q = torch.randn(sequences, heads.count, heads.size, generator=torch.Generator().manual_seed(1))
    meta = meta_of(sequences, context)
    all_pages = [pages_of(kind, heads, sequences, context, layers) for kind in kinds]
    for number in range(rounds + 1):
        for pages in all_pages:
            pages.time(q, meta, heads.scale)
            if number == 0:  # the first round warms up
                pages.seconds.clear()
    found = {}
    for pages in all_pages:
        ratios = [first / own for first, own in zip(all_pages[0].seconds, pages.seconds, strict=True)]
        median = statistics.median(pages.seconds)
        found[pages.kind] = {
            "seconds": median,
            "gb_per_s": pages.nbytes / median / 1e9,
            "speedup": statistics.median(ratios),
            "spread": spread_of(ratios),
        }
    shape = {"heads": heads.count, "kv_heads": heads.kv, "size": heads.size}
    return {**shape, "context": context, "sequences": sequences, "layers": layers, "pages": found}


def table(records: Sequence[dict[str, Any]], kinds: Sequence[str]) -> str:
    text = [
        f"{'heads':>10}{'size':>6}{'context':>9}{'sequences':>11}"
        + "".join(f"{kind + ': GB/s, x ' + kinds[0]:>26}" for kind in kinds)
    ]
    for record in records:
        head = f"{record['heads']}/{record['kv_heads']}"
        cells = ""
        for kind in kinds:
            cell = record["pages"][kind]
            cells += f"{cell['gb_per_s']:14.1f}{cell['speedup']:6.2f}x{cell['spread']:5.2f}"
        text.append(f"{head:>10}{record['size']:6}{record['context']:9}{record['sequences']:11}{cells}")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pages", default=",".join(KINDS), help="comma-separated; the others are compared with the first"
    )
    parser.add_argument("--heads", default="32/8", help="query heads and KV heads")
    parser.add_argument("--sizes", default="64,128", help="head sizes")
    parser.add_argument("--contexts", default="256,1024,4096,16384")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--megabytes", type=int, default=1024, help="of bf16 pages")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0: as the engine chooses")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    if asked.threads:
        native.set_threads(asked.threads)
    kinds = asked.pages.split(",")
    count, kv = (int(part) for part in asked.heads.split("/"))
    records = []
    for size in (int(part) for part in asked.sizes.split(",")):
        for context in (int(part) for part in asked.contexts.split(",")):
            heads = Heads(count, kv, size, size**-0.5)
            records.append(measured(kinds, heads, context, asked.sequences, asked.megabytes, max(2, asked.rounds)))
    if asked.json:
        print(json.dumps({"isa": native.select_isa(), "records": records}))
        return
    print(table(records, kinds))


if __name__ == "__main__":
    main()
