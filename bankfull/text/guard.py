"""Text that spells a special token must be able to stay text.

A special token is cut out of a text before anything else, wherever its spelling occurs. To keep a spelling as text, a
private marker (a Unicode noncharacter that the text does not contain) is put inside it, so that it is no longer found;
a copy of the tokenizer whose first normalisation step deletes the marker then reads the text as if it had never been
there. Every other rule of the tokenizer stays in force, so marked and plain text get the same ids but for the token
that was not to be.
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
"""Characters from which on encoding could hold up other threads."""
SEARCHED = 1 << 16
"""Characters that are searched in one go."""


class SpecialGuard:
    """Finds the spellings of special tokens, breaks them with a marker, and encodes what was marked."""

    def __init__(self, backend: tokenizers.Tokenizer, spellings: Iterable[str]) -> None:
        self._backend = backend
        self._spellings = sorted({spelling for spelling in spellings if spelling}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, self._spellings))
        self._pattern = re.compile(f"({alternatives})") if self._spellings else None
        # Where a string may be glued to another one by a template, half a spelling is already too much. A part that is
        # all letters and digits is left alone: it would mark ordinary words such as role names.
        self._heads = sorted(_parts(spelling[:cut] for spelling in self._spellings for cut in range(1, len(spelling))))
        self._tails = sorted(_parts(spelling[cut:] for spelling in self._spellings for cut in range(1, len(spelling))))
        self._heads_tuple, self._tails_tuple = tuple(self._heads), tuple(self._tails)
        self._lock = threading.Lock()
        self._marked: tokenizers.Tokenizer | None = None
        self._marker = ""

    def split(self, text: str) -> list[str]:
        """Text and spellings in turn, beginning and ending with (maybe empty) text."""
        parts, behind = [], 0
        for found in self._found(text):
            parts += [text[behind : found.start()], found[0]]
            behind = found.end()
        return [*parts, text[behind:]]

    def spells(self, text: str) -> bool:
        """Whether a special token would be cut out of `text`."""
        return next(self._found(text), None) is not None

    def _found(self, text: str) -> Iterator[re.Match[str]]:
        """All spellings in `text`. It is searched in pieces: many a `<` costs time, in which no other thread runs."""
        if self._pattern is None:
            return
        start, longest = 0, len(self._spellings[0])
        while start < len(text):
            # Whatever begins before `end` is seen whole.
            end = start + SEARCHED
            found = self._pattern.search(text, start, end + longest)
            if found is None or found.start() >= end:
                start = end
            else:
                yield found
                start = found.end()

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
            "the text spells a special token and contains all 66 Unicode noncharacters, so none is left to keep the "
            "spelling as text: remove one of them"
        )

    def mark(self, text: str, marker: str, *, edges: bool = False) -> str:
        """`text` with `marker` inside every spelling, and with `edges` beside parts of spellings at its two ends."""
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
        """The ids of a marked text, the markers removed."""
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
    """The library lets other threads run only while it encodes a batch, which costs a little more."""
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
    # Behind the first character: no spelling can then begin here, whatever follows.
    return spelling[0] + marker + spelling[1:]


def _copy_with_raw_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer of its own around the same model, as far as encoding goes."""
    added = backend.get_added_tokens_decoder()
    # A special token that is searched in normalised text would be found again once the marker is gone.
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
    # Added tokens whose ids have gaps cannot be added again one by one; the full description carries the ids.
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
