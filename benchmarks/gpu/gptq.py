"""python -m benchmarks.gpu.gptq --shape llama-3-8b --layers 4: the time of `bankfull quantize --method gptq`.

The first layers of a shape get random weights and are quantized as the command does it: read from a checkpoint in a
temporary directory, calibrated on random tokens, rounded, packed and written. GPTQ's work depends on sizes only, and
layers of a shape are taken to be alike. So the time of the whole model is extrapolated: each layer that was left out
adds the median of the layers between the first, which compiles kernels, and the last, after which no text is run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bankfull.errors import BankfullError, ConfigError
from bankfull.quantize.calibration import LENGTH, TOKENS
from bankfull.quantize.recipe import parse_recipe
from bankfull.quantize.save import save_quantized
from bankfull.quantize.table import METHODS
from bankfull.runtime.device import open_device
from bankfull.synthetic.checkpoint import write_checkpoint
from bankfull.synthetic.shapes import LAYERS, shape_config, with_layers
from bankfull.weights.replaced import ReplacedTensors
from bankfull.weights.source import open_model

FEWEST = 3
"""A first layer, a last one, and one between them."""


@dataclass(frozen=True, slots=True)
class WatchedTensors(ReplacedTensors):
    """Notes when each layer is written: its files are released then."""

    ended: list[float] = field(default_factory=list)

    def release(self) -> None:
        ReplacedTensors.release(self)
        self.ended.append(perf_counter())


@dataclass(frozen=True, slots=True)
class QuantizeTime:
    """Seconds. `layers`: of each; that of the first includes what comes before it."""

    shape: str
    device: str
    tokens: int
    layers: list[float]
    total: float
    """Of the layers that were quantized, with the embeddings and the head."""
    whole_layers: int
    peak_bytes: int | None
    """Of the device's memory; None on a CPU."""

    @property
    def per_layer(self) -> float:
        return median(self.layers[1:-1])

    @property
    def extrapolated(self) -> float:
        return self.total + (self.whole_layers - len(self.layers)) * self.per_layer

    def text(self) -> str:
        each = ", ".join(f"{seconds:.2f}" for seconds in self.layers)
        memory = "" if self.peak_bytes is None else f"; at most {self.peak_bytes / 2**30:.1f} GiB of the device"
        all_measured = len(self.layers) == self.whole_layers
        last = (
            f"whole model: {self.total:.1f} s, measured"
            if all_measured
            else f"whole model of {self.whole_layers} layers: {self.extrapolated:.1f} s, extrapolated from "
            f"{len(self.layers)} layers"
        )
        return "\n".join(
            (
                f"{self.shape}, GPTQ to 4 bits in groups of 128, {self.tokens} tokens, {self.device}",
                f"layers, s: {each}",
                f"a layer between the first and the last: {self.per_layer:.2f} s (median){memory}",
                f"{len(self.layers)} layers with embeddings and head, read and written: {self.total:.1f} s",
                last,
            )
        )


def measured(shape: str, layers: int, device: str, tokens: int) -> QuantizeTime:
    config = shape_config(shape)
    if layers < FEWEST:
        raise ConfigError(f"--layers {layers} is too few to tell the layers between the first and the last; give 3.")
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens} gives no calibration text; give at least 1.")
    opened = open_device(device).torch
    cut = with_layers(config, layers)
    length = min(LENGTH, tokens)
    random = torch.Generator().manual_seed(0)
    text = torch.randint(0, config["vocab_size"], (tokens // length, length), generator=random).tolist()
    recipe = parse_recipe("gptq", "4", "128", methods=tuple(METHODS))
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(shape, cut, Path(folder) / "model", torch.bfloat16)
        files = open_model(Path(folder) / "model")
        watched = WatchedTensors(files.source, {})
        on_gpu = opened.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(opened)
        begun = perf_counter()
        save_quantized(
            replace(files, source=watched), recipe, Path(folder) / "quantized", sequences=text, device=opened
        )
        total = perf_counter() - begun
        peak = torch.cuda.max_memory_allocated(opened) if on_gpu else None
    whole = next(config[name] for name in LAYERS if isinstance(config.get(name), int))
    seconds = [after - before for before, after in pairwise([begun, *watched.ended])]
    name = torch.cuda.get_device_name(opened) if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    return QuantizeTime(shape, name, sum(map(len, text)), seconds, total, whole, peak)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.gptq", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=4, help=f"of the shape that are quantized, at least {FEWEST}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the calibration text")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    asked = parser.parse_args(arguments)
    try:
        found = measured(asked.shape, asked.layers, asked.device, asked.tokens)
    except BankfullError as error:
        print(error, file=sys.stderr)
        return 2
    print(found.text())
    if asked.json is not None:
        figures = {**asdict(found), "per_layer": found.per_layer, "extrapolated": found.extrapolated}
        asked.json.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
