"""The loss of each storage of weights and KV cache: KL divergence from the unrounded model, in nats per token.

It is measured on the model's own weights where the request has a bound and memory allows it, or read where that was
done before; else it is unknown. A loss of another model tells little: one of 8 billion weights loses a fraction of what
one of 135 million does. A table of the default model only orders unknown losses, so that a finer type is preferred to a
coarser one. Rounded weights and a rounded KV cache are measured apart, and their losses are added. What kernels round
beside them, such as activations, is not part of it: `bankfull quality` measures that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from bankfull.layers.build import Build
from bankfull.limits.machine import cache_file
from bankfull.models.registry import Config, build_model
from bankfull.ops import kit_for
from bankfull.ops.products.activations import EXACT
from bankfull.precision import choose_kv_dtype
from bankfull.quality.evaluate import KeptReference, dequantized, evaluate_kept, keep_reference
from bankfull.quality.windows import bundled_texts
from bankfull.runtime.host import available_memory
from bankfull.text.load import load_tokenizer
from bankfull.weights.fingerprint import weights_fingerprint
from bankfull.weights.requantized import Requantized, parse_quantization
from bankfull.weights.source import ModelFiles, open_model

if TYPE_CHECKING:
    from bankfull.plan.configurations import Stored

FORMAT = 1
WINDOW = 256
"""Tokens of each bundled text that are evaluated: enough to tell types apart by a factor of 1.2."""
MEMORY_SHARE = 0.5
"""Share of the free memory that the reference and one rounded model may take, in float32."""
TABLE_MODEL = "smollm2"
WEIGHTS = {
    "cpu": {"int8": 0.0014, "q6_k,keep": 0.018, "int4": 0.31, "q4_k,keep": 0.026, "int3": 1.2},
    "cuda": {"int8": 0.0045, "fp8": 0.018, "int4": 0.39, "int4:32": 0.31, "int3": 1.4},
}
"""KL of weight types by kind of device, as `Losses` measures it on the default model (tests/plan/test_losses.py). Its
weights are q4_1: symmetric types round them a second time and lose more than on unquantized weights, types with minima
nearly keep them. Super-blocks were measured across its rows, which have no multiple of 256 columns; int4 on a GPU with
groups of 64."""
KV_CACHE = {"int8": 0.0009, "fp8": 0.0047, "int4": 0.1}
DTYPES = {"bfloat16": 0.0012}
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StoredLoss:
    kl: float | None = 0.0
    """The loss (KL); None: unknown."""
    measured: bool = False
    rank: float | None = None
    """The default model's loss where this one is unknown, for the order alone; None if that is not known either."""

    @property
    def order(self) -> float | None:
        """A figure that is smaller for what loses less."""
        return self.rank if self.kl is None else self.kl

    def __str__(self) -> str:
        return "unknown" if self.kl is None else f"{self.kl:.2g}"

    def as_json(self) -> dict[str, Any]:
        return {"kl": self.kl, "kl_measured": self.measured}


NO_LOSS = StoredLoss()


def unmeasured(stored: Stored, kind: str) -> StoredLoss:
    """Unknown, unless nothing is rounded; in the order of the same storages of the default model."""
    parts = []
    if stored.quantize is not None:
        parts.append(WEIGHTS[kind].get(stored.quantize))
    if stored.dtype != "auto":
        parts.append(DTYPES.get(stored.dtype))
    if stored.kv_dtype != "auto":
        parts.append(KV_CACHE.get(stored.kv_dtype))
    if not parts:
        return NO_LOSS
    return StoredLoss(None, rank=None if None in parts else sum(part for part in parts if part is not None))


@dataclass(slots=True)
class Losses:
    """Losses of one model, each measured once; unknown if `subject` has no weights or does not fit, and without
    `measures` those that were not measured before."""

    subject: ModelFiles | Config
    measures: bool
    advance: Advance = lambda note: None
    notes: list[str] = field(default_factory=list)
    _known: dict[str, float] = field(default_factory=dict)
    _kept: KeptReference | None = None

    def of(self, stored: Stored, kind: str) -> StoredLoss:
        parts: list[float | None] = []
        if stored.quantize is not None:
            types = parse_quantization(stored.quantize, kind)
            parts.append(self._part(f"weights {'/'.join(types.types)}", replace(stored, kv_dtype="auto"), kind))
        elif stored.dtype != "auto":
            parts.append(self._part(f"weights {stored.dtype}", replace(stored, kv_dtype="auto"), kind))
        if stored.kv_dtype != "auto":
            parts.append(self._part(f"kv {stored.kv_dtype}", replace(stored, quantize=None, dtype="auto"), kind))
        if None in parts:
            return unmeasured(stored, kind)
        return StoredLoss(math.fsum(part for part in parts if part is not None), measured=bool(parts))

    def _note_unknown(self, reason: str) -> None:
        note = f"the loss (KL) of what rounds this model is unknown: {reason}."
        if note not in self.notes:
            self.notes.append(note)

    def _too_large(self, files: ModelFiles) -> str | None:
        weights = sum(math.prod(files.source.shape(name)) for name in files.source.names())
        needed, free = 2 * 4 * weights, available_memory()
        if self._kept is None and needed > MEMORY_SHARE * free:
            return f"measuring would take {needed / 1e9:.1f} GB of {free / 1e9:.1f} GB of free memory"
        return None

    def _part(self, name: str, stored: Stored, kind: str) -> float | None:
        """None if it is unknown."""
        if name not in self._known:
            if not isinstance(self.subject, ModelFiles):
                self._note_unknown("the model has no weights here")
                return None
            identity = {"loss": FORMAT, "model": weights_fingerprint(self.subject.path), "part": name}
            path = cache_file.path_of(identity, "loss")
            kl = (cache_file.read(path, identity) or {}).get("kl")
            if not isinstance(kl, float) or not 0 <= kl < math.inf:
                if not self.measures:
                    self._note_unknown("it was not measured; --max-kl measures it, unless --no-calibrate is given")
                    return None
                if (reason := self._too_large(self.subject)) is not None:
                    self._note_unknown(reason)
                    return None
                self.advance(name)
                kl = self._measured(stored, kind)
                cache_file.write(path, identity, kl=kl)
            self._known[name] = kl
        return self._known[name]

    def _measured(self, stored: Stored, kind: str) -> float:
        """The loss in float32, with torch bodies: that of this rounding alone."""
        assert isinstance(self.subject, ModelFiles)
        files = open_model(self.subject.path)
        if self._kept is None:
            tokenizer, _ = load_tokenizer(files)
            opening = tokenizer.opening if tokenizer.add_bos else ()
            texts = [tokenizer.encode(text, add_bos=False, parse_special=False) for text in bundled_texts().values()]
            reference = dequantized(open_model(self.subject.path), max_len=WINDOW)
            window = min(WINDOW, reference.max_positions)
            texts = [text[: window - len(opening)] for text in texts]
            self._kept = keep_reference(reference, texts, opening=opening, window=window)
        source = files.source
        if stored.quantize is not None:
            wish = parse_quantization(stored.quantize, kind)
            source = Requantized(source, wish.types, wish.tables)
        dtype = torch.float32 if stored.dtype == "auto" else getattr(torch, stored.dtype)
        pages = None if stored.kv_dtype == "auto" else choose_kv_dtype(stored.kv_dtype, dtype, EXACT)
        build = Build(source, kit_for("cpu", "torch"), dtype, torch.device("cpu"), True, WINDOW, pages)
        return evaluate_kept(build_model(files.config, build), self._kept).kl_mean
