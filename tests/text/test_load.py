"""A model's files give its tokenizer and its template, with every rule that they state."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, processors

from bankfull.errors import ModelError
from bankfull.text.load import load_tokenizer
from bankfull.text.template import encode_chat

from .corpus import HOSTILE
from .models import byte_level_metadata, chatml_tokenizer, sentencepiece_metadata, sentencepiece_model


@dataclass
class Files:
    path: Path
    kind: str = "hf"
    config: dict[str, object] = field(default_factory=dict)
    generation: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)


def write(folder: Path, backend: tokenizers.Tokenizer, **settings: object) -> Files:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Files(folder)


def fresh() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(chatml_tokenizer().backend.to_str())


def llama2() -> tokenizers.Tokenizer:
    """The shape of a converted SentencePiece tokenizer.json: prefix by normaliser, byte fallback, BOS by template."""
    metadata = sentencepiece_metadata(sentencepiece_model(), True)
    from bankfull.text.gguf import tokenizer_from_gguf

    state = json.loads(tokenizer_from_gguf(metadata).backend.model.__getstate__())
    merges = [tuple(merge) for merge in state["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=state["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<unk>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_a_directory_encodes_as_transformers_does(tmp_path: Path) -> None:
    files = write(tmp_path, llama2(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer, template = load_tokenizer(files)
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>")
    assert template is None
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, {2})
    for text in HOSTILE:
        if text and not text.startswith("<s>"):
            ids = tokenizer.encode(text)
            assert ids == reference.encode(text)
            assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_every_source_of_end_tokens_counts(tmp_path: Path) -> None:
    files = write(tmp_path, fresh(), eos_token={"content": "<|im_end|>", "special": True})
    files.config = {"eos_token_id": 0}
    files.generation = {"eos_token_id": [1, 5]}
    assert load_tokenizer(files)[0].eos_ids == {0, 1, 2, 5}


def test_add_bos_token_wins_over_the_post_processor(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, llama2(), bos_token="<s>", add_bos_token=False))[0].add_bos is False
    files = write(tmp_path, fresh(), bos_token="<|im_start|>", add_bos_token=True)
    assert load_tokenizer(files)[0].encode("a")[0] == 1


def test_a_longer_opening_is_kept(tmp_path: Path) -> None:
    backend = fresh()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> <|im_end|> $A", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    tokenizer, _ = load_tokenizer(write(tmp_path, backend))
    assert tokenizer.encode("a")[:2] == [1, 2]
    assert tokenizer.encode("<|im_start|><|im_end|>a") == tokenizer.encode("a")


def test_tokens_named_special_are_special(tmp_path: Path) -> None:
    metadata = byte_level_metadata(fresh(), "smollm")
    tokens = list(metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    plain = tokenizers.Tokenizer(fresh().model)
    plain.pre_tokenizer, plain.decoder = fresh().pre_tokenizer, fresh().decoder
    files = write(tmp_path, plain, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    tokenizer, _ = load_tokenizer(files)
    assert tokenizer.special_ids == {tokens.index("<|im_end|>"), tokens.index("<|im_start|>")}
    assert tokenizer.encode("a<|im_end|>")[-1] == 2


def test_a_stored_length_limit_never_cuts_a_prompt(tmp_path: Path) -> None:
    backend = fresh()
    backend.enable_truncation(3)
    assert len(load_tokenizer(write(tmp_path, backend))[0].encode("one two three four five")) > 3


def test_templates_come_from_the_file_or_the_settings(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "x"}]
    files = write(tmp_path, fresh(), bos_token="<|im_start|>", chat_template="one {{ bos_token }}")
    assert load_tokenizer(files)[1].render(talk) == "one <|im_start|>"  # type: ignore[union-attr]
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    template = load_tokenizer(write(tmp_path, fresh(), chat_template=named))[1]
    assert template is not None
    assert (template.render(talk), template.render(talk, tools=[{}])) == ("two", "tools")
    (tmp_path / "chat_template.jinja").write_text("three {{ messages[0].content }}")
    template = load_tokenizer(files)[1]
    assert template is not None and template.render(talk) == "three x"


def test_a_gguf_file_gives_both(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(sentencepiece_model(), True)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer, template = load_tokenizer(Files(tmp_path, "gguf", metadata=metadata))
    assert template is not None
    messages = [{"role": "user", "content": "the river"}]
    assert template.render(messages) == "<s>the river</s>"
    assert encode_chat(tokenizer, template, messages) == [*tokenizer.encode("the river"), 2]


def test_missing_and_broken_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(Files(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        load_tokenizer(Files(tmp_path))
    with pytest.raises(ModelError, match="not in the vocabulary"):
        load_tokenizer(write(tmp_path, fresh(), eos_token="<nowhere>"))
    with pytest.raises(ModelError, match="named tool_use"):
        load_tokenizer(write(tmp_path, fresh(), chat_template=[{"name": "tool_use", "template": "x"}]))
    with pytest.raises(ModelError, match="chat_template"):
        load_tokenizer(write(tmp_path, fresh(), chat_template=5))
    files = write(tmp_path, fresh())
    files.config = {"eos_token_id": "two"}
    with pytest.raises(ModelError, match="eos_token_id"):
        load_tokenizer(files)
    for content in ("[]", "{", "[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"tokenizer_config.json"):
            load_tokenizer(Files(tmp_path))
