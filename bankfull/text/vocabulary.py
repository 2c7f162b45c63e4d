"""The checked token list of a GGUF file, for every kind of vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import cast

import tokenizers
from tokenizers import AddedToken

from bankfull.errors import ModelError


class Kind(IntEnum):
    """The token types of GGUF."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_KINDS = frozenset(map(int, Kind))


class GgufVocabulary:
    """Tokens in the order of their ids, each with its kind.

    There may be hundreds of thousands, and the start waits for them: operations on the whole list are preferred to
    loops.
    """

    __slots__ = ("_kinds", "_nameless", "_tokens", "ids", "searched_normalised")

    def __init__(self, metadata: Mapping[str, object], *, searched_normalised: bool) -> None:
        tokens = sequence(metadata, "tokenizer.ggml.tokens")
        if set(map(type, tokens)) != {str}:
            raise ModelError("tokenizer.ggml.tokens of the GGUF file is not a list of strings: the file is damaged")
        self._tokens = cast("list[str]", tokens)
        self._nameless: list[int] = []
        if "" in self._tokens:
            self._nameless = [index for index, token in enumerate(self._tokens) if not token]
            # A token without text is a placeholder: it keeps its id, under a name that occurs in no text.
            self._tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(self._tokens)]
        self.ids = dict(zip(self._tokens, range(len(tokens)), strict=True))
        if len(self.ids) != len(self._tokens):
            twice = next(token for index, token in enumerate(self._tokens) if self.ids[token] != index)
            raise ModelError(f"the GGUF file lists the token {twice!r} twice: convert the model again")
        kinds = sequence(metadata, "tokenizer.ggml.token_type", default=[int(Kind.NORMAL)] * len(self._tokens))
        if len(kinds) != len(self._tokens):
            raise ModelError(
                f"the GGUF file has {len(self._tokens)} tokens and {len(kinds)} token types: the file is damaged"
            )
        try:
            known = _KINDS.issuperset(kinds)
        except TypeError:  # not a number
            known = False
        if not known:
            raise ModelError("tokenizer.ggml.token_type of the GGUF file has a value outside 0..6: the file is damaged")
        self._kinds = cast("list[int]", kinds)
        self.searched_normalised = searched_normalised

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> str:
        return self._tokens[index]

    def of(self, *kinds: Kind) -> list[str]:
        """The tokens of these kinds, in the order of their ids."""
        wanted = frozenset(map(int, kinds))
        return [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind in wanted]

    @property
    def unused(self) -> set[int]:
        """The ids that stand for no text: padding up to the size of the embedding, and placeholders."""
        return {self.ids[token] for token in self.of(Kind.UNUSED)}.union(self._nameless)

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add to `backend` the tokens that are split off before pre-tokenization."""
        steering, symbols = self.of(Kind.CONTROL, Kind.UNKNOWN), self.of(Kind.USER_DEFINED)
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in steering])
        backend.add_tokens([AddedToken(token, special=False, normalized=self.searched_normalised) for token in symbols])


def sequence(metadata: Mapping[str, object], key: str, default: list[object] | None = None) -> list[object]:
    """The list under `key`, converted from an array of any library."""
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"the GGUF file has no {key}: it holds no complete tokenizer, so convert the model again")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise ModelError(f"{key} of the GGUF file is not a list: the file is damaged")
    items: list[object] = value.tolist() if hasattr(value, "tolist") else list(value)
    return items
