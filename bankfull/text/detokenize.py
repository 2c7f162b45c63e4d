"""Streaming detokenization."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bankfull.text.tokenizer import Tokenizer


class Detokenizer:
    """Emits text as soon as its characters are complete; the concatenation is `Tokenizer.decode` of all ids.

    Each token is read once and at most three bytes are held back, so the cost is linear in the length of the text.
    """

    __slots__ = ("_decoder", "_drop_space", "_separator", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, *, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._drop_space = (tokenizer.pieces.drops_first_space or tokenizer.space_prefix) and not continuing
        self._separator = b""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is complete after `ids`."""
        data = bytearray()
        for id in ids:
            if id not in self._skipped:
                data += self._separator
                data += self._tokenizer.token_bytes(id)
                self._separator = self._tokenizer.pieces.separator
        return self._emit(self._decoder.decode(bytes(data)))

    def finish(self) -> str:
        """The held-back bytes: the beginning of a character that was never completed."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and self._drop_space:
            self._drop_space = False
            return text.removeprefix(" ")
        return text
