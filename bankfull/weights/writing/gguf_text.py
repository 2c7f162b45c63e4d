"""The tokenizer and the chat template of a model as metadata of a GGUF file.

A GGUF file only names the way in which text is split before merges. It is found by splitting a text with every known
way. What was found is checked: the file's tokenizer must encode the text like the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bankfull.errors import ConfigError, ModelError
from bankfull.text.gguf import tokenizer_from_gguf
from bankfull.text.load import load_tokenizer
from bankfull.text.pretokenize import FAMILIES
from bankfull.text.tokenizer import Tokenizer
from bankfull.text.vocabulary import Kind
from bankfull.weights.source import ModelFiles
from bankfull.weights.writing.gguf_header import Field

PROBE = """The river's 3 gates were opened at 07:45; 1234567 litres/s ran through, weren't they? I'LL say you've SEEN it
\tif (x[10] != y->z) { return f(x) + "déjà vu" * 0.5e-3; }  // 3.14159

    Ünïcödé: 北京大学 2024年, مرحبا 123, हिन्दी, 😀👍🏽 — “quotes” (a_b-c) a1b2 CamelCaseWord\r\n  end   \n\n\n"""
"""Words, contractions, numbers of several lengths, code, spaces, line ends and scripts."""


def text_fields(files: ModelFiles) -> dict[str, Field]:
    """All keys below `tokenizer.`; none if the model has no tokenizer."""
    if files.kind == "gguf":
        return {key: value for key, value in files.metadata.items() if key.startswith("tokenizer.")}
    if not (files.path / "tokenizer.json").is_file():
        return {}
    tokenizer, template = load_tokenizer(files)
    described = json.loads(tokenizer.backend.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        raise ConfigError(
            f"The tokenizer of {files.path.name} is {str(model.get('type'))[:20]}, and a GGUF file is written with "
            "byte pairs only; leave --format gguf out."
        )
    fields = _vocabulary(tokenizer, int(files.config["vocab_size"])) | _ids(files, tokenizer)
    if model.get("byte_fallback"):
        fields = _sentencepiece(fields, tokenizer)
    else:
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _split_of(tokenizer, described)}
        fields["tokenizer.ggml.merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if not _agrees(fields, tokenizer):
        raise ConfigError(
            f"The tokenizer of {files.path.name} has rules that a GGUF file cannot hold; leave --format gguf out."
        )
    return fields | ({} if template is None else {"tokenizer.chat_template": template.source})


def _vocabulary(tokenizer: Tokenizer, size: int) -> dict[str, Field]:
    """Tokens by id. Ids of the embedding that are no token are unused."""
    known = {number: token for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items()}
    added = tokenizer.backend.get_added_tokens_decoder()
    count = max(size, max(known) + 1)
    kinds = []
    for number in range(count):
        if number not in known:
            kinds.append(Kind.UNUSED)
        elif number in added:
            kinds.append(Kind.CONTROL if number in tokenizer.special_ids else Kind.USER_DEFINED)
        else:
            kinds.append(Kind.NORMAL)
    return {
        "tokenizer.ggml.tokens": [known.get(number, f"[PAD{number}]") for number in range(count)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
    }


def _ids(files: ModelFiles, tokenizer: Tokenizer) -> dict[str, Field]:
    fields: dict[str, Field] = {"tokenizer.ggml.add_bos_token": tokenizer.add_bos}
    if tokenizer.bos_id is not None:
        fields["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    named = files.config.get("eos_token_id")
    ends = sorted(tokenizer.eos_ids)
    first = named if isinstance(named, int) and named in ends else ends[0] if ends else None
    if first is not None:
        fields["tokenizer.ggml.eos_token_id"] = first
        others = [number for number in ends if number != first]
        fields |= {f"tokenizer.ggml.{key}_token_id": n for key, n in zip(("eot", "eom"), others, strict=False)}
    if isinstance(pad := files.config.get("pad_token_id"), int) and pad >= 0:
        fields["tokenizer.ggml.padding_token_id"] = pad
    return fields


def _split_of(tokenizer: Tokenizer, described: Mapping[str, Any]) -> str:
    """The name of the way in which the tokenizer splits text."""
    backend = tokenizer.backend
    normal = (lambda text: text) if backend.normalizer is None else backend.normalizer.normalize_str
    wanted = backend.pre_tokenizer and [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal(PROBE))]
    whole = bool(described["model"].get("ignore_merges"))
    for name, family in FAMILIES.items():
        normalizer = family.normalizer()
        text = PROBE if normalizer is None else normalizer.normalize_str(PROBE)
        same = [word for word, _ in family.pre_tokenizer().pre_tokenize_str(text)] == wanted
        if same and family.whole_words == whole and (normalizer is None) == (backend.normalizer is None):
            return name
    raise ConfigError("The tokenizer splits text in a way that has no name in GGUF files; leave --format gguf out.")


def _sentencepiece(fields: dict[str, Field], tokenizer: Tokenizer) -> dict[str, Field]:
    """Pieces in the order of falling score. The files of a model directory have no scores, but ids in their order."""
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and isinstance(kinds, list)
    unknown = json.loads(tokenizer.backend.to_str())["model"].get("unk_token")
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[number] = int(Kind.BYTE)
        elif token == unknown:
            kinds[number] = int(Kind.UNKNOWN)
    normal = int(Kind.NORMAL)
    scores = [-float(number) if kind == normal else 0.0 for number, kind in enumerate(kinds)]
    scored = fields | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
    }
    for prefix in (True, False):
        scored["tokenizer.ggml.add_space_prefix"] = prefix
        if _agrees(scored, tokenizer):
            break
    return scored


def _agrees(fields: Mapping[str, Field], tokenizer: Tokenizer) -> bool:
    try:
        read = tokenizer_from_gguf(fields)
    except ModelError:
        return False
    texts = (PROBE, PROBE.strip(), "the river", " x")
    return all(read.encode(text) == tokenizer.encode(text) for text in texts)
