"""Models of known shapes with random weights, as standard .gguf files.

For models whose weights are not available, and for sizes that no engine was tuned for: speed does not depend on the
values.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bankfull.errors import BankfullError
from bankfull.synthetic.gguf_file import ARCHITECTURES, write_gguf
from bankfull.synthetic.shapes import shape_config
from bankfull.weights.known_shapes import shape_names
from benchmarks.cpu_peers.install import CannotInstall

MATRICES = "q4_0"
SHAPES = tuple(name for name in shape_names() if shape_config(name)["model_type"] in ARCHITECTURES)
"""Shapes that are written as .gguf files."""


def shape_file(name: str, folder: Path) -> Path:
    """`folder/models/<name>.random.Q4_0.gguf`; written once."""
    target = folder / "models" / f"{name}.random.{MATRICES.upper()}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            write_gguf(name, shape_config(name), partial, MATRICES).path.rename(target)
        except BankfullError as error:
            raise CannotInstall(str(error)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
