"""Mixed bits: the choice is optimal, budgets hold, and a mixture loses less than one width of the same size."""

from __future__ import annotations

import builtins
import itertools
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import ConfigError, ModelError
from bankfull.quantize.allocation import Budget, PricedType, fewest_bytes, least_loss
from bankfull.quantize.mixed import MixedBits, mix_bits
from bankfull.quantize.sensitivity import Divergence, units_of
from bankfull.weights.quantize import quantize
from bankfull.weights.requantized import KEEP, Requantized, bits_per_weight
from bankfull.weights.source import open_model
from tests.quantize.trained import sequences, trained_folder
from tests.quick import examples

TYPES = st.builds(
    PricedType, st.just("t"), st.integers(1, 50), st.floats(0, 5, allow_subnormal=False).map(lambda x: round(x, 4))
)
UNITS = st.lists(st.lists(TYPES, min_size=1, max_size=4), min_size=1, max_size=5)


@examples(20)
@given(UNITS, st.floats(0, 1))
def test_the_choice_is_that_of_trying_everything(units: list[list[PricedType]], share: float) -> None:
    low, high = (sum(pick(one.nbytes for one in types) for types in units) for pick in (min, max))
    most = low + int(share * (high - low))
    every = list(itertools.product(*units))
    chosen = least_loss(units, most)
    best = min(sum(one.loss for one in picks) for picks in every if sum(one.nbytes for one in picks) <= most)
    assert sum(one.nbytes for one in chosen) <= most
    assert sum(one.loss for one in chosen) == pytest.approx(best, abs=1e-6 + 1e-6 * best)

    bound = best + 1e-9
    smallest = fewest_bytes(units, bound)
    fewest = min(sum(one.nbytes for one in picks) for picks in every if sum(one.loss for one in picks) <= bound)
    assert sum(one.loss for one in smallest) <= bound + 1e-9 and sum(one.nbytes for one in smallest) == fewest


def test_budgets_are_one_positive_number() -> None:
    for given_ in ({}, {"bits": 3.0, "kl": 0.1}):
        with pytest.raises(ConfigError, match="one budget"):
            Budget(**given_)  # type: ignore[arg-type]
    for name in ("bits", "size", "kl"):
        with pytest.raises(ConfigError, match=f"--{name} -1"):
            Budget(**{name: -1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="raise the budget"):
        least_loss([[PricedType("t", 10, 0.0)]], 9)
    with pytest.raises(ConfigError, match="raise the budget"):
        fewest_bytes([[PricedType("t", 10, 2.0)]], 1.0)


def test_without_scipy_one_sentence_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *more: Any, **kw: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return plain(name, *more, **kw)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"bankfull\[quantize\]"):
        least_loss([[PricedType("t", 1, 0.0)]], 1)


def test_units_are_the_modules_of_a_layer() -> None:
    names = [
        f"model.layers.{i}.{m}.weight" for i in (0, 11) for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up")
    ]
    assert list(units_of(names)) == [f"model.layers.{i}.{m}" for i in (0, 11) for m in ("self_attn", "mlp")]


@lru_cache
def mixed(**budget: float) -> MixedBits:
    return mix_bits(open_model(trained_folder()), Budget(**budget), sequences(6, 0), group=32)  # type: ignore[arg-type]


def divergence_of(types: dict[str, str]) -> float:
    """On text that chose nothing."""
    judge = Divergence(open_model(trained_folder()), sequences(6, 4096))
    return judge.of({n: quantize(judge.matrix(n), t).dequantize() for n, t in types.items() if t != KEEP})


def test_a_mixture_fits_its_budget_and_loses_less_than_one_width() -> None:
    found = mixed(bits=3.5)
    assert found.bits_per_weight <= 3.5 and len(set(found.types.values())) > 1
    uniform = divergence_of(dict.fromkeys(found.types, "int3_g32"))  # 3.5 bits with its scales: the same size
    assert divergence_of(found.types) < 0.9 * uniform


def test_a_bound_on_the_size_or_the_loss_holds_as_measured() -> None:
    files = open_model(trained_folder())
    whole = sum(4 * torch.Size(files.source.shape(name)).numel() for name in files.source.names())
    sized = mix_bits(files, Budget(size=whole // 2), sequences(1, 0), group=32, widths=(4,))
    assert sized.model_bytes <= whole // 2
    bounded = mixed(kl=0.001)
    assert 0 < bounded.kl <= 0.001 and bounded.model_bytes < whole // 2
    assert bounded.kl == pytest.approx(bounded.expected_kl, rel=1.0), "losses of modules about add up"


def test_a_mixture_is_applied_tensor_by_tensor() -> None:
    files, found = open_model(trained_folder()), mixed(bits=3.5)
    source = found.source(files)
    for name, kind in found.types.items():
        expected = files.source.scheme(name).name if kind == KEEP else kind
        assert source.scheme(name).name == expected == source.get(name).scheme.name
    kept = Requantized(files.source, (KEEP,))
    assert bits_per_weight(source) < bits_per_weight(kept)
    wrong = replace(source, by_name={next(iter(found.types)): "q4_k"})
    with pytest.raises(ModelError, match="columns"):
        wrong.scheme(next(iter(found.types)))


def test_what_cannot_be_mixed_is_one_sentence() -> None:
    files = open_model(trained_folder())
    with pytest.raises(ModelError, match="longer"):
        mix_bits(files, Budget(bits=3), [[1]])
    with pytest.raises(ModelError, match="context of 128"):
        mix_bits(files, Budget(bits=3), [[1] * 200])
    with pytest.raises(ConfigError, match="--group 48"):
        mix_bits(files, Budget(bits=3), sequences(1, 0), group=48)
