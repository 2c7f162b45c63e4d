"""What an architecture without a family here is, as far as its name tells."""

from __future__ import annotations

import re
from collections.abc import Collection

_ENCODER = "an encoder, which generates no text; for embeddings, choose a decoder such as Qwen3-Embedding"
_ENCODER_DECODER = "an encoder-decoder, and only models that continue their prompt are supported"
_SENSES = "a model of images or sound, and only text is supported; choose the text model of its family"
_ENCODERS = (
    r"(.*[-_])?(bert|roberta|distilbert|camembert|flaubert|albert|modernbert|mobilebert|eurobert|convbert|squeezebert)"
    r"([-_](xl|prelayernorm|generation))?|xlm|electra|deberta([-_]v2)?|mpnet|ernie|longformer|big_bird|esm|layoutlm.*"
)
_ENCODER_DECODERS = (
    r"(u|m|long)?t5|t5gemma2?|m?bart|switch_transformers|pegasus(_x)?|marian|m2m_100|blenderbot(-small)?|led|prophetnet"
    r"|encoder-decoder|fsmt|seamless_m4t.*"
)
_OF_SENSES = (
    r"whisper|wav2vec2.*|hubert|clip.*|siglip.*|vit.*|dinov.*|swin.*|blip.*|(.*_)?llava.*|mllama|llama4|idefics.*"
    r"|pixtral|mistral3|paligemma|florence2|kosmos.*|smolvlm|internvl.*|molmo|gemma3n|.*[-_](vl|vision|audio|omni|asr|tts)"
    r"([-_].*)?"
)
_KINDS = ((_ENCODERS, _ENCODER), (_ENCODER_DECODERS, _ENCODER_DECODER), (_OF_SENSES, _SENSES))
_NO_FAMILY = ("", "gpt")
"""Letters at which names begin although they have nothing else in common."""
_LEADING = re.compile(r"[a-z]+")


def why_unsupported(kind: str, supported: Collection[str]) -> str:
    """A clause about a `model_type` that is none of the supported ones: what it is, and the way out."""
    plain = kind.lower()
    same = [one for one in supported if _letters(one) == _letters(kind)]
    if same:
        return f"if {same[0]!r} is meant, write its config.json so"
    for names, what in _KINDS:
        if re.fullmatch(names, plain):
            return f"it is {what}"
    leading = _leading(kind)
    family = [one for one in supported if leading not in _NO_FAMILY and _leading(one) == leading]
    if family:
        others = ", ".join(map(repr, family))
        return f"it belongs to the family of {others}, but computes differently; choose a model of one of these"
    return "choose another model"


def _letters(kind: str) -> str:
    return re.sub(r"[^a-z0-9]", "", kind.lower())


def _leading(kind: str) -> str:
    match = _LEADING.match(kind.lower())
    return match.group() if match else ""
