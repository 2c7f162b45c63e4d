"""The KV cache of a model as data beside that of the same model with plain attention."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.errors import ModelError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.models.blocks import with_full_attention
from bankfull.models.registry import Config
from bankfull.ops.attention.sight import held_tokens
from bankfull.state.spec import Layout
from bankfull.weights.safetensors import COMPOSED

CONTEXTS = (1024, 8192, 32768, 131072)
"""Contexts that are compared, as far as the model has them."""
GROUPED = 8
"""KV heads of the compared model with grouped-query attention, as most open models have."""


@dataclass(frozen=True, slots=True)
class KvSaving:
    context: int
    bytes: int
    """KV cache and recurrent state of one sequence."""
    plain_bytes: int
    """The same with a KV head per query head, no windows and no sharing."""
    grouped_bytes: int
    """The same with GROUPED KV heads."""
    claim: float | None
    """The factor that the configuration's source claims."""

    @property
    def factor(self) -> float:
        return self.plain_bytes / self.bytes if self.bytes else 1.0

    @property
    def grouped_factor(self) -> float:
        return self.grouped_bytes / self.bytes if self.bytes else 1.0


def kv_savings(config: Config, metered: MeteredModel) -> tuple[KvSaving, ...]:
    """Nothing for a model that is not data, or whose attention is plain already."""
    if config.get("model_type") != COMPOSED or not metered.layout.paged:
        return ()
    dtype = str(metered.dtype).removeprefix("torch.")
    plain = MeteredModel(with_full_attention(config), dtype=dtype).layout
    grouped = MeteredModel(with_full_attention(config, GROUPED), dtype=dtype).layout
    longest, claim = metered.model.max_positions, _claim(config)
    if claim is None and state_bytes(plain, longest) == state_bytes(metered.layout, longest):
        return ()
    contexts = sorted({min(context, longest) for context in CONTEXTS})
    return tuple(
        KvSaving(n, state_bytes(metered.layout, n), state_bytes(plain, n), state_bytes(grouped, n), claim)
        for n in contexts
    )


def state_bytes(layout: Layout, context: int) -> int:
    """Bytes of one sequence: keys and values inside each window, and the recurrent state. Without the rest of a page
    and the second slot that a running sequence also holds."""
    paged = sum(group.token_bytes * held_tokens(context, group.window) for group in layout.paged)
    return paged + (0 if layout.recurrent is None else layout.recurrent.slot_bytes)


def _claim(config: Config) -> float | None:
    claim = config.get("claim")
    if claim is None:
        return None
    factor = claim.get("kv_bytes_factor") if isinstance(claim, dict) else None
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 1e9:
        raise ModelError(
            f"The model's configuration has claim = {repr(claim)[:80]}, but it must be an object with a positive "
            "'kv_bytes_factor'."
        )
    return float(factor)
