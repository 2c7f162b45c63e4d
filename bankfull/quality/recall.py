"""A recall score: pairs of a name and a thing, then the same pairs in another order.

Perplexity averages over all tokens and hides what a model can no longer look up in its context. Here a thing can only
be predicted from the pair that the text has stated before. A pair counts if every token of its thing is the likeliest
one after the text so far.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bankfull.layers.decoder import Decoder
from bankfull.runtime.naive import hidden_states
from bankfull.text.tokenizer import Tokenizer

PROMPTS, MOST_PAIRS = 8, 12
NAMES = (
    "Anna Omar Ingrid Pavel Mei Diego Ruth Kofi Lena Tariq Sofia Bruno Yuki Clara Amir Freya Hugo Nadia "
    "Oscar Priya Samuel Tessa Victor Wanda"
)
THINGS = (
    "drum apple lamp rope kettle mirror ladder violin basket hammer candle pillow bottle camera helmet "
    "whistle blanket needle bucket saddle anchor puzzle ribbon shovel"
)


@dataclass(frozen=True, slots=True)
class RecallPrompt:
    tokens: tuple[int, ...]
    answers: tuple[range, ...]
    """Places of each answer's tokens; a place is predicted from the one before it."""


@dataclass(frozen=True, slots=True)
class _Wording:
    names: Sequence[str]
    things: Sequence[str]
    pair: str
    end: str
    between: str


_SENTENCES = _Wording(NAMES.split(), THINGS.split(), " {} keeps the", ".", "\nOnce more, in another order:")


def recall_prompts(tokenizer: Tokenizer, longest: int) -> list[RecallPrompt]:
    """The same prompts for every model with this tokenizer, of at most `longest` tokens and as many pairs as fit; none
    if not even one pair fits."""
    wording = _trained_wording(tokenizer) or _SENTENCES
    pairs = min(MOST_PAIRS, len(wording.names))
    while pairs:
        prompts = [_prompt(tokenizer, wording, pairs, number) for number in range(PROMPTS)]
        if max(len(prompt.tokens) for prompt in prompts) <= longest:
            return [prompt for prompt in prompts if prompt.answers]
        pairs //= 2
    return []


def recall(model: Decoder, prompts: Sequence[RecallPrompt], device: torch.device) -> float | None:
    """Share of the answers that the model predicts; None without prompts."""
    right = total = 0
    for prompt in prompts:
        hidden = hidden_states(model, prompt.tokens, device)
        with torch.inference_mode():
            for places in prompt.answers:
                predicted = model.head(hidden[places.start - 1 : places.stop - 1]).argmax(-1).tolist()
                right += predicted == [prompt.tokens[place] for place in places]
                total += 1
    return right / total if total else None


def _trained_wording(tokenizer: Tokenizer) -> _Wording | None:
    """Keys and values, where these are all that the vocabulary has: a model that `bankfull train lm` taught recall."""

    def known(letter: str) -> list[str]:
        words = [f"{letter}{number}" for number in range(2 * MOST_PAIRS)]
        encoded = [tokenizer.encode(word, add_bos=False, parse_special=False) for word in words]
        same = [
            len(ids) == 1 and tokenizer.token_bytes(ids[0]) == word.encode()
            for ids, word in zip(encoded, words, strict=True)
        ]
        return words[: (*same, False).index(False)]

    keys, values = known("k"), known("v")
    return _Wording(keys, values, " {}", "", "") if keys and values else None


def _prompt(tokenizer: Tokenizer, wording: _Wording, pairs: int, number: int) -> RecallPrompt:
    chance = random.Random(f"recall {number}")
    names = chance.sample(wording.names, pairs)
    things = chance.choices(wording.things, k=pairs)
    text, ends = "", []
    for place in range(pairs):
        text += wording.pair.format(names[place]) + " " + things[place] + wording.end
    text += wording.between
    for place in chance.sample(range(pairs), pairs):
        text += wording.pair.format(names[place])
        ends.append((len(text.lstrip()), len((text + " " + things[place]).lstrip())))
        text += " " + things[place] + wording.end
    text = text.lstrip()
    tokens = tokenizer.encode(text, parse_special=False)
    answers = []
    for start, stop in ends:
        before, after = (tokenizer.encode(text[:end], parse_special=False) for end in (start, stop))
        # A tokenizer may join the end of one word and the next: such an answer has no tokens of its own.
        if 0 < len(before) < len(after) and tokens[: len(before)] == before and tokens[: len(after)] == after:
            answers.append(range(len(before), len(after)))
    return RecallPrompt(tuple(tokens), tuple(answers))
