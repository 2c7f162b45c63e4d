"""Keep the spelling of a special token in user text from becoming that token.

A tokenizer first splits a text at the spellings of its special tokens. To keep a spelling as text, a marker (a Unicode
noncharacter that the text does not contain) is inserted into it, so that it is not found. A copy of the tokenizer,
whose first normalization step deletes the marker, then encodes the text. Every other rule of the tokenizer applies, so
the ids differ from those of the plain text only at the suppressed token.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import normalizers

from bankfull.errors import RequestError
from bankfull.text.noncharacters import NONCHARACTERS

LONG_TEXT = 2000
"""Characters above which encoding could block other threads noticeably."""
SEARCHED = 1 << 16
"""Characters searched in one call."""


class SpecialGuard:
    """Finds the spellings of special tokens, breaks them with a marker, and encodes the marked text."""

    def __init__(self, backend: tokenizers.Tokenizer, spellings: Iterable[str]) -> None:
        self._backend = backend
        self._spellings = sorted({spelling for spelling in spellings if spelling}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, self._spellings))
        self._pattern = re.compile(f"({alternatives})") if self._spellings else None
        # A template may concatenate two strings, so a part of a spelling at an edge is marked, too. Parts of only
        # letters and digits are not: they would mark ordinary words such as role names.
        self._heads = sorted(_parts(spelling[:cut] for spelling in self._spellings for cut in range(1, len(spelling))))
        self._tails = sorted(_parts(spelling[cut:] for spelling in self._spellings for cut in range(1, len(spelling))))
        self._heads_tuple, self._tails_tuple = tuple(self._heads), tuple(self._tails)
        self._lock = threading.Lock()
        self._marked: tokenizers.Tokenizer | None = None
        self._marker = ""

    def split(self, text: str) -> list[str]:
        """Text and spellings in alternation, beginning and ending with text, which may be empty."""
        parts, behind = [], 0
        for match in self._found(text):
            parts += [text[behind : match.start()], match[0]]
            behind = match.end()
        return [*parts, text[behind:]]

    def spells(self, text: str) -> bool:
        """Whether `text` contains the spelling of a special token."""
        return next(self._found(text), None) is not None

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """All spellings in `text`. It is searched in pieces, because the search holds the interpreter's lock."""
        if self._pattern is None:
            return
        start, longest = 0, len(self._spellings[0])
        while start < len(text):
            # A spelling that begins before `end` is seen completely.
            end = start + SEARCHED
            match = self._pattern.search(text, start, end + longest)
            if match is None or match.start() >= end:
                start = end
            else:
                yield match
                start = match.end()

    def touches(self, text: str) -> bool:
        """Whether `text` spells a special token, or begins or ends with a part of one."""
        core = text.strip()
        return self.spells(text) or core.endswith(self._heads_tuple) or core.startswith(self._tails_tuple)

    def marker_for(self, texts: Iterable[str]) -> str:
        """A noncharacter that occurs in none of `texts`."""
        used: set[str] = set()
        for text in texts:
            used.update(character for character in NONCHARACTERS if character in text)
        for marker in NONCHARACTERS:
            if marker not in used:
                return marker
        raise RequestError(
            "the text contains a special token and all 66 Unicode noncharacters, so no marker is left to keep the "
            "token as text: remove a noncharacter"
        )

    def mark(self, text: str, marker: str, *, edges: bool = False) -> str:
        """`text` with `marker` inside every spelling and, with `edges`, next to partial spellings at both ends."""
        parts = self.split(text)
        if len(parts) > 1:
            text = "".join(_broken(part, marker) if index % 2 else part for index, part in enumerate(parts))
        if edges:
            core = text.strip()
            start = len(text) - len(text.lstrip())
            if core.endswith(self._heads_tuple):
                text = text[: start + len(core)] + marker + text[start + len(core) :]
            if core.startswith(self._tails_tuple):
                text = text[:start] + marker + text[start:]
        return text

    def encode(self, text: str, marker: str) -> list[int]:
        """The ids of a marked text, without the markers."""
        with self._lock:
            if self._marked is None:
                self._marked = _copy_with_raw_specials(self._backend)
            if self._marker != marker:
                steps = [normalizers.Replace(marker, "")]
                if self._backend.normalizer is not None:
                    steps.append(self._backend.normalizer)
                self._marked.normalizer = normalizers.Sequence(steps)
                self._marker = marker
            return encode_with(self._marked, text)


def encode_with(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """The library releases the interpreter only while it encodes a batch, which costs slightly more."""
    if len(text) > LONG_TEXT:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    else:
        ids = backend.encode(text, add_special_tokens=False).ids
    return ids


def _parts(parts: Iterable[str]) -> set[str]:
    return {part for part in parts if not part.isalnum() and not part.isspace()}


def _broken(spelling: str, marker: str) -> str:
    if len(spelling) == 1:
        raise RequestError(
            f"the text contains {spelling!r}, which is a special token of this model in one character and cannot be "
            "kept as text: remove it"
        )
    # After the first character: then no spelling can begin here.
    return spelling[0] + marker + spelling[1:]


def _copy_with_raw_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A second tokenizer with the same model, for encoding only."""
    added = backend.get_added_tokens_decoder()
    # A special token that is matched in normalized text would match again after the marker is removed.
    tokens = [_raw(added[id]) if added[id].special else added[id] for id in sorted(added)]
    copy = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    copy.add_tokens(tokens)
    if {id: token.content for id, token in copy.get_added_tokens_decoder().items()} == {
        id: token.content for id, token in added.items()
    }:
        return copy
    # Added tokens with gaps between their ids cannot be added one by one; the full description has the ids.
    description = json.loads(backend.to_str())
    for token in description["added_tokens"]:
        token["normalized"] = token["normalized"] and not token["special"]
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _raw(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        special=True,
        normalized=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
