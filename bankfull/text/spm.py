"""SentencePiece BPE vocabularies: pieces with scores, merged best score first.

SentencePiece repeatedly joins the two neighbours whose union is the piece with the best score, leftmost first. That is
equivalent to a merge list with every split of a piece into two pieces, ranked by the score of the piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, normalizers

from bankfull.errors import ModelError
from bankfull.text.pieces import SPACE_MARK
from bankfull.text.vocabulary import GgufVocabulary, Kind


def sentencepiece_backend(
    vocabulary: GgufVocabulary, scores: Sequence[float], *, space_prefix: bool
) -> tokenizers.Tokenizer:
    unknown = next(iter(vocabulary.of(Kind.UNKNOWN)), None)
    normal = {token: vocabulary.ids[token] for token in vocabulary.of(Kind.NORMAL)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(normal, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of(Kind.BYTE)),
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    vocabulary.add_to(backend)
    return backend


def _merges(normal: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    # Only normal pieces are merged: control and byte pieces never come from text, user-defined ones are split off
    # first.
    ranked: list[tuple[float, int, int, str]] = []
    for piece, index in normal.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in normal and piece[cut:] in normal:
                ranked.append((-scores[index], index, cut, piece))
    if len(ranked) > 1 and all(entry[0] == ranked[0][0] for entry in ranked) and ranked[0][1] != ranked[-1][1]:
        raise ModelError(
            "the GGUF file gives every piece of its SentencePiece vocabulary the same score (tokenizer.ggml.scores), "
            "so the order of its merges is unknown: convert the model again from its tokenizer.model"
        )
    ranked.sort()
    return [(piece[:cut], piece[cut:]) for _, _, cut, piece in ranked]
