"""Where a layer can absorb a factor per channel. Only structures that are known to allow it are listed: a norm before
attention or before a feed-forward layer, values before the output projection, and the ungated half of a gated layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from bankfull.layers.attention import Attention
from bankfull.layers.linear import Linear
from bankfull.layers.mlp import MLP, GatedMLP
from bankfull.layers.norm import AddThen, LayerNorm, Norm, RMSNorm
from bankfull.quantize.layered import BuiltLayer
from bankfull.quantize.method import Fold, LayerData
from bankfull.quantize.recording import InputRecorder


def folds_of(built: BuiltLayer, data: LayerData, shared: bool = False) -> list[Fold]:
    """`shared`: whether later layers read the layer's keys and values, which must then stay as they are."""
    block, recorder = built.block, built.recorder
    folds: list[Fold | None] = []
    plain_stream = not block.norm_last and not block.normed_stream
    mixer, feed = block.mixer, block.feed
    if type(mixer) is Attention:
        assert isinstance(mixer.out, Linear)
        if plain_stream:
            folds.append(_norm_fold(block.before_mixer, (mixer.q, mixer.k, mixer.v), data, recorder))
        if mixer.heads.count == mixer.heads.kv and not shared:
            folds.append(_matrix_fold(mixer.v, mixer.out, data, recorder))
    if isinstance(feed, GatedMLP | MLP):
        readers = (feed.gate, feed.up) if isinstance(feed, GatedMLP) else (feed.up,)
        if plain_stream and block.before_feed is not None:
            folds.append(_norm_fold(block.before_feed, readers, data, recorder))
        if isinstance(feed, GatedMLP):
            folds.append(_matrix_fold(feed.up, feed.down, data, recorder))
    return [fold for fold in folds if fold is not None]


def apply_fold(fold: Fold, factors: Tensor, layer: LayerData) -> None:
    """Multiply the targets' columns, and divide the source's outputs, by `factors`."""
    for target in fold.targets:
        layer.matrices[target] = layer.matrices[target] * factors
    if fold.source in layer.matrices:
        layer.matrices[fold.source] = layer.matrices[fold.source] / factors[:, None]
    else:
        layer.plain[fold.source] = (layer.plain[fold.source] + fold.offset) / factors - fold.offset
    bias = bias_of(fold.source)
    if bias in layer.plain:
        layer.plain[bias] = layer.plain[bias] / factors


def bias_of(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.bias"


def _norm_fold(norm: Norm, readers: Iterable[Linear], data: LayerData, recorder: InputRecorder) -> Fold | None:
    held, offset = _norm_weight(norm)
    source, targets = recorder.name_of(held), _names(readers, recorder)
    if source is None or source not in data.plain or not targets:
        return None
    if any(name not in data.matrices for name in targets):
        return None
    return Fold(source, targets, offset)


def _norm_weight(norm: Norm) -> tuple[Any, float]:
    if isinstance(norm, RMSNorm):
        return norm.weight, norm.offset
    inner = norm.module if isinstance(norm, AddThen) else None
    return (inner.weight, 0.0) if isinstance(inner, LayerNorm) else (None, 0.0)


def _matrix_fold(first: Linear, second: Linear, data: LayerData, recorder: InputRecorder) -> Fold | None:
    """`second` reads what `first` makes, channel by channel."""
    (source,), (target,) = _names((first,), recorder) or ("",), _names((second,), recorder) or ("",)
    if source not in data.matrices or target not in data.matrices:
        return None
    whole = data.matrices[source].shape[0] == first.outer == data.matrices[target].shape[1]
    return Fold(source, (target,)) if whole else None


def _names(layers: Iterable[Linear], recorder: InputRecorder) -> tuple[str, ...]:
    names = [recorder.name_of(layer.weight) for layer in layers]
    return tuple(dict.fromkeys(name for name in names if name is not None)) if None not in names else ()
