"""The tiny models that a case may name, and the logits of each one's plain computation.

A name is `kind:case`. `tf`: a family that `transformers` has, in the shapes of tests/models; `tiny`: those of
tests/tiny.py, whose sizes suit the drafters; `blocks`: those whose columns whole blocks of quantized weights divide;
`composed`: a model as data. What `transformers` has computes with it,
over the whole sequence each time; the others with the bodies of ops in float64."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from packaging.version import Version
from safetensors.torch import save_file

from bankfull.layers.build import Build
from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.registry import build_model
from bankfull.ops import kit_for
from bankfull.runtime import naive
from bankfull.weights.source import open_model
from tests import tiny
from tests.models import composed, diffusion
from tests.models.cases import BLOCKED, CASES
from tests.models.cases_shared import share
from tests.models.oracle import saved
from tests.trial import vocabulary
from tests.trial.denoise import Shape

CPU = torch.device("cpu")
Logits = NDArray[np.float64]
TINY = (
    "llama",
    "gemma",
    "shared",
    "latent",
    "experts",
    "mamba",
    "mamba2",
    "hybrid",
    "lightning",
    "delta",
    "s4",
    "based",
    "sparse",
)
DIFFUSION = ("llada", "dream", "sdar")
KINDS = {f"tiny:{name}": name for name in TINY} | {f"diffusion:{name}": name for name in DIFFUSION}
"""Names in the table of combinations."""
WIDE = "llama-wide"
"""A model with matrices of 256 columns: whole blocks of Q4_K."""
LONGEST = 64
"""Tokens of the longest sequence: the context of the smallest shapes."""
GROUPED_NORMS = Version("5.23")
"""The first release that is known to norm each group of Mamba-2 by itself; 5.17 does not."""
SHORTEST = {"tf:phi3-long": 20}
"""Tokens of the shortest prompt: `transformers` chooses LongRoPE's frequencies anew for every length."""


def names() -> list[str]:
    return [
        *(f"tiny:{name}" for name in TINY),
        *(f"tf:{name}" for name in CASES),
        *(f"blocks:{name}" for name in (*BLOCKED, WIDE)),
        *(f"composed:{name}" for name in composed.LAYERS),
        *(f"diffusion:{name}" for name in DIFFUSION),
    ]


@dataclass(frozen=True)
class TrialModel:
    name: str
    folder: Path
    vocab: int
    logits: Callable[[Sequence[int]], Logits]
    """Of every position of a sequence, in one pass without a cache."""
    denoising: Shape | None = None
    """Of a diffusion model."""


@lru_cache
def model_of(name: str) -> TrialModel:
    kind, _, case = name.partition(":")
    folder = _home() / name.replace(":", "-")
    denoising: Shape | None = None
    torch.manual_seed(11)
    if kind == "blocks" and case == WIDE:
        wide = _save_wide(folder)
        logits = _by_transformers(lambda: wide)
    elif kind in ("tf", "blocks"):
        found = saved(case)
        shutil.copytree(found.path, folder)
        logits = _by_transformers(lambda: found.reference)
    elif kind == "tiny":
        shutil.copytree(tiny.folder_of(case), folder)
        logits = by_bodies(folder) if case in ("s4", "based", "sparse") else _by_transformers(lambda: _read(case))
    elif kind == "composed":
        _save_composed(case, folder)
        logits = by_bodies(folder)
    elif kind == "diffusion":
        reference = diffusion.make(case, folder, spread=0.3)
        logits = lambda tokens: reference.logits(tokens).double().numpy()  # noqa: E731
        denoising = Shape(diffusion.MASK, reference.block, case == "dream")
    else:
        raise KeyError(f"{name!r} names no model of the trial")
    config = json.loads((folder / "config.json").read_text())
    if _norms_all_groups_as_one(config):
        logits = by_bodies(folder)
    vocab = _vocab(config)
    vocabulary.add_to(folder, vocab)
    return TrialModel(name, folder, vocab, logits, denoising)


@lru_cache
def others_of(name: str) -> TrialModel:
    """The model of this name with other weights."""
    model = model_of(name)
    folder = tiny.with_other_weights(model.folder, _home() / f"{name.replace(':', '-')}-others")
    return replace(model, folder=folder, logits=by_bodies(folder))


def _norms_all_groups_as_one(config: dict[str, Any]) -> bool:
    """Older releases of `transformers` take the gated norm of Mamba-2 over all groups at once, which is another model
    than the paper's (tests/models/mamba2_formula.py)."""
    groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
    of_mamba2 = config["model_type"] in ("mamba2", "granitemoehybrid")
    return of_mamba2 and groups > 1 and Version(transformers.__version__) < GROUPED_NORMS


def _vocab(config: dict[str, Any]) -> int:
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


@lru_cache
def _home() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bankfull-trial-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _read(case: str) -> Any:
    how = {"dtype": torch.float32, "experts_implementation": "eager"}
    made = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder_of(case), **how).eval()
    return share(made, 3) if case == "shared" else made


def _by_transformers(make: Callable[[], Any]) -> Callable[[Sequence[int]], Logits]:
    @lru_cache
    def reference() -> Any:
        made = make()
        made.set_attn_implementation("eager")  # others leave out soft caps in some releases
        return made

    def logits(tokens: Sequence[int]) -> Logits:
        with torch.inference_mode():
            found = reference()(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found.double().numpy()  # type: ignore[no-any-return]

    return logits


def by_bodies(folder: Path) -> Callable[[Sequence[int]], Logits]:
    @lru_cache
    def bodies() -> Any:
        files = open_model(folder)
        return build_model(files.config, Build(files.source, kit_for("cpu", "torch"), torch.float64, CPU))

    return lambda tokens: naive.logits(bodies(), list(tokens), CPU).numpy()


def _save_wide(folder: Path) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(torch.randn_like(weight) * (3.0 if "lm_head" in name else 0.2))
    made.save_pretrained(folder)
    return made


def _save_composed(case: str, folder: Path) -> None:
    config = composed.config_of(case)
    drawn = torch.Generator().manual_seed(5)
    tensors = {}
    for name, stored in MeteredModel(config).shapes.read.items():
        spread = 1.0 if "lm_head" in name else 0.3 if len(stored.shape) > 1 else 0.2
        tensor = torch.randn(stored.shape, generator=drawn) * spread
        if name.endswith("norm.weight"):
            tensor += 1
        if name.endswith("log_dt"):
            tensor = torch.linspace(-4.0, -1.0, *stored.shape)
        if name.endswith("A_imag"):
            tensor += torch.pi * torch.arange(stored.shape[1])
        tensors[name] = tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
