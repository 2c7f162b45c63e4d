"""A short start for commands that run a model.

For the command line alone: a program that imports `bankfull` controls its own imports.
"""

from __future__ import annotations

import ctypes
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.text.template import ChatTemplate
    from bankfull.text.tokenizer import Tokenizer

TORCH_LIBRARIES = (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL))
"""Libraries that `import torch` loads before any of its Python code runs, with the visibility that it gives them."""


def read_text_while_torch_loads(model: str) -> tuple[Tokenizer, ChatTemplate | None] | None:
    """The tokenizer and the chat template of `model`, read while torch's shared libraries are loaded.

    Both take a quarter of a second; one needs the interpreter and the other does not. None where the text cannot be
    read: loading the model reports the reason, after its own checks.
    """
    # Imported before the libraries are loaded: an extension module would wait for the dynamic linker's lock.
    from bankfull.errors import BankfullError
    from bankfull.text.load import load_tokenizer
    from bankfull.weights.locate import locate
    from bankfull.weights.text_files import open_text_files

    path = locate(model)
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(lambda: load_tokenizer(open_text_files(path)))
        load_torch_libraries()
        try:
            return text.result()
        except BankfullError:
            return None


def load_torch_libraries() -> None:
    """Load torch's shared libraries with the interpreter released, which `import torch` does not do.

    Nothing depends on it: where a library is missing or cannot be loaded, `import torch` finds or reports it.
    """
    spec = None if "torch" in sys.modules else find_spec("torch")
    if spec is None or spec.origin is None:
        return
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # this engine does not run on third-party devices
    linker = ctypes.CDLL(None)  # its functions run without the interpreter's lock; `ctypes.CDLL(name)` keeps it
    linker.dlopen.restype, linker.dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    for name, visibility in TORCH_LIBRARIES:
        path = Path(spec.origin).parent / "lib" / name
        if not linker.dlopen(os.fsencode(path), os.RTLD_NOW | visibility):
            return
