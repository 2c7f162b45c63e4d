"""Partial attention of a context rank on this CPU, body against kernel: python -m benchmarks.partial_attention

A rank has every N-th page of some sequences of an 8B model's layer, in bfloat16. `whole` is the kernel of paged
attention over all pages, which one rank would run. Body, kernel and whole run in turn; each number is a median of the
rounds. Other work on the machine slows the body down more than the kernel: run it alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bankfull.ops import PagedMeta, native, paged_attention, partial_attention
from bankfull.ranks.page_share import PageShare

HEADS, KV, SIZE, PAGE = 32, 8, 128, 16
SCALE = SIZE**-0.5


def calls(sequences: int, new: int, past: int, ranks: int) -> dict[str, Callable[[], Tensor]]:
    width = -(-(new + past) // PAGE)
    table = 1 + torch.arange(sequences * width).view(sequences, width)
    share = PageShare(ranks, 0)
    frames = sequences * width + 1
    k, v = (torch.randn(frames, PAGE, KV, SIZE).to(torch.bfloat16) for _ in range(2))
    q = torch.randn(sequences * new, HEADS, SIZE).to(torch.bfloat16)
    slots = torch.zeros(len(q), dtype=torch.long)
    whole = PagedMeta(np.arange(sequences + 1) * new, np.full(sequences, new + past), table, slots, PAGE)
    own = replace(whole, pages=torch.where(share.owns(table), table, -1))
    kernel, all_pages = partial_attention.providers["native"].run, paged_attention.providers["native"].run
    return {
        "body": lambda: partial_attention.body(q, k, v, own, ranks, SCALE),
        "kernel": lambda: kernel(q, k, v, own, ranks, SCALE),
        "whole": lambda: all_pages(q, k, v, whole, SCALE),
    }


def measured(made: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(rounds + 1):
        for name, call in made.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found[1:]) for name, found in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--context", type=int, default=4096, help="earlier tokens")
    asked = parser.parse_args(arguments)
    if (problem := native.status()) is not None:
        raise SystemExit(problem)
    print(f"{'sequences':>10}{'new tokens':>12}{'body, ms':>10}{'kernel, ms':>12}{'whole, ms':>11}{'body/kernel':>13}")
    for sequences, new in ((1, 1), (8, 1), (1, 256)):
        found = measured(calls(sequences, new, asked.context, asked.ranks), asked.rounds)
        body, kernel, whole = (1e3 * found[name] for name in ("body", "kernel", "whole"))
        print(f"{sequences:10}{new:12}{body:10.2f}{kernel:12.2f}{whole:11.2f}{body / kernel:12.0f}x", flush=True)


if __name__ == "__main__":
    main()
