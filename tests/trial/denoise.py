"""The plain sampler of diffusion models, from their papers: masks after the known tokens, blocks from left to right,
and in each turn one pass over the whole sequence, which fixes the most confident predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.trial.case import Ask
from tests.trial.chooser import choose

TURN = 32
"""Bit of a number's position from which on it holds the block's open places: each turn draws anew."""


@dataclass(frozen=True)
class Shape:
    mask: int
    own: int
    """Tokens of the block whose tokens see each other; 0: the whole sequence."""
    shifted: bool
    """A position's prediction is at the position before it."""


@dataclass(frozen=True)
class Way:
    tokens: int = 1
    threshold: float = 0.9
    block: int = 32
    """Tokens that are denoised together, where all see each other."""
    length: int = 128

    @staticmethod
    def parse(text: str) -> Way:
        given = dict(part.split("=") for part in text.split(",") if part)
        return Way(**{name: float(value) if name == "threshold" else int(value) for name, value in given.items()})


def denoised(
    logits: Callable[[Sequence[int]], NDArray[np.float64]],
    shape: Shape,
    way: Way,
    ask: Ask,
    child: int,
    known: Sequence[int],
    limit: int,
    longest: int,
    tolerance: float,
) -> tuple[list[int], bool]:
    """The tokens after `known` (prompt and answer) up to the end of their block, and whether a decision was near."""
    tokens, start, doubtful = list(known), len(ask.prompt), False
    if shape.own:
        canvas = min((len(tokens) // shape.own + 1) * shape.own, longest)
        end = canvas
    else:
        end = start + ((len(tokens) - start) // way.block + 1) * way.block
        canvas = start + ((len(tokens) - start) // max(way.block, way.length) + 1) * way.length
        canvas = min(canvas, limit)
        end = min(end, canvas)
    text = tokens + [shape.mask] * (canvas - len(tokens))
    while open_places := [place for place in range(len(tokens), end) if text[place] == shape.mask]:
        lines = logits(text)
        picked = {}
        for place in open_places:
            line = lines[place - 1 if shape.shifted else place].copy()
            line[shape.mask] = -np.inf
            key = place + (len(open_places) << TURN)
            choice = choose(line, ask, (), child, None, tolerance, position=key)
            if choice.token is None:
                return tokens[len(known) :], True
            top = line.max()
            sure = float(np.exp(line[choice.token] - top) / np.exp(line - top).sum())
            picked[place] = (sure, choice.token, choice.doubtful)
        order = sorted(open_places, key=lambda place: (-picked[place][0], place))
        fixed = set(order[: way.tokens]) | {place for place in open_places if picked[place][0] > way.threshold}
        left = [place for place in order if place not in fixed]
        doubtful |= any(picked[place][2] for place in fixed)
        doubtful |= any(abs(picked[place][0] - way.threshold) < tolerance for place in open_places)
        # A place may be fixed a turn earlier or later than in the loop: another number draws it then.
        last = picked[order[min(way.tokens, len(order)) - 1]][0]
        doubtful |= any(last - picked[place][0] < tolerance for place in left)
        for place in fixed:
            text[place] = picked[place][1]
    return text[len(known) : end], doubtful
