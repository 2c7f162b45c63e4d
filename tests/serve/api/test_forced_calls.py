"""A required or a named call: the grammar allows nothing else, and the parser understands what it allows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bankfull.errors import RequestError
from bankfull.sample.grammar import GrammarCompiler
from bankfull.sample.params import StructuredOutput
from bankfull.serve.api.events import ToolArguments, ToolStart
from bankfull.serve.parsers import grammar_for, parser_for
from tests.serve.transcripts import TEMPLATES, TOOLS

FORCED = sorted(set(TEMPLATES) - {"harmony"})
OSLO = '{"name": "get_weather", "%s": {"city": "Oslo", "days": 2}}'
NOW = '{"name": "now", "%s": {}}'


@dataclass
class Bytes:
    """A vocabulary of bytes and an end."""

    special_ids: tuple[int, ...] = (256,)
    eos_ids: tuple[int, ...] = (256,)
    vocab_size: int = 257

    @cached_property
    def letters(self) -> list[str]:
        return sorted(pre_tokenizers.ByteLevel.alphabet())

    @cached_property
    def backend(self) -> Tokenizer:
        words = {letter: index for index, letter in enumerate(self.letters)} | {"<end>": 256}
        backend = Tokenizer(models.BPE(vocab=words, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        return backend

    @cached_property
    def _bytes(self) -> list[bytes]:
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in plain]
        values = {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}
        return [bytes([values[letter]]) for letter in self.letters]

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Bytes())


def allows(compiler: GrammarCompiler, grammar: StructuredOutput | None, text: str) -> bool:
    """Whether `text` is one whole answer under the grammar."""
    assert grammar is not None
    tokens = [*Bytes().backend.encode(text).ids, 256]
    return compiler.compile(grammar).accepts(tokens) == len(tokens)


def written(template: str, *calls: str) -> str:
    if template == "llama":
        return "; ".join(call % "parameters" for call in calls)
    calls = tuple(call % "arguments" for call in calls)
    if template in ("hermes", "qwen3", "qwen3-thinking", "smollm2", "smollm3", "unknown"):
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return "[" + ", ".join(calls) + "]"


def calls_in(template: str, text: str, **wishes: Any) -> list[tuple[str, Any]]:
    parser = parser_for(
        TEMPLATES[template], **({"tools": TOOLS, "tool_choice": "required", "reasoning": False} | wishes)
    )
    found: list[tuple[str, str]] = []
    for event in [*(event for character in text for event in parser.push(character)), *parser.finish()]:
        if isinstance(event, ToolStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolArguments):
            found[-1] = (found[-1][0], found[-1][1] + event.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


@pytest.mark.parametrize("template", FORCED)
def test_a_required_call_can_be_written_and_nothing_else(template: str, compiler: GrammarCompiler) -> None:
    grammar = grammar_for(TEMPLATES[template], TOOLS, "required")
    one, two = written(template, OSLO), written(template, OSLO, NOW)
    assert allows(compiler, grammar, one)
    assert allows(compiler, grammar, two) is (template != "unknown"), "what has not learnt to stop calls once"
    assert calls_in(template, one) == [("get_weather", {"city": "Oslo", "days": 2})]
    assert calls_in(template, two) == [("get_weather", {"city": "Oslo", "days": 2}), ("now", {})]
    for wrong in ("", "Hello", one + " Hello", one[:-1], one.replace("get_weather", "rm"), one.replace("2", '"2"')):
        assert not allows(compiler, grammar, wrong)
    assert not allows(compiler, grammar, one.replace('"city": "Oslo", ', ""))


def test_a_named_call_is_of_that_tool(compiler: GrammarCompiler) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    grammar = grammar_for(TEMPLATES["hermes"], TOOLS, choice)
    assert allows(compiler, grammar, written("hermes", NOW))
    assert not allows(compiler, grammar, written("hermes", OSLO))
    assert not allows(compiler, grammar, written("hermes", NOW, NOW))


def test_one_call_where_calls_are_not_parallel(compiler: GrammarCompiler) -> None:
    grammar = grammar_for(TEMPLATES["mistral"], TOOLS, "required", parallel=False)
    assert allows(compiler, grammar, written("mistral", NOW))
    assert not allows(compiler, grammar, written("mistral", NOW, NOW))


def test_a_thought_that_the_prompt_has_opened_comes_first(compiler: GrammarCompiler) -> None:
    grammar = grammar_for(TEMPLATES["qwen3-thinking"], TOOLS, "required", reasoning=True)
    text = "hm, {\n<tool_call>?\n</think>\n\n" + written("qwen3-thinking", NOW)
    assert allows(compiler, grammar, text)
    assert not allows(compiler, grammar, written("qwen3-thinking", NOW))
    assert calls_in("qwen3-thinking", text, reasoning=True) == [("now", {})]


def test_references_and_odd_names_keep_their_meaning(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/small"}}, "$defs": {"small": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"name": name, "parameters": schema} for name in ('x"} y', "größer\\")]
    grammar = grammar_for(TEMPLATES["hermes"], tools, "required")
    for name in ('x"} y', "größer\\"):
        text = json.dumps({"name": name, "arguments": {"a": 2}}, ensure_ascii=False)
        assert allows(compiler, grammar, f"<tool_call>\n{text}\n</tool_call>")
        assert not allows(compiler, grammar, f"<tool_call>\n{text.replace('2', '3')}\n</tool_call>")
        assert calls_in("hermes", f"<tool_call>\n{text}\n</tool_call>", tools=tools) == [(name, {"a": 2})]


def test_arguments_that_a_schema_does_not_name_are_not_made_up(compiler: GrammarCompiler) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"properties": {"a": inner, "c": {"type": "array", "items": inner}}}
    for more, allowed in (
        ({}, False),
        ({"additionalProperties": True}, True),
        ({"patternProperties": {"x": {}}}, True),
    ):
        tools = [{"name": "f", "parameters": {**schema, **more}}]
        grammar = grammar_for(TEMPLATES["hermes"], tools, "required")
        for arguments, fits in (
            ('{"a": {"b": 1}, "c": [{"b": 1}]}', True),
            ('{"x": 1}', allowed),
            ('{"a": {"x": 1}}', False),
            ('{"c": [{"x": 1}]}', False),
        ):
            text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            assert allows(compiler, grammar, text) is fits, (more, arguments)
    free = grammar_for(TEMPLATES["hermes"], [{"name": "f", "parameters": {"type": "object"}}], "required")
    assert allows(compiler, free, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>')


def test_what_cannot_be_forced_says_so() -> None:
    assert grammar_for(TEMPLATES["harmony"], TOOLS, "required") is None


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_nothing_is_forced_unless_asked(choice: str | None) -> None:
    assert grammar_for(TEMPLATES["hermes"], TOOLS, choice) is None


def test_a_schema_that_is_too_deep_is_refused_in_one_sentence() -> None:
    schema: dict[str, Any] = {}
    for _ in range(30_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="the parameters of tool 'f' are not a JSON schema"):
        grammar_for(TEMPLATES["hermes"], [{"name": "f", "parameters": schema}], "required")
