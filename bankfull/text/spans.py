"""Bounds that follow from the parts of a tokenizer: the most characters that one token can cover, and the places where
a text may be cut so that the ids of its parts, concatenated, are the ids of the whole.

A cut lies between a letter and a blank (a space or a newline) that is followed by another letter. The patterns of
byte-level families always end a word there: each is an alternation of runs of character classes without lookbehind,
none matches a letter followed by a blank, and the only lookahead (is the blank the last of its run?) sees the following
letter on both sides. A SentencePiece vocabulary has no pattern; there, no merge may cross the cut: no piece has a
letter before a space mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from bankfull.text.pieces import SPACE_MARK, byte_level_alphabet
from bankfull.text.pretokenize import FAMILIES

# Scripts whose letters were assigned long ago, so that all Unicode versions agree.
_LETTER = "[A-Za-zÀ-ÖØ-öø-ʯΑ-ΡΣ-ώЀ-ҁҊ-ԥא-תء-غف-ي一-龥ぁ-ゖァ-ヺ가-힣]"
_SEARCHED = 1 << 16
"""Characters searched in one call, which holds the interpreter's lock."""
_KNOWN_PATTERNS = frozenset(pattern for family in FAMILIES.values() for pattern in family.patterns)


@dataclass(frozen=True, slots=True)
class Spans:
    longest: int | None
    """Most characters that a token covers, not counting those of `free`; None: unknown."""
    free: str
    """Characters that may need no token: the vocabulary lacks them, or one token covers a whole run of them."""
    cut: re.Pattern[str] | None
    """Pattern of a letter after which a text may be cut; None: no cut is allowed."""

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` certainly has more than this many tokens."""
        if self.longest is None or len(text) <= (most := tokens * self.longest):
            return False
        return len(text) - sum(map(text.count, self.free)) > most

    def next_cut(self, text: str, start: int, end: int) -> int | None:
        """The first position from `start` and before `end` where the text may be cut."""
        if self.cut is None:
            return None
        position = max(0, start - 1)
        while position < end:
            # Two more characters: those after the letter.
            match = self.cut.search(text, position, min(position + _SEARCHED, end) + 2)
            if match is not None:
                return match.end() if match.end() < end else None
            position += _SEARCHED
        return None


def spans_of(backend: tokenizers.Tokenizer) -> Spans:
    """The bounds that follow from the parts of `backend`. An unknown part gives none."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = list(backend.get_added_tokens_decoder().values())
    normalizer, words = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    longest = _longest(backend, vocabulary, normalizer, words)
    free = "" if longest is None else _free(vocabulary, added, words)
    return Spans(longest, free, _cut(backend, added, normalizer, words))


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    inner = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else [one for each in inner for one in _flat(each)]


# -- how much a token can cover


def _longest(
    backend: tokenizers.Tokenizer,
    vocabulary: dict[str, int],
    normalizer: list[dict[str, Any]],
    words: list[dict[str, Any]],
) -> int | None:
    if not isinstance(backend.model, models.BPE) or not all(map(_keeps_words, words)):
        return None
    # A character that the vocabulary lacks must need tokens of its own, not share one with its neighbours.
    if not _byte_level(words):
        spelled = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        if not (backend.model.byte_fallback and spelled):
            return None
    elif not all(mark in vocabulary for mark, byte in byte_level_alphabet().items() if 0x80 <= byte < 0xC0):
        return None  # a character of several bytes ends with one of these
    shrunk = 1
    for step in normalizer:
        factor = _shrinks_by(step)
        if factor is None:
            return None
        shrunk *= factor
    return shrunk * max(map(len, vocabulary))


def _byte_level(words: list[dict[str, Any]]) -> bool:
    return any(step["type"] == "ByteLevel" for step in words)


def _free(vocabulary: dict[str, int], added: list[tokenizers.AddedToken], words: list[dict[str, Any]]) -> str:
    free: set[str] = set()
    if _byte_level(words):  # bytes that the vocabulary lacks are dropped
        free.update(chr(byte) for mark, byte in byte_level_alphabet().items() if byte < 0x80 and mark not in vocabulary)
    if any(token.lstrip or token.rstrip for token in added):
        free.update(chr(code) for code in range(0x3001) if chr(code).isspace())
    return "".join(sorted(free))


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenization step keeps every character."""
    match step["type"]:
        case "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Split":
            return step.get("behavior") != "Removed"
    return False


def _shrinks_by(step: dict[str, Any]) -> int | None:
    """Most characters that a normalization step may turn into one; None: any number."""
    match step:
        case {"type": "NFC" | "NFKC"}:
            return 4  # no character has a longer canonical decomposition
        case {"type": "NFD" | "NFKD" | "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
            return 1
    return None


# -- where a text may be cut


def _cut(
    backend: tokenizers.Tokenizer,
    added: list[tokenizers.AddedToken],
    normalizer: list[dict[str, Any]],
    words: list[dict[str, Any]],
) -> re.Pattern[str] | None:
    if not isinstance(backend.model, models.BPE) or not _spares_cuts(added):
        return None
    if all(map(_cuts_words, words)) and words and words[-1]["type"] == "ByteLevel":
        blanks = "[ \n]" if all(step["type"] in ("NFC", "NFD", "NFKC", "NFKD") for step in normalizer) else None
    else:
        blanks = " " if not words and _marks_spaces(normalizer) and _merges_stay(backend) else None
    return None if blanks is None else re.compile(f"{_LETTER}(?={blanks}{_LETTER})")


def _spares_cuts(added: Iterable[tokenizers.AddedToken]) -> bool:
    """Whether no added token can cross a cut, by its spelling or by the blanks that it strips."""
    across = re.compile(f"{_LETTER}[ \n]|[ \n]{_LETTER}|{_LETTER}{SPACE_MARK}|{SPACE_MARK}{_LETTER}")
    begins, ends = re.compile(_LETTER), re.compile(f"{_LETTER}$")
    return not any(
        across.search(token.content)
        or token.content in (" ", "\n", SPACE_MARK)
        or (token.lstrip and begins.match(token.content))
        or (token.rstrip and ends.search(token.content))
        for token in added
    )


def _cuts_words(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case {"type": "Digits"}:
            return True
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return pattern in _KNOWN_PATTERNS
    return False


def _marks_spaces(normalizer: list[dict[str, Any]]) -> bool:
    match normalizer:
        case [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]:
            return True
    return False


def _merges_stay(backend: tokenizers.Tokenizer) -> bool:
    inside = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}")
    return backend.model.byte_fallback and not any(map(inside.search, backend.get_vocab(with_added_tokens=False)))
