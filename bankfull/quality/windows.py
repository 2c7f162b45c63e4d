"""The text of an evaluation, in windows: what a model reads, and which tokens it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files

from bankfull.errors import ConfigError, RequestError

WINDOW = 512


@dataclass(frozen=True, slots=True)
class EvaluationWindow:
    tokens: tuple[int, ...]
    first: int
    """First position whose token is predicted."""
    masked: tuple[int, ...] = ()
    """Positions whose tokens are masked and predicted, for a diffusion model."""
    mask: int = 0
    shifted: bool = False
    """Whether a masked token is predicted at the position before it."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads."""
        hidden = set(self.masked)
        return tuple(self.mask if i in hidden else token for i, token in enumerate(self.tokens))

    @property
    def predicted(self) -> Sequence[int]:
        """Positions whose tokens are predicted."""
        return self.masked or range(self.first, len(self.tokens))

    @property
    def lines(self) -> list[int]:
        """Positions whose hidden states predict them."""
        return [at - (self.shifted or not self.masked) for at in self.predicted]


def bundled_texts() -> dict[str, str]:
    """The evaluation texts of the package, by file name."""
    folder = package_files("bankfull.quality") / "texts"
    items = sorted((item for item in folder.iterdir() if item.name.endswith(".txt")), key=lambda item: item.name)
    return {item.name: item.read_text(encoding="utf-8") for item in items}


def windows_of(
    texts: Sequence[Sequence[int]], opening: Sequence[int] = (), window: int = WINDOW
) -> list[EvaluationWindow]:
    """Cut the texts' tokens into windows of at most `window` tokens, including the prefix `opening`. A last window
    without a token to predict is dropped."""
    first = max(1, len(opening))
    if window <= first:
        raise ConfigError(f"window={window} leaves nothing to predict; use at least {first + 1}.")
    room = window - len(opening)
    windows = []
    for text in texts:
        for at in range(0, len(text), room):
            tokens = (*opening, *text[at : at + room])
            if len(tokens) > first:
                windows.append(EvaluationWindow(tokens, first))
    if not windows:
        raise RequestError("The evaluation text has no token to predict; give a longer one.")
    return windows
