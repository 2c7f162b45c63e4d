"""Arguments of a call that ran out of tokens, read as far as they go."""

from __future__ import annotations

from typing import Any

import msgspec

_CLOSING = {"{": "}", "[": "]"}


def partial_object(text: str) -> dict[str, Any]:
    """The object that a JSON text spells, or has begun to spell: a value that is cut in two is left out."""
    for candidate in _candidates(text):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            continue
    return {}


def _candidates(text: str) -> list[str]:
    closing, whole = _scan(text)
    before = text[:whole]
    return [text, text + closing, before + _scan(before)[0]]


def _scan(text: str) -> tuple[str, int]:
    """The closing brackets that are missing at its end, and the end of its last whole value."""
    open_brackets: list[str] = []
    whole = 0
    quoted = escaped = False
    for at, character in enumerate(text):
        if quoted:
            quoted = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            quoted = True
        elif character in _CLOSING:
            open_brackets.append(_CLOSING[character])
            whole = at + 1
        elif character in "}]" and open_brackets:
            open_brackets.pop()
            whole = at + 1
        elif character == ",":
            whole = at
    return "".join(reversed(open_brackets)), whole
