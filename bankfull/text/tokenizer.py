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
    """A vocabulary, and the model's rules about what begins and ends a text.

    `eos_ids` are all ids that end a text. `special_ids` are the tokens that steer the model rather than spell text.
    `opening` is what stands before a text when `add_bos` is set: the beginning-of-text token unless the model wants
    more. `space_prefix` is SentencePiece's dummy prefix: a text, and each text after a special token, begins with a
    space of its own (it is put in by `encode`, not by the backend, because the backend would forget it before a
    user-defined symbol). `vocab_size` is one more than the largest id, looked up in the backend if it is not given.
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
                "the tokenizer asks for a beginning-of-text token and names none: add bos_token to the model's files"
            )
        self.guard = SpecialGuard(backend, (added[id].content for id in self.special_ids))
        self.pieces = pieces_of(backend)
        self._added = frozenset(added)
        self._backend = backend
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @cached_property
    def spans(self) -> Spans:
        """How much a token can cover, and where texts may be cut."""
        return spans_of(self._backend)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """The ids of `text`.

        `parse_special=False` keeps the spelling of a special token as text. The opening is put before the text if
        `add_bos` (by default the model's own rule) says so and the text does not spell it already.
        """
        if parse_special or not self.guard.spells(text):
            ids = self.encode_marked(text, None)
        else:
            marker = self.guard.marker_for((text,))
            ids = self.encode_marked(self.guard.mark(text, marker), marker)
        return self.opened(ids, add_bos)

    def encode_marked(self, text: str, marker: str | None) -> list[int]:
        """The ids of a text in which the guard broke some spellings with `marker` (None: no spelling is broken)."""
        return self.encode_spelled(self.spelled(text), marker)

    def spelled(self, text: str) -> str:
        """`text` as the backend gets it, checked: parts of this one, cut where `spans` allow it, have the ids of the
        whole."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is no "
                "Unicode character: remove or replace it"
            ) from None
        if self.space_prefix:
            parts = self.guard.split(text)
            text = "".join(part if index % 2 or not part else " " + part for index, part in enumerate(parts))
        return text

    def encode_spelled(self, text: str, marker: str | None) -> list[int]:
        """The ids of what `spelled` gave, or of a part of it."""
        if marker is not None:
            return self.guard.encode(text, marker)
        return encode_with(self._backend, text)

    def opened(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        """`ids` behind the opening, if it belongs there and is not there yet: a text never has two of them."""
        wanted = self.add_bos if add_bos is None else add_bos
        if not wanted:
            return ids
        if not self.opening:
            raise RequestError("this model has no beginning-of-text token: leave add_bos unset")
        return ids if tuple(ids[: len(self.opening)]) == self.opening else [*self.opening, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """The text of `ids`; `continuing` says that text stands before it, so that a leading space is kept."""
        kept = [id for id in ids if not (skip_special and id in self.special_ids)]
        text = self.pieces.separator.join(map(self.token_bytes, kept)).decode(errors="replace")
        if self.pieces.drops_first_space or self.space_prefix:
            text = text if continuing else text.removeprefix(" ")
        return text

    def token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` adds to a text; none for an id between or behind the tokens (padding)."""
        if id < 0:
            raise RequestError(f"{id} is no token id: ids begin at 0")
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
        """Token `id` for a reader: broken bytes show as U+FFFD."""
        return self.token_bytes(id).decode(errors="replace")
