"""Mixed bits: a width for each module of each layer, so that the whole fits a budget and loses least.

1. `sensitivity` measures what each module loses at each width, with the whole model on calibration text.
2. `allocation` chooses the widths by an integer program.
3. The chosen mixture is measured as a whole. Losses do not add up exactly, so a budget of loss is tightened until the
   measured loss is within it, and a budget of bytes is compared with one width for all.

The result maps each matrix to a type; `Requantized` and the writers of quantized models apply it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.quantize.allocation import Budget, PricedType, fewest_bytes, least_loss
from bankfull.quantize.rtn import rounded
from bankfull.quantize.sensitivity import Divergence, Told, sensitivities, units_of
from bankfull.weights.formats import SCHEMES
from bankfull.weights.formats.groups import GROUPS, name_of, widest_group
from bankfull.weights.requantized import KEEP, Requantized
from bankfull.weights.source import ModelFiles, TensorSource

WIDTHS = (2, 3, 4, 8)
"""Bits of the types that a module may get, beside its matrices as they are saved."""
TRIES = 6
SLACK = 0.97
"""Part of the wanted loss that the next try aims at when one has missed it."""


@dataclass(frozen=True, slots=True)
class MixedBits:
    types: dict[str, str]
    """Scheme of each matrix of the layers; "keep": as it is saved."""
    bits_per_weight: float
    """Bits per weight of the matrices in `types`, scales included."""
    model_bytes: int
    expected_kl: float
    """The sum of the modules' losses."""
    kl: float
    """The loss of the whole mixture, on the same text."""
    losses: dict[str, dict[str, float]]
    """Loss of each module at each width."""

    def source(self, files: ModelFiles) -> Requantized:
        """The model's tensors in these types, rounded to nearest when they are read."""
        return Requantized(files.source, (KEEP,), by_name=self.types)


Mixture = Callable[[Sequence[PricedType]], MixedBits]


def mix_bits(
    files: ModelFiles,
    budget: Budget,
    sequences: Sequence[Sequence[int]],
    *,
    group: int = 64,
    widths: Sequence[int] = WIDTHS,
    told: Told = lambda done, note: None,
) -> MixedBits:
    """`sequences`: token ids of the calibration text. `group`: columns of a scale, or fewer where that divides no
    matrix. `told`: called with the number of measured choices and the name of the next."""
    if group not in GROUPS:
        raise ConfigError(f"--group {group} is not offered; use 32, 64 or 128.")
    divergence = Divergence(files, sequences)
    meant = Requantized(files.source, (KEEP,)).kept()
    if not meant:
        raise ConfigError("The model has no matrices that could be quantized; choose another model.")
    units = {
        unit: [(str(width), _types(files.source, names, width, group)) for width in widths] + [(KEEP, {})]
        for unit, names in units_of(meant).items()
    }
    losses: dict[str, dict[str, float]] = {unit: {} for unit in units}
    for unit, choice, loss in sensitivities(divergence, units, _rounded, told):
        losses[unit][choice] = loss
    names = units_of(meant)
    priced = [
        [
            PricedType(choice, _nbytes(files.source, names[unit], types), losses[unit][choice])
            for choice, types in choices
        ]
        for unit, choices in units.items()
    ]
    weights = sum(math.prod(files.source.shape(name)) for name in meant)
    others = sum(_nbytes(files.source, [name], {}) for name in files.source.names() if name not in set(meant))

    def mixture(chosen: Sequence[PricedType]) -> MixedBits:
        types: dict[str, str] = dict.fromkeys(meant, KEEP)
        for choices, one in zip(units.values(), chosen, strict=True):
            types |= dict(choices)[one.name]
        size = sum(one.nbytes for one in chosen)
        replaced = {name: _rounded(divergence.matrix(name), kind) for name, kind in types.items() if kind != KEEP}
        whole = divergence.of(replaced) if replaced else 0.0
        expected = math.fsum(one.loss for one in chosen)
        return MixedBits(types, 8 * size / weights, size + others, expected, whole, losses)

    if budget.kl is not None:
        return _within_loss(priced, budget.kl, mixture)
    most = budget.size - others if budget.size is not None else math.floor((budget.bits or 0.0) * weights / 8)
    if budget.size is not None and most <= 0:
        raise ConfigError(f"--size {budget.size} is less than the {others} bytes of tensors that are kept; raise it.")
    tried = [least_loss(priced, most)]
    # Losses of narrow types add up less well than those of wide ones: one width for all must not be better.
    tried += [one for one in map(list, zip(*priced, strict=True)) if sum(each.nbytes for each in one) <= most]
    return min(map(mixture, tried), key=lambda found: found.kl)


def _within_loss(priced: Sequence[Sequence[PricedType]], most: float, mixture: Mixture) -> MixedBits:
    """The smallest mixture whose measured loss is within `most`."""
    aim, best = most, None
    for _ in range(TRIES):
        candidate = mixture(fewest_bytes(priced, aim))
        if candidate.kl <= most:
            if best is None or candidate.model_bytes < best.model_bytes:
                best = candidate
            if candidate.kl >= SLACK * SLACK * most or candidate.expected_kl < SLACK * aim:
                break
        # The measured loss is about proportional to the sum of the parts' losses.
        ratio = most / candidate.kl if candidate.kl > 0 else 2.0
        aim *= min(SLACK * ratio, 2.0)
    if best is None:
        raise ConfigError(f"No mixture with a loss of at most {most:g} was found; raise --kl.")
    return best


def _types(source: TensorSource, names: Sequence[str], width: int, group: int) -> dict[str, str]:
    """The type of each matrix at this width; none for a matrix that no group divides."""
    types = {}
    for name in names:
        if (widest := widest_group(source.shape(name)[-1], group)) is not None:
            types[name] = name_of(f"int{width}", widest)
    return types


def _rounded(matrix: Tensor, kind: str) -> Tensor:
    """The matrix as the files will hold it."""
    return rounded(matrix, kind).dequantize()


def _nbytes(source: TensorSource, names: Sequence[str], types: Mapping[str, str]) -> int:
    total = 0
    for name in names:
        shape = source.shape(name) or (1,)
        scheme = SCHEMES[types[name]] if name in types else source.scheme(name)
        total += math.prod(shape[:-1]) * scheme.row_bytes(shape[-1])
    return total
