"""The exponential race: its random numbers, its arithmetic, what it draws, and how it couples two distributions."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import scipy
import torch

from bankfull.sample.draw import NO_TOKEN, draw, weights
from bankfull.sample.race import LN2_HIGH, LN2_LOW, LOG_SERIES, REACH, ROOT_OF_TWO, fixed_log, gumbel, highest_gumbel
from bankfull.sample.random import NumberKey, Purpose, high_words, philox, uniform, words_of

LINES = 20_000


def key_of(lines: int, seed: int = 5, child: int = 0, first: int = 0) -> NumberKey:
    """Lines that differ by position only."""
    still = torch.zeros(lines, dtype=torch.int64)
    return NumberKey(still + seed, still + child, torch.arange(first, first + lines))


def scalar_log(number: float) -> float:
    """`fixed_log` with Python's floats, one operation after the other."""
    (bits,) = struct.unpack("<q", struct.pack("<d", number))
    exponent = (bits >> 52) - 1023
    (mantissa,) = struct.unpack("<d", struct.pack("<q", bits & (1 << 52) - 1 | 1023 << 52))
    if mantissa > ROOT_OF_TWO:
        mantissa, exponent = mantissa * 0.5, exponent + 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = ratio * ratio, LOG_SERIES[0]
    for coefficient in LOG_SERIES[1:]:
        series = series * square + coefficient
    return float(exponent) * LN2_HIGH + (float(exponent) * LN2_LOW + ratio * series)


def scalar_gumbel(high: int, low: int) -> float:
    return -scalar_log(-scalar_log(1.0 - ((high << 20 | low >> 12) + 0.5) * 2.0**-52))


def test_words_of_a_token_come_from_the_call_of_its_run() -> None:
    vocab, purpose = 77, Purpose.DRAFT
    key = NumberKey(torch.tensor([3, -9]), torch.tensor([0, 7]), torch.tensor([2**40 + 1, 12]))
    words = high_words(key, purpose, vocab)
    ids = torch.arange(vocab).expand(2, -1)
    assert torch.equal(words, words_of(key, purpose, ids, low=False))
    for line in range(2):
        for token in (0, 3, 4, 21, 76):
            call = token // 16 * 4 + token % 4
            position = int(key.position[line])
            counter = (position & 0xFFFFFFFF, position >> 32, int(key.child[line]), call << 8 | purpose)
            seed = int(key.seed[line]) & (1 << 64) - 1
            a, b, c, d = (torch.tensor([each]) for each in counter)
            found = philox((a, b, c, d), (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])))
            assert int(words[line, token]) == int(found[token // 4 % 4])


def test_every_part_of_the_key_gives_other_words() -> None:
    base = key_of(8)
    others = [key_of(8, seed=6), key_of(8, child=1), key_of(8, first=8), key_of(8, seed=5 + 2**32)]
    drawn = [high_words(key, Purpose.TOKEN, 100) for key in (base, *others)]
    drawn += [high_words(base, Purpose.DRAFT, 100)]
    drawn += [words_of(base, Purpose.TOKEN, torch.arange(100).expand(8, -1), low=True)]
    seen = torch.stack(drawn).flatten()
    assert len(seen.unique()) == len(seen)  # a repeated word has probability 0.003 for this many; the keys are fixed


def test_words_are_independent_along_tokens_and_positions() -> None:
    words = high_words(key_of(2000), Purpose.TOKEN, 64).numpy() / 2**32
    for line in (words[:, 5], words[7], words[:, ::9].ravel()):
        assert scipy.stats.kstest(line, "uniform").pvalue > 1e-4
    for a, b in ((words[:, 0], words[:, 1]), (words[:, 0], words[:, 4]), (words[:-1, 3], words[1:, 3])):
        table, _, _ = np.histogram2d(a, b, bins=6)
        assert scipy.stats.chisquare(table.ravel()).pvalue > 1e-4


def test_the_logarithm_is_a_fixed_sequence_of_rounded_operations() -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.cat(
        (
            torch.rand(300, dtype=torch.float64, generator=generator) * 40,
            1 - torch.rand(300, dtype=torch.float64, generator=generator) * 1e-9,
            torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, 1.0, 2.0, ROOT_OF_TWO], dtype=torch.float64),
        )
    )
    assert fixed_log(numbers).tolist() == [scalar_log(each) for each in numbers.tolist()]
    np.testing.assert_allclose(fixed_log(numbers).numpy(), np.log(numbers.numpy()), rtol=1e-7, atol=0)


