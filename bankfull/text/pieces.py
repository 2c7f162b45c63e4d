"""The bytes of a token, for each kind of decoder.

A decoder of the `tokenizers` library turns a list of tokens into text. Streaming needs the text of each token, so
decoding here joins the bytes of the tokens and reads them as UTF-8. Invalid UTF-8 becomes U+FFFD, one per maximal
invalid part. The ByteFallback decoder of `tokenizers` instead rejects a whole run of byte tokens if any is invalid,
which cannot be streamed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import tokenizers

from bankfull.errors import ModelError

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary, inverted.

    Printable Latin-1 stands for itself; the other bytes take the code points from 256 on, in order.
    """
    alphabet: dict[str, int] = {}
    displaced = 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            alphabet[chr(byte)] = byte
        else:
            alphabet[chr(displaced)] = byte
            displaced += 1
    return alphabet


@dataclass(frozen=True, slots=True)
class Pieces:
    """How a vocabulary encodes bytes."""

    byte_level: bool = False  # each character of a token stands for one byte
    space_mark: bool = False  # U+2581 stands for a space
    byte_tokens: bool = False  # <0xAB> stands for the byte AB
    drops_first_space: bool = False  # decoding drops one leading space, which encoding added
    separator: bytes = b""  # the separator between two tokens

    def bytes_of(self, token: str, *, added: bool, special: bool) -> bytes:
        if special or (added and self.byte_level):
            return token.encode()
        if self.byte_level:
            try:
                return bytes(_ALPHABET[character] for character in token)
            except KeyError:
                return token.encode()
        if self.byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (token.replace(SPACE_MARK, " ") if self.space_mark else token).encode()


_ALPHABET = byte_level_alphabet()


def pieces_of(backend: tokenizers.Tokenizer) -> Pieces:
    """How the decoder of `backend` reads its tokens. An unsupported decoder is refused by name."""
    if backend.decoder is None:
        return Pieces(separator=b" ")
    features: set[str] = set()
    _walk(json.loads(backend.decoder.__getstate__()), features)
    return Pieces(
        byte_level="byte_level" in features,
        space_mark="space_mark" in features,
        byte_tokens="byte_tokens" in features,
        drops_first_space="drops_first_space" in features,
    )


def _walk(decoder: object, found: set[str]) -> None:
    match decoder:
        case {"type": "Sequence", "decoders": [*steps]}:
            for step in steps:
                _walk(step, found)
        case {"type": "ByteLevel"}:
            found.add("byte_level")
        case {"type": "ByteFallback"}:
            found.add("byte_tokens")
        case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
            found.add("space_mark")
        case {"type": "Metaspace", "replacement": "\u2581", **options}:
            found.add("space_mark")
            if options.get("prepend_scheme", "always") != "never":
                found.add("drops_first_space")
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            found.add("drops_first_space")
        case {"type": "Fuse"}:
            pass
        case _:
            raise ModelError(
                f"the tokenizer's decoder step {json.dumps(decoder, ensure_ascii=False)} is not supported: use a model "
                "with a byte-level or SentencePiece vocabulary"
            )
