"""Models of the reference implementation with random weights, saved as files, and the same files in ours."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.weights.source import ModelFiles, open_model
from tests.models.cases import BLOCKED, CASES, LENGTH

tf.logging.set_verbosity_error()
tf.utils.logging.disable_progress_bar()

CPU = torch.device("cpu")
TOLERANCE = 1e-4
TOKENS = torch.randint(3, 50, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
PASSES = {"whole": (), "chunks": (7, 16, 1, 2, 19), "single": (1,) * LENGTH}


@dataclass(frozen=True)
class Saved:
    path: Path
    reference: Any
    logits: Tensor


@cache
def saved(name: str) -> Saved:
    """The reference model of a case and the directory that it was saved in; made once, never changed."""
    torch.manual_seed(11)
    reference = (CASES | BLOCKED)[name]().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else parameter + 0.3 * noise)
        for module in reference.modules():
            if hasattr(module, "A_log"):
                ladder = torch.arange(1.0, module.A_log.shape[-1] + 1).log()
                module.A_log.copy_(ladder + 0.3 * torch.randn_like(module.A_log))
    path = _folder() / name
    reference.save_pretrained(path)
    return Saved(path, reference, reference_logits(reference))


@cache
def _folder() -> Path:
    # Kept alive by the cache, removed when the process ends.
    folder = tempfile.TemporaryDirectory(prefix="bankfull-models-")
    _folders.append(folder)
    return Path(folder.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []


def reference_logits(reference: Any, tokens: list[int] = TOKENS) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def build(
    files: ModelFiles,
    *,
    dtype: torch.dtype = torch.float32,
    providers: str = "torch",
    max_len: int = 0,
    expand: bool = False,
    changes: dict[str, Any] | None = None,
) -> Decoder:
    """`changes` overwrite configuration values: a model that is wrong on purpose."""
    made = Build(files.source, kit_for("cpu", providers), dtype, CPU, expand, max_len)
    return build_model(files.config | (changes or {}), made)


def ours(name: str, **how: Any) -> Decoder:
    return build(open_model(saved(name).path), **how)


def logits(model: Decoder, chunks: tuple[int, ...] = ()) -> Tensor:
    return naive.logits(model, TOKENS, CPU, chunks).float()


def error(model: Decoder, want: Tensor, chunks: tuple[int, ...] = ()) -> float:
    return float((logits(model, chunks) - want).abs().max())


def spread(model: Decoder, want: Tensor, chunks: tuple[int, ...] = ()) -> float:
    """Root mean square of the error: what rounding does, rather than what one unlucky logit shows."""
    return float((logits(model, chunks) - want).square().mean().sqrt())
