"""Acceptance of one draft token by each rule, on pairs of distributions: python -m benchmarks.acceptance --help

The target's scores are normal; the drafter's are the target's plus normal noise. The drafter draws with the rule's own
numbers: the target's for the race, others for rejection and typical acceptance. A deterministic draft is the drafter's
most likely token. The bounds are exact, from the distance of the two distributions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from bankfull.decode.rejection import accept_chain, draft_children
from bankfull.decode.typical import thresholds
from bankfull.sample.draw import draw
from bankfull.sample.random import NumberKey, Purpose, uniform

NOISES = (0.1, 0.3, 1.0, 2.0)
SPREAD = 2.5
"""Standard deviation of the target's scores."""


def pairs(vocab: int, temperature: float, noise: float, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores of target and drafter."""
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        target = torch.randn(vocab, generator=generator) * SPREAD
        yield target / temperature, (target + noise * torch.randn(vocab, generator=generator)) / temperature


def inverse_cdf(scores: Tensor, numbers: Tensor) -> Tensor:
    summed = scores.double().softmax(-1).cumsum(-1)
    return torch.searchsorted(summed, numbers).clamp_max(len(scores) - 1)


def shares(target: Tensor, drafter: Tensor, draws: int, seed: int) -> dict[str, float]:
    """The share of accepted drafts by rule, and what bounds it."""
    still = torch.zeros(draws, dtype=torch.int64)
    key = NumberKey(still + seed, still, torch.arange(draws))
    p, q = target.double().softmax(-1), drafter.double().softmax(-1)
    distance = float((p - q).abs().sum() / 2)
    expand = (draws, -1)
    same = draw(target.expand(expand), key, Purpose.TOKEN) == draw(drafter.expand(expand), key, Purpose.TOKEN)
    numbers = uniform(*key, Purpose.TOKEN)
    drafts = draft_children(drafter.expand(expand), key, 1)
    scores, probs = target.expand(draws, 2, -1), q.expand(draws, 2, -1)
    top = drafter.argmax().expand(draws, 1)
    return {
        "distance": distance,
        "inverse CDF": float((inverse_cdf(target, numbers) == inverse_cdf(drafter, numbers)).double().mean()),
        "race, at least": (1 - distance) / (1 + distance),
        "race": float(same.double().mean()),
        "rejection": float((accept_chain(scores, drafts, probs, key).counts == 2).double().mean()),
        "1 - distance": 1 - distance,
        "top token, race": float((draw(target.expand(expand), key, Purpose.TOKEN) == top[:, 0]).double().mean()),
        "top token, rejection": float((accept_chain(scores, top, None, key).counts == 2).double().mean()),
        "typical (lossy)": float((p[drafts[:, 0]] > thresholds(p)).double().mean()),
        "typical, KL in nats": typical_divergence(p, q),
    }


def typical_divergence(p: Tensor, q: Tensor) -> float:
    """KL divergence of the token that typical acceptance gives from the target's distribution: a draft from q if it
    passes, else a token from p."""
    passes = p > thresholds(p)
    given = torch.where(passes, q, 0.0) + q[~passes].sum() * p
    return float(torch.special.xlogy(given, given / p).sum())


def table(vocab: int, temperature: float, count: int, draws: int) -> str:
    lines: list[str] = []
    for noise in NOISES:
        each = [shares(*pair, draws, seed) for seed, pair in enumerate(pairs(vocab, temperature, noise, count))]
        means = {name: sum(one[name] for one in each) / count for name in each[0]}
        if not lines:
            lines += ["| noise | " + " | ".join(means) + " |", "|---" * (len(means) + 1) + "|"]
        lines.append(f"| {noise} | " + " | ".join(f"{value:.2f}" for value in means.values()) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=1000, help="tokens of the vocabulary")
    parser.add_argument("--temperature", type=float, default=0.7, help="of target and drafter")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of distributions per line")
    parser.add_argument("--draws", type=int, default=1000, help="draws per pair and rule")
    options = parser.parse_args(arguments)
    print(table(options.vocab, options.temperature, options.pairs, options.draws))


if __name__ == "__main__":
    main()
