"""`bankfull make-model`: a checkpoint of a real model's shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def make_model(
    shape: Annotated[
        str | None,
        typer.Argument(help="A shape by name (--list shows them), a config.json, or a model directory."),
    ] = None,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory for the model.", show_default=False)
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Keep only the first layers.", show_default="all")] = None,
    scale: Annotated[
        str, typer.Option(help="real: the sizes of the shape. tiny: the same architecture, small enough for a test.")
    ] = "real",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the weights: auto (as configured, else bfloat16), float32, ...")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    gguf: Annotated[
        str | None,
        typer.Option(help="Write a .gguf file with matrices of this type, such as q4_0, instead.", show_default=False),
    ] = None,
    list_shapes: Annotated[bool, typer.Option("--list", help="List the shapes and their families.")] = False,
) -> None:
    """Write a model of a real shape with random weights, a tokenizer and a chat template.

    Speed and memory depend on the shape only, so such a model stands for the real one in measurements and tests. Its
    text has no meaning.
    """
    from bankfull.errors import ConfigError
    from bankfull.synthetic.shapes import shape_config, tiny, with_layers
    from bankfull.weights.known_shapes import shape_names

    if list_shapes or shape is None:
        for name in shape_names():
            print(f"{name:20} {shape_config(name)['model_type']}")
        return
    if output is None:
        raise ConfigError("`bankfull make-model` needs a directory for the model: give -o DIR.")
    if scale not in ("real", "tiny"):
        raise ConfigError(f"--scale {scale[:40]!r} is unknown; use real or tiny.")
    config = shape_config(shape)
    if scale == "tiny":
        config = tiny(config)
    if layers is not None:
        config = with_layers(config, layers)
    name = Path(shape).stem if Path(shape).suffix == ".json" else Path(shape).name
    _write(name if scale == "real" else f"{name}-tiny", config, output, dtype, seed, gguf)


def _write(name: str, config: dict[str, Any], output: Path, dtype: str, seed: int, gguf: str | None) -> None:
    from bankfull.cli.terminal import say
    from bankfull.limits.meter.metered import torch_dtype
    from bankfull.limits.units import scaled
    from bankfull.synthetic.checkpoint import write_checkpoint
    from bankfull.synthetic.gguf_file import write_gguf
    from bankfull.weights.fetch import displayed

    chosen = torch_dtype(str(config.get("dtype") or "bfloat16") if dtype == "auto" else dtype, config)
    with displayed() as report:
        if gguf is None:
            written = write_checkpoint(name, config, output, chosen, seed, report)
        else:
            written = write_gguf(name, config, output, gguf, seed, report)
    say(
        f"bankfull: {scaled(written.parameters)} random parameters written, {scaled(written.weight_bytes, 'B')}"
        + ("" if written.tokenizer else "; the vocabulary is too small for a tokenizer")
    )
    print(written.path)