def test_the_noise_is_that_of_an_exponential_variate() -> None:
    generator = torch.Generator().manual_seed(2)
    high, low = torch.randint(0, 2**32, (2, 50_000), generator=generator)
    high[:3], low[:3] = torch.tensor([0, 0, 2**32 - 1]), torch.tensor([0, 2**32 - 1, 2**32 - 1])
    noise = gumbel(high, low)
    assert noise[:400].tolist() == [scalar_gumbel(int(a), int(b)) for a, b in zip(high[:400], low[:400], strict=True)]
    assert scipy.stats.kstest((-noise).exp().numpy(), "expon").pvalue > 1e-4
    exact = [
        -math.log(-math.log1p(-((int(a) << 20 | int(b) >> 12) + 0.5) * 2.0**-52))
        for a, b in zip(high, low, strict=True)
    ]
    np.testing.assert_allclose(noise.numpy(), exact, rtol=0, atol=2e-7)
    bound = highest_gumbel(high)
    assert (noise <= bound + 1e-7).all()
    assert (bound - noise)[(high > 2**20) & (high < 2**31)].max() < 2e-6


def test_the_winner_has_the_highest_of_all_exact_keys() -> None:
    vocab, lines = 60, 50
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(lines, vocab, generator=generator) * 2
    scores[:, 5:9] = -torch.inf
    key = key_of(lines)
    ids = torch.arange(vocab).expand(lines, -1)
    high, low = (words_of(key, Purpose.TOKEN, ids, low=low) for low in (False, True))
    expected = []
    for line in range(lines):
        shaped = scores[line] - scores[line].max()
        keys = [float(shaped[t]) + scalar_gumbel(int(high[line, t]), int(low[line, t])) for t in range(vocab)]
        expected.append(max(range(vocab), key=lambda t: (keys[t], -t)))
    assert draw(scores, key, Purpose.TOKEN).tolist() == expected


def test_a_token_far_below_the_best_is_never_drawn_and_one_within_reach_has_a_weight() -> None:
    assert weights(torch.tensor([-REACH])).item() >= 1
    scores = torch.full((LINES, 40), -REACH - 0.01)
    scores[:, 7] = 0.0
    assert (draw(scores, key_of(LINES), Purpose.TOKEN) == 7).all()
    scores[3] = -torch.inf
    scores[4, 2] = torch.nan
    assert draw(scores, key_of(LINES), Purpose.TOKEN)[3:5].tolist() == [NO_TOKEN] * 2


@pytest.mark.parametrize("gap", [0.0, 4.0, 9.0])
def test_frequencies_in_a_large_vocabulary(gap: float) -> None:
    """One token, and 3000 that are exp(-gap) as likely each: the tail's share is exact, and even within the tail."""
    vocab, lines = 3001, 2000
    scores = torch.full((lines, vocab), -gap)
    scores[:, 1000] = 0.0
    drawn = draw(scores, key_of(lines, seed=21), Purpose.TOKEN).numpy()
    tail = 3000 * math.exp(-gap)
    share = 1 / (1 + tail)
    hits = int((drawn == 1000).sum())
    assert scipy.stats.binomtest(hits, lines, share).pvalue > 1e-4
    rest = drawn[drawn != 1000]
    if len(rest) > 300:
        counts = np.bincount(rest * 20 // vocab, minlength=20)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4


def agreement(p: torch.Tensor, q: torch.Tensor) -> float:
    """The exact probability that one race with both distributions has one winner: the sum over t of
    1 / sum over s of max(p(s) / p(t), q(s) / q(t))."""
    alive = (p > 0) & (q > 0)
    ratio = torch.maximum(p[None, :] / p[alive, None], q[None, :] / q[alive, None])
    return float((1 / ratio.sum(-1)).sum())


def by_inverse_cdf(probs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(probs.cumsum(-1), numbers, right=True).clamp_max(len(probs) - 1)


@pytest.mark.parametrize(("noise", "gain"), [(0.1, 0.5), (0.5, 0.5), (1.5, 0.2)])
def test_two_distributions_with_the_same_numbers_mostly_agree(noise: float, gain: float) -> None:
    """`gain`: the least share of an inverse CDF's disagreements that the race turns into agreement."""
    vocab = 200
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * 2
    other = logits + noise * torch.randn(vocab, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1), other.softmax(-1)
    distance = float((p - q).abs().sum() / 2)
    key = key_of(LINES, seed=3)
    left, right = (draw(each.expand(LINES, -1), key, Purpose.TOKEN) for each in (logits, other))
    share = float((left == right).double().mean())
    expected = agreement(p, q)
    assert (1 - distance) / (1 + distance) <= expected <= 1 - distance
    assert scipy.stats.binomtest(int((left == right).sum()), LINES, expected).pvalue > 1e-4
    numbers = uniform(*key, Purpose.TOKEN)
    inverse = float((by_inverse_cdf(p, numbers) == by_inverse_cdf(q, numbers)).double().mean())
    assert share - inverse > gain * (1 - inverse)


def test_equal_distributions_agree_whatever_their_scale() -> None:
    logits = torch.randn(500, 300, generator=torch.Generator().manual_seed(1))
    key = key_of(500)
    assert torch.equal(draw(logits, key, Purpose.TOKEN), draw(logits + 2.0, key, Purpose.TOKEN))
