"""Tool calls and reasoning mean the same however the text is cut, and nothing that a model writes is lost."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bankfull.errors import RequestError
from bankfull.serve.api.events import Event, OutputParser, Reasoning, Text, ToolArguments, ToolStart
from bankfull.serve.parsers import parser_for
from tests.quick import examples
from tests.serve.transcripts import MALFORMED, TEMPLATES, TOOLS, WELL_FORMED, Meaning, Transcript, call, text
from tests.work import work_of

ALL = WELL_FORMED + MALFORMED
each_transcript = pytest.mark.parametrize("transcript", ALL, ids=lambda transcript: transcript.name)
each_template = pytest.mark.parametrize("template", sorted(TEMPLATES))


def make_parser(template: str, **changes: Any) -> OutputParser:
    numbers = itertools.count()
    wishes: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto", "reasoning": True}
    return parser_for(TEMPLATES[template], **(wishes | {"make_id": lambda: f"id{next(numbers)}"} | changes))


def events_of(parser: OutputParser, pieces: Iterable[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish()


def merged(events: list[Event]) -> Meaning:
    found: list[list[str]] = []
    for event in events:
        match event:
            case ToolStart(index, id, name):
                assert index == sum(entry[0] == "call" for entry in found)
                assert id == f"id{index}"
                found.append(["call", name, ""])
            case ToolArguments(index, piece):
                assert piece and found[-1][0] == "call" and index == sum(entry[0] == "call" for entry in found) - 1
                found[-1][2] += piece
            case Text(piece) | Reasoning(piece):
                assert piece
                kind = "text" if isinstance(event, Text) else "reasoning"
                if found and found[-1][0] == kind:
                    found[-1][1] += piece
                else:
                    found.append([kind, piece])
    return [tuple(entry) for entry in found]


def cut(words: str, places: Iterable[int]) -> list[str]:
    borders = [0, *sorted(place for place in places if place <= len(words)), len(words)]
    return [words[start:end] for start, end in itertools.pairwise(borders)]


@each_transcript
def test_a_transcript_means_what_it_says_whole_and_by_characters(transcript: Transcript) -> None:
    for pieces in ([transcript.text], list(transcript.text)):
        assert merged(events_of(make_parser(transcript.template), pieces)) == transcript.meaning
    for entry in transcript.meaning:
        if entry[0] == "call" and not transcript.malformed:
            assert isinstance(json.loads(entry[2]), dict)


@each_transcript
def test_every_cut_in_two_means_the_same(transcript: Transcript) -> None:
    for place in range(len(transcript.text) + 1):
        parser = make_parser(transcript.template)
        assert merged(events_of(parser, [transcript.text[:place], transcript.text[place:]])) == transcript.meaning


@examples(150)
@given(st.sampled_from(ALL), st.lists(st.integers(0, 300), max_size=12))
def test_any_cuts_mean_the_same(transcript: Transcript, places: list[int]) -> None:
    pieces = cut(transcript.text, places)
    assert merged(events_of(make_parser(transcript.template), pieces)) == transcript.meaning


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "now", "arguments": ',
    '{"name": "get_weather"',
    ', "parameters": ',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    ";",
    "(",
    ")",
    "=",
    "'",
    " ",
    "\n",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "now",
    "[ARGS]",
    "functools",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_tag|>",
    "get_weather(",
    "city=",
    "<code>",
    "</code>",
    "```json",
    "```tool_code",
    "```",
    "<function=now>",
    "<function=get_weather>",
    "<parameter=city>",
    "</parameter>",
    "</function>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "function<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<start_function_call>",
    "call:now{",
    "<escape>",
    "<end_function_call>",
    "<|tool_call>",
    '<|"|>',
    "<tool_call|>",
    "<|channel|>",
    "analysis",
    "commentary to=functions.now",
    "<|message|>",
    "<|start|>assistant",
    "<|end|>",
    "<|call|>",
    "[THINK]",
    "[/THINK]",
    '"city": ',
    "null",
    "print(",
    "<",
    "\\u00e9",
    "☂",
]
fragments = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.just("WORD"), st.text(max_size=3)), max_size=25)


@each_template
@examples(60)
@given(parts=fragments, places=st.lists(st.integers(0, 200), max_size=6))
@example(parts=['{"name": "now", "arguments": ', "{}", ', "parameters": ', "WORD"], places=[])
def test_no_text_raises_loses_words_or_depends_on_its_cuts(template: str, parts: list[str], places: list[int]) -> None:
    numbers = itertools.count()
    words = "".join(f"word{next(numbers)}q" if part == "WORD" else part for part in parts)
    whole = merged(events_of(make_parser(template), [words]))
    assert merged(events_of(make_parser(template), cut(words, places))) == whole
    assert merged(events_of(make_parser(template), words)) == whole
    told = "".join(piece for entry in whole for piece in entry)
    assert [word for word in re.findall(r"word\d+q", words) if word not in told] == []
    if not any(entry[0] in ("call", "reasoning") for entry in whole) and template != "harmony":
        assert told.removeprefix("text").strip() in (words.strip(), "")


@each_template
@pytest.mark.parametrize("closed", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(template: str, closed: dict[str, Any]) -> None:
    for transcript in ALL:
        found = merged(events_of(make_parser(template, **closed), [transcript.text]))
        assert not any(entry[0] == "call" for entry in found)
        found = merged(events_of(make_parser(template, reasoning=False, **closed), [transcript.text]))
        if template != "harmony":
            assert found == [text(transcript.text)]


def test_arguments_come_as_they_are_written() -> None:
    parser = make_parser("hermes")
    parser.push('<tool_call>{"name": "get_weather", "arguments": ')
    assert parser.push("{") == [ToolStart(0, "id0", "get_weather"), ToolArguments(0, "{")]
    for piece in ('"city"', ": ", '"Os', "lo", "\\u00", "e9 ", '"', "}"):
        assert parser.push(piece) == [ToolArguments(0, piece)]
    assert parser.push("}\n</tool_call>") == []


@each_template
def test_words_far_from_all_markers_never_wait(template: str) -> None:
    parser = make_parser(template)
    parser.push("Some words that are nothing else")
    shown = parser.push(", and more of them.")
    assert [event.text for event in shown if isinstance(event, Text | Reasoning)] == [", and more of them."]


def test_a_marker_that_does_not_come_is_text_as_soon_as_that_is_known() -> None:
    parser = make_parser("hermes")
    assert parser.push("a <tool_c") == [Text("a")]
    assert parser.push("ake>") == [Text(" <tool_cake>")]


def test_one_call_only_where_calls_are_not_parallel() -> None:
    one = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert merged(events_of(make_parser("hermes", parallel=False), [one + "\n" + one])) == [
        call("{}", "now"),
        text(one),
    ]
    both = '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'
    found = merged(events_of(make_parser("mistral", parallel=False), [both]))
    assert found == [call("{}", "now"), text(', {"name": "now", "arguments": {}}]')]
    fenced = both.replace("[TOOL_CALLS]", "```json\n") + "\n```"
    for pieces in ([fenced], fenced):
        found = merged(events_of(make_parser("hermes", parallel=False), pieces))
        assert found == [call("{}", "now"), text(', {"name": "now", "arguments": {}}]\n```')]


def test_json_in_a_fence_waits_only_until_it_is_no_call() -> None:
    parser = make_parser("hermes")
    parser.push('```json\n{"name": "Ada"')
    assert parser.push(', "age": 36}') == [Text(', "age": 36}')]
    waiting = make_parser("hermes")
    assert waiting.push('```json\n{"name": "now", "arguments": {"a": 1}}') == []
    assert merged(waiting.push("\n```")) == [call('{"a": 1}', "now")]


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "now"}}, {"type": "function", "name": "now"}]
)
def test_a_named_tool_is_the_only_one(choice: dict[str, Any]) -> None:
    now = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    other = now.replace("now", "get_weather")
    found = merged(events_of(make_parser("hermes", tool_choice=choice), [other + now]))
    assert found == [text(other), call("{}", "now")]


@pytest.mark.parametrize(
    "spelled",
    [{"type": "function", "name": "now", "parameters": {}}, {"name": "now", "input_schema": {"type": "object"}}],
)
def test_tools_are_known_in_the_spelling_of_every_api(spelled: dict[str, Any]) -> None:
    found = merged(events_of(make_parser("hermes", tools=[spelled]), ['<tool_call>{"name": "now"}</tool_call>']))
    assert found == [call("{}", "now")]


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        ({"tools": [{"type": "function"}]}, "tools has an entry without a name"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "the parameters of tool 'f' must be a JSON schema"),
        ({"tool_choice": {"function": {"name": "rm"}}}, "tool_choice names 'rm', which is not in tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice is an object that names no tool"),
        ({"tool_choice": "sometimes"}, "tool_choice is 'sometimes'"),
    ],
)
def test_unusable_wishes_are_refused_in_one_sentence(wish: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=re.escape(sentence)):
        make_parser("hermes", **wish)


def test_ids_are_random_and_of_the_form_that_the_template_takes() -> None:
    def ids(template: str, words: str) -> list[str]:
        events = events_of(make_parser(template, make_id=None), [words])
        return [event.id for event in events if isinstance(event, ToolStart)]

    two = '<tool_call>{"name": "now"}</tool_call>' * 2
    assert len(set(ids("hermes", two) + ids("hermes", two))) == 4
    assert all(re.fullmatch("call_[0-9a-f]{24}", id) for id in ids("hermes", two))
    assert all(re.fullmatch("[0-9a-zA-Z]{9}", id) for id in ids("mistral", "[TOOL_CALLS]now{}" * 2))


@pytest.mark.parametrize(
    ("template", "prompt", "opened"),
    [
        ("qwen3", None, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3-thinking", None, True),
        ("qwen3-thinking", "<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("deepseek", None, False),
        ("deepseek-r1", None, True),
        ("smollm3", None, False),
    ],
)
def test_whether_a_thought_is_open_is_read_off_the_prompt_or_else_the_template(
    template: str, prompt: str | None, opened: bool
) -> None:
    found = merged(events_of(make_parser(template, prompt=prompt), ["hm</think>yes"]))
    assert found == ([("reasoning", "hm"), text("yes")] if opened else [text("hm</think>yes")])


def test_code_for_an_offered_interpreter_is_its_argument() -> None:
    tools = [{"type": "function", "function": {"name": "code_interpreter"}}]
    words = '<|python_tag|>print("é")\nx = {1: 2}'
    for pieces in ([words], list(words)):
        found = merged(events_of(make_parser("llama", tools=tools), pieces))
        assert found == [call(json.dumps({"code": 'print("é")\nx = {1: 2}'}, ensure_ascii=False), "code_interpreter")]


@each_template
def test_a_forced_call_is_understood_without_a_marker(template: str) -> None:
    words = '[{"name": "get_weather", "arguments": {"city": "x"}}, {"name": "now", "arguments": {}}]'
    found = merged(events_of(make_parser(template, tool_choice="required", reasoning=False), words))
    if template == "harmony":
        return
    assert found == [call('{"city": "x"}'), call("{}", "now")]


HOSTILE = {
    "openings": "<tool_call>",
    "open objects": '<tool_call>{"name": ',
    "arguments first": '<tool_call>{"arguments": {"a": [',
    "open strings": '<tool_call>{"name": "',
    "quotes": '<tool_call>{",":"',
    "one long call": '[[{"',
    "spaces": " \n",
    "python": "<code>get_weather(city='\"",
    "python lists": "get_weather(city=[",
    "names": "a",
    "fences": "```tool_code\nget_weather(\"'",
    "xml": "<tool_call><function=get_weather><parameter=city>",
    "mistral": '[TOOL_CALLS][{"arguments":{"',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "gemma": "<|tool_call>call:now{a:[[",
    "escape": "<start_function_call>call:now{a:<escape>{",
    "harmony": "<|channel|>analysis<|start|>assistant",
    "harmony, channels": "<|channel|>",
    "harmony, spaces": "<|channel|>" + " " * 450 + "x<|message|>",
    "thoughts": "<think></thin",
    "half markers": "<tool_cal</think",
}


def check_hostile(template: str, size: int, prefixes: tuple[str, ...]) -> None:
    for prefix, (name, unit) in itertools.product(prefixes, HOSTILE.items()):

        def read(size: int, begin: str = prefix, unit: str = unit) -> object:
            return events_of(make_parser(template), [begin + unit * (size // len(unit))])

        check_proportion(read, size, f"{name}, {prefix}")


def check_proportion(read: Callable[[int], object], size: int, name: str) -> None:
    """Twice the text is twice the work; reading all of it again for each piece would be four times as much."""
    half, whole = work_of(lambda: read(size // 2)), work_of(lambda: read(size))
    assert whole < 2.5 * half + 1000, (name, half, whole)


@pytest.mark.few(8)
@each_template
def test_hostile_text_costs_work_in_proportion(template: str) -> None:
    check_hostile(template, 20_000, ("",))


@pytest.mark.full
@each_template
def test_a_megabyte_of_hostile_text_costs_work_in_proportion(template: str) -> None:
    """A quadratic reading of it would take hours."""
    check_hostile(template, 1_000_000, ("", '<tool_call>{"name": "now", "arguments": {"', "<think>"))


@pytest.mark.few(8)
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_text_by_characters_costs_work_in_proportion(name: str) -> None:
    unit = HOSTILE[name]
    for template in ("hermes", "smollm3", "llama", "harmony"):
        check_proportion(lambda n, t=template: events_of(make_parser(t), unit * (n // len(unit))), 4_000, template)


def test_parsing_loads_neither_torch_nor_a_grammar_library() -> None:
    program = (
        "import sys, bankfull.serve.parsers; print([m for m in ('torch', 'numpy', 'llguidance') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
