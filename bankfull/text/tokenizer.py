"""Text to token ids and back, for every model: one class around a `tokenizers` tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers

from bankfull.errors import ModelError, RequestError
from bankfull.text.guard import SpecialGuard, encode_with
from bankfull.text.pieces import pieces_of
from bankfull.text.spans import Spans, spans_of


class Tokenizer:
    """A vocabulary, and the model's rules for the beginning and the end of a text.

    `eos_ids` are all ids that end a text. `special_ids` are control tokens, which do not stand for text. `opening` are
    the tokens before a text when `add_bos` is set: the beginning-of-text token, unless the model needs more.
    `space_prefix` is SentencePiece's dummy prefix: a space before a text and before each text after a special token
    (`encode` adds it, because the backend would omit it before a user-defined symbol). `vocab_size` is one more than
    the largest id; by default the backend's. `unused_ids` have names in the backend, and stand for no text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool = False,
        opening: Sequence[int] = (),
        space_prefix: bool = False,
        vocab_size: int | None = None,
        unused_ids: Iterable[int] = (),
    ) -> None:
        added = backend.get_added_tokens_decoder()
        if vocab_size is None:
            vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not vocab_size:
            raise ModelError("the tokenizer has an empty vocabulary: the model's tokenizer files are damaged")
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        self.special_ids: frozenset[int] = frozenset(id for id, token in added.items() if token.special)
        self.opening: tuple[int, ...] = tuple(opening) or (() if bos_id is None else (bos_id,))
        self.add_bos = add_bos
        self.space_prefix = space_prefix
        if add_bos and not self.opening:
            raise ModelError(
                "the tokenizer needs a beginning-of-text token and declares none: add bos_token to the model's files"
            )
        self.guard = SpecialGuard(backend, (added[id].content for id in self.special_ids))
        self.pieces = pieces_of(backend)
        self._added = frozenset(added)
        self._backend = backend
        self._unused = frozenset(unused_ids)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        for id in self._unused:
            self._bytes[id] = b""

    @cached_property
    def spans(self) -> Spans:
        """Bounds on the characters of a token, and where a text may be cut."""
        return spans_of(self._backend)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    def same_as(self, other: Tokenizer) -> bool:
        """Whether both make the same ids of every text."""
        rules = ("vocab_size", "bos_id", "eos_ids", "opening", "add_bos", "space_prefix")
        same = all(getattr(self, rule) == getattr(other, rule) for rule in rules)
        return same and self._backend.to_str() == other._backend.to_str()

    def first_other_token(self, other: Tokenizer) -> int | None:
        """The lowest id that stands for different tokens in the two vocabularies; None if they are equal."""
        return min((id for _, id in self._used() ^ other._used()), default=None)

    def _used(self) -> set[tuple[str, int]]:
        vocab = self._backend.get_vocab(with_added_tokens=True).items()
        return {(token, id) for token, id in vocab if id not in self._unused}

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `parse_special=False` keeps the spelling of a special token as text. With `add_bos` (default: the model's rule)
        the opening is put before the text, unless the text begins with it.
        """
        if parse_special or not self.guard.spells(text):
            ids = self.encode_marked(text, None)
        else:
            marker = self.guard.marker_for((text,))
            ids = self.encode_marked(self.guard.mark(text, marker), marker)
        return self.opened(ids, add_bos)

    def encode_marked(self, text: str, marker: str | None) -> list[int]:
        """The ids of a text in which the guard has marked spellings with `marker` (None: no marks)."""
        return self.encode_spelled(self.spelled(text), marker)

    def spelled(self, text: str) -> str:
        """`text` as it is passed to the backend, checked. Cut where `spans` allow it, the ids of its parts are those of
        the whole."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is "
                "not a Unicode character: remove or replace it"
            ) from None
        if self.space_prefix:
            parts = self.guard.split(text)
            text = "".join(part if index % 2 or not part else " " + part for index, part in enumerate(parts))
        return text

    def encode_spelled(self, text: str, marker: str | None) -> list[int]:
        """The ids of a text from `spelled`, or of a part of it."""
        if marker is not None:
            return self.guard.encode(text, marker)
        return encode_with(self._backend, text)

    def opened(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        """`ids` with the opening before them, if the text needs one and does not begin with it."""
        wanted = self.add_bos if add_bos is None else add_bos
        if not wanted:
            return ids
        if not self.opening:
            raise RequestError("this model has no beginning-of-text token: leave add_bos unset")
        return ids if tuple(ids[: len(self.opening)]) == self.opening else [*self.opening, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """The text of `ids`. `continuing`: other text precedes it, so a leading space is kept."""
        kept = [id for id in ids if not (skip_special and id in self.special_ids)]
        text = self.pieces.separator.join(map(self.token_bytes, kept)).decode(errors="replace")
        if self.pieces.drops_first_space or self.space_prefix:
            text = text if continuing else text.removeprefix(" ")
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` adds to a text; empty for an unused id (padding)."""
        if id < 0:
            raise RequestError(f"{id} is not a token id: ids begin at 0")
        if id >= self.vocab_size:
            return b""
        known = self._bytes[id]
        if known is None:
            token = self._backend.id_to_token(id)
            known = (
                b""
                if token is None
                else self.pieces.bytes_of(token, added=id in self._added, special=id in self.special_ids)
            )
            self._bytes[id] = known
        return known

    def token_text(self, id: int) -> str:
        """The text of token `id`; invalid UTF-8 becomes U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")
