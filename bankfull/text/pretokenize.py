"""Pre-tokenization of byte-level vocabularies: how each family splits a text into words before its merges run.

A GGUF file only names the family (`tokenizer.ggml.pre`). The steps are those of the models' tokenizer.json files, or,
for families known only from GGUF, the patterns of that format. Each pattern splits the words of the previous one: its
matches and the gaps between them become words.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from bankfull.errors import ModelError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _tiktoken(digits: str, contraction: str = _CONTRACTION + "|", letters: str = r"\p{L}") -> str:
    mark = r"\p{M}" if r"\p{M}" in letters else ""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{_set(letters)}+|{digits}| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_LINES}"


def _set(classes: str) -> str:
    return classes if classes == r"\p{L}" else f"[{classes}]"


def _cased(digits: str, ending: str) -> str:
    """A pattern that also splits words where lower case changes to upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{ending}|{lead}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"


_LLAMA3 = _tiktoken(r"\p{N}{1,3}")
_QWEN2 = _tiktoken(r"\p{N}")
_TEKKEN = _cased(r"\p{N}", "")
_GPT4O = _cased(r"\p{N}{1,3}", _CONTRACTION + "?")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _LINES,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Pretokenization:
    """One way to split text. `whole_words`: a word that is a token is used as it is, without merges."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_FAMILIES: dict[Pretokenization, tuple[str, ...]] = {
    Pretokenization(_DEFAULT): ("default",),
    Pretokenization((_GPT2,)): (
        "gpt-2",
        "phi-2",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "exaone4",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
    ),
    Pretokenization((r"\p{N}", _GPT2)): (
        "smollm",
        "starcoder",
        "refact",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ),
    Pretokenization((r"\p{N}", _GPT2), nfc=True): ("command-r",),
    Pretokenization((_LLAMA3,), whole_words=True, add_bos=True): (
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
    ),
    Pretokenization((_LLAMA3,)): ("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"),
    Pretokenization((_QWEN2,), nfc=True): ("qwen2",),
    Pretokenization((_QWEN2,)): (
        "deepseek-r1-qwen",
        "kormo",
        "f2llmv2",
        "megrez",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "grok-2",
    ),
    Pretokenization((_tiktoken(r"\p{N}", letters=r"\p{L}\p{M}"),), nfc=True): ("qwen35",),
    Pretokenization((_TEKKEN,), whole_words=True, add_bos=True): ("tekken",),
    Pretokenization((_GPT4O,)): ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
    Pretokenization(_DEEPSEEK3): ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
    Pretokenization(_DEEPSEEK_CODER): ("deepseek-coder",),
    Pretokenization((_BLOOM,)): ("bloom", "gpt3-finnish", "poro-chat"),
    Pretokenization((_BLOOM, r"\p{N}")): ("viking",),
    Pretokenization((_BAILING,)): ("bailingmoe", "bailingmoe2", "llada-moe"),
    Pretokenization((_SEED,)): ("seed-coder",),
}

FAMILIES: dict[str, Pretokenization] = {name: family for family, names in _FAMILIES.items() for name in names}


def family_named(name: object) -> Pretokenization:
    """The pre-tokenization named by `tokenizer.ggml.pre`."""
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    known = ", ".join(sorted(FAMILIES))
    given = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}, which is not supported"
    raise ModelError(
        f"the GGUF file {given} (tokenizer.ggml.pre): convert the model again with one of {known}, or use its "
        "tokenizer.json"
    )
