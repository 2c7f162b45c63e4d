"""Small vocabularies of the two kinds that GGUF files hold, trained here."""

import io
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from bankfull.text.gguf import tokenizer_from_gguf
from bankfull.text.tokenizer import Tokenizer

from .corpus import training

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYMBOLS = ["<think>", "\u2581\u2581", "[INST]"]


@cache
def sentencepiece_model(
    dummy_prefix: bool = True, byte_fallback: bool = True, symbols: tuple[str, ...] = (), size: int = 420
) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(training()),
        model_writer=model,
        model_type="bpe",
        vocab_size=size + (256 if byte_fallback else 0),
        byte_fallback=byte_fallback,
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        user_defined_symbols=list(symbols),
        control_symbols=["<|im_start|>", "<|im_end|>"],
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(
    model: sentencepiece.SentencePieceProcessor, dummy_prefix: bool, symbols: tuple[str, ...] = ()
) -> dict[str, object]:
    """The model as a converter writes it into a GGUF file."""

    def kind(index: int) -> int:
        if model.is_unknown(index):
            return 2
        if model.is_control(index):
            return 3
        if model.is_byte(index):
            return 6
        return 4 if model.id_to_piece(index) in symbols else 1

    size = model.get_piece_size()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [model.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": [kind(index) for index in range(size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": dummy_prefix,
    }


@cache
def sentencepiece_tokenizer(dummy_prefix: bool = True, symbols: tuple[str, ...] = ()) -> Tokenizer:
    return tokenizer_from_gguf(
        sentencepiece_metadata(sentencepiece_model(dummy_prefix, True, symbols), dummy_prefix, symbols)
    )


def byte_level(
    pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level BPE as a tokenizer.json would describe it: the reference."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROLS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(training(), trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        _, merges = backend.model.save(folder)
        lines = Path(merges).read_text("utf-8").splitlines()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert [vocabulary[token] for token in tokens] == list(range(len(tokens)))
    kinds = dict.fromkeys(CONTROLS, 3) | {"<think>": 4}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [line for line in lines if not line.startswith("#version")],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@cache
def chatml_tokenizer() -> Tokenizer:
    """A tokenizer of SmolLM2's kind."""
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer_from_gguf(byte_level_metadata(byte_level(pre), "smollm"))


def split_then_bytes(*patterns: str) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated", invert=False) for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
