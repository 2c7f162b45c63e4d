from __future__ import annotations

import numpy as np
import pytest
import scipy
import torch

from bankfull.sample.random import Purpose, philox, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    left, right = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox((a, b, c, d), (left, right))) == words


def numbers(seed: int, child: int, position: torch.Tensor, purpose: int = 0) -> np.ndarray:
    fill = torch.zeros_like(position)
    return uniform(fill + seed, fill + child, position, purpose).numpy()


def test_a_number_depends_on_its_key_alone() -> None:
    position = torch.arange(100)
    together = numbers(7, 3, position)
    alone = [numbers(7, 3, position[i : i + 1])[0] for i in range(100)]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < 1)).all()


def test_every_part_of_the_key_changes_the_numbers() -> None:
    position = torch.arange(64)
    base = numbers(1, 0, position)
    others = [
        numbers(2, 0, position),
        numbers(1 + 2**32, 0, position),
        numbers(-1, 0, position),
        numbers(1, 1, position),
        numbers(1, 0, position + 64),
        numbers(1, 0, position + 2**32),
        numbers(1, 0, position, Purpose.TOKEN + 1),
    ]
    seen = np.concatenate([base, *others])
    assert len(np.unique(seen)) == len(seen)


@pytest.mark.parametrize("varied", ["seed", "child", "position"])
def test_numbers_are_uniform_and_independent_along_each_part_of_the_key(varied: str) -> None:
    count = 40_000
    steps, still = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    key = {name: steps if name == varied else still + 5 for name in ("seed", "child", "position")}
    drawn = uniform(key["seed"], key["child"], key["position"], Purpose.TOKEN).numpy()
    assert scipy.stats.kstest(drawn, "uniform").pvalue > 1e-4
    pairs, _, _ = np.histogram2d(drawn[:-1:2], drawn[1::2], bins=8)
    assert scipy.stats.chisquare(pairs.ravel()).pvalue > 1e-4
    low_bits = (drawn * 2**53).astype(np.int64) & 15
    assert scipy.stats.chisquare(np.bincount(low_bits, minlength=16)).pvalue > 1e-4


def test_two_purposes_at_one_position_are_uncorrelated() -> None:
    position = torch.arange(20_000)
    first, second = numbers(9, 0, position, Purpose.TOKEN), numbers(9, 0, position, Purpose.TOKEN + 1)
    table, _, _ = np.histogram2d(first, second, bins=8)
    assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-4
