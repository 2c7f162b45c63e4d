"""A grammar, token by token: the library used directly, without drafts, threads or copies."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from tests.trial import vocabulary


class _View:
    """What the library asks of a tokenizer."""

    bos_token_id = None
    eos_token_id = vocabulary.END

    def __init__(self, vocab: int) -> None:
        words = vocabulary.words_of(vocab)
        self.tokens = [name.encode() for name in vocabulary.SPECIAL] + list(words[len(vocabulary.SPECIAL) :])
        self.special_token_ids = list(range(len(vocabulary.SPECIAL)))
        self._vocab = vocab

    def __call__(self, text: str | bytes) -> list[int]:
        return vocabulary.encode(text if isinstance(text, str) else text.decode(errors="replace"), self._vocab)


@lru_cache
def _library_tokenizer(vocab: int) -> Any:
    view = _View(vocab)
    while not view.tokens[-1]:  # ids without a token
        view.tokens.pop()
    wrapped = llguidance.TokenizerWrapper(view)
    return llguidance.LLTokenizer(wrapped, n_vocab=len(view.tokens), eos_token=[vocabulary.END])


class GrammarWalk:
    def __init__(self, structured: dict[str, Any], vocab: int) -> None:
        (kind, source), self._vocab = next(iter(structured.items())), vocab
        make = llguidance.LLMatcher
        if kind == "json":
            grammar = make.grammar_from_json_schema(json.dumps(source))
        elif kind == "regex":
            grammar = make.grammar_from_regex(source)
        elif kind == "choice":
            grammar = make.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in source))
        else:
            grammar = make.grammar_from_lark(source)
        self._matcher = make(_library_tokenizer(vocab), grammar, log_level=0)

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)
        found = np.zeros(self._vocab, dtype=bool)
        count = min(len(bits), self._vocab)
        found[:count] = bits[:count]
        return found

    def take(self, token: int) -> bool:
        """Whether the grammar is complete after the token: only an end token could follow."""
        assert self._matcher.consume_token(token), f"the walk chose {token}, which its own mask forbids"
        return bool(self._matcher.is_stopped())
