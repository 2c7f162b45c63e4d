"""Models of known shapes with random weights, as standard .gguf files.

For models whose weights are not available, and for sizes that no engine was tuned for: speed does not depend on the
values.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bankfull.errors import BankfullError
from bankfull.synthetic.gguf_file import ARCHITECTURES, write_gguf
from bankfull.synthetic.shapes import shape_config, with_layers
from bankfull.weights.known_shapes import shape_names
from benchmarks.cpu_peers.install import CannotInstall

MATRICES, PUBLISHED = "q4_0", {"gpt_oss": "mxfp4"}
"""Types of matrices: llama.cpp's fastest, but for families that are published in another one."""
SHAPES = tuple(name for name in shape_names() if shape_config(name)["model_type"] in ARCHITECTURES)
"""Shapes that are written as .gguf files."""


def shape_file(name: str, folder: Path, layers: int | None = None) -> Path:
    """`folder/models/<name>.random.Q4_0.gguf`; written once. `layers`: keep only the first ones, for a model that is
    larger than the memory; the work of a layer stays the same."""
    config = shape_config(name)
    kind = PUBLISHED.get(config["model_type"], MATRICES)
    try:
        config = config if layers is None else with_layers(config, layers)
    except BankfullError as error:
        raise CannotInstall(str(error)) from None
    cut = "" if layers is None else f".{layers}-layers"
    target = folder / "models" / f"{name}{cut}.random.{kind.upper()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            write_gguf(name, config, partial, kind).path.rename(target)
        except BankfullError as error:
            raise CannotInstall(str(error)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
