"""Prompt logprobs between the engine and the API: packed arrays, because there may be a quarter of a million of them.
The engine's loop packs them by position, the API's loop passes them on unread, and a thread adds the texts of the
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from bankfull.outputs import Logprob
from bankfull.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bankfull.runtime.results import TokenLogprobs

TokenLine = dict[int, Logprob]
"""The logprobs of one position by token id; the token that stands there is the first."""

_rows = msgspec.msgpack.Decoder(tuple[bytes, bytes, bytes])


def pack_lines(tokens: Sequence[int], known: Mapping[int, TokenLogprobs]) -> bytes:
    """`known`: by position; the first token has none."""
    counts, ids, values = array("i"), array("i"), array("d")
    for position, token in enumerate(tokens):
        before, line = len(ids), known.get(position)
        if line is not None:
            if token not in line.top_ids:
                ids.append(token)
                values.append(line.logprob)
            ids.extend(line.top_ids)
            values.extend(line.top_logprobs)
        counts.append(len(ids) - before)
    return msgspec.msgpack.encode((counts.tobytes(), ids.tobytes(), values.tobytes()))


def unpack_lines(
    packed: bytes | Sequence[TokenLine | None] | None, tokens: Sequence[int], tokenizer: Tokenizer
) -> list[TokenLine | None] | None:
    """The logprobs at each position, the prompt's own token first. Too slow for an event loop."""
    if packed is None or not isinstance(packed, bytes):
        return None if packed is None else list(packed)
    rows = _rows.decode(packed)
    counts, ids, values = array("i", rows[0]), array("i", rows[1]), array("d", rows[2])
    lines: list[TokenLine | None] = []
    start = 0
    for token, count in zip(tokens, counts, strict=True):
        pairs = dict(zip(ids[start : start + count], values[start : start + count], strict=True))
        start += count
        order = [token, *(other for other in pairs if other != token)] if pairs else []
        lines.append({other: Logprob(pairs[other], tokenizer.token_text(other)) for other in order} or None)
    return lines
