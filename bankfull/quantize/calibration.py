"""The text that a method is calibrated on: a bundled one, a file, or one that the model writes itself.

The bundled text has two parts, and no eight successive words in common with the evaluation texts of `quality`:
texts/sampled.txt was written by the default model (SmolLM2-135M-Instruct, at temperature 0.7) after openings of many
kinds, and texts/manual.txt is taken from pages of this project's own documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files as package_files
from pathlib import Path

from bankfull.errors import ConfigError

LENGTH, TOKENS = 512, 8192
"""Tokens of a sequence, and of all of them: twice as many would take a 1B model beyond 15 minutes on two cores."""
LARGEST_TEXT = 64 << 20
BUNDLED, OWN = "bundled", "self"
Encode = Callable[[str], Sequence[int]]
Sample = Callable[[Sequence[int], int, int], Sequence[Sequence[int]]]
"""Continues an opening: the number of samples and the tokens of each; returns them without the opening."""


def bundled_text() -> str:
    """The calibration text of the package."""
    folder = package_files("bankfull.quantize") / "texts"
    items = sorted((item for item in folder.iterdir() if item.name.endswith(".txt")), key=lambda item: item.name)
    return "\n\n".join(item.read_text(encoding="utf-8") for item in items)


def text_of(choice: str) -> str:
    """`bundled`, or the content of a UTF-8 file."""
    if choice == BUNDLED:
        return bundled_text()
    path = Path(choice)
    try:
        too_large = path.stat().st_size > LARGEST_TEXT
        text = "" if too_large else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(
            f"The calibration text {choice[:80]!r} cannot be read ({reason}); give a text file, 'bundled' or 'self'."
        ) from None
    if too_large:
        raise ConfigError(f"{path} is larger than {LARGEST_TEXT >> 20} MiB; give a shorter calibration text.")
    return text


def sequences_of(
    tokens: Sequence[int], opening: Sequence[int] = (), length: int = LENGTH, most: int = TOKENS
) -> list[list[int]]:
    """At most `most` tokens of a text as sequences of `length` tokens, each after the `opening`. They are spread evenly
    over a longer text. A last short sequence is dropped unless it is the only one."""
    room = length - len(opening)
    if room < 1:
        raise ConfigError(f"Calibration sequences of {length} tokens leave no room for text; make them longer.")
    cut = [[*opening, *tokens[at : at + room]] for at in range(0, len(tokens), room)]
    if not cut:
        raise ConfigError("The calibration text has no tokens; give a longer one.")
    whole = [one for one in cut if len(one) == length] or cut
    count = min(len(whole), max(1, most // length))
    return [whole[index * len(whole) // count] for index in range(count)]


def own_text(sample: Sample, opening: Sequence[int], length: int = LENGTH, most: int = TOKENS) -> list[list[int]]:
    """Text that the model writes itself from its `opening`, a beginning-of-text token."""
    if not opening:
        raise ConfigError("This model has no token that begins a text, so it cannot write one; use another text.")
    count = max(1, most // length)
    sequences = [[*opening, *answer] for answer in sample(opening, count, length - len(opening))]
    return [tokens for tokens in sequences if len(tokens) > len(opening)]
