"""What models of each family write, composed by hand in their formats, and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Meaning = list[tuple[str, ...]]
"""("text", ...), ("reasoning", ...) or ("call", name, arguments)."""

#: Just enough of each family's template to be known by: the markers, and how the prompt for an answer ends.
TEMPLATES = {
    "hermes": "{{ '<tool_call>' }}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "qwen3": "{{ '<tool_call>' }}{{ content.split('</think>') }}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% if not thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    "qwen3-thinking": "{{ '<tool_call>' }}{{ content.split('</think>') }}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    "qwen-coder": "{{ '<tool_call>\\n<function=' + name + '>' }}{{ '<parameter=' }}",
    "smollm2": "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% endfor %}",
    "smollm3": "{{ xml_tools }}<tool_call></tool_call>{{ python_tools }}'<code>' '</code>'<think></think>"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + '<think>\\n\\n</think>\\n' }}{% endif %}",
    "llama": "{{ '<|start_header_id|>' }}{{ '<|python_tag|>' }}",
    "mistral": "{% if call.id|length != 9 %}{{ raise_exception('id') }}{% endif %}{{ '[TOOL_CALLS]' }}",
    "magistral": "{{ '[THINK]' }}{{ '[/THINK]' }}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
    "deepseek": "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    "deepseek-r1": "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}",
    "phi": "{{ '<|tool|>' + tools + '<|/tool|>' }}",
    "granite": "{{ '<|start_of_role|>' }}{{ '<|tool_call|>' }}Here is my thought process:",
    "gemma": "{{ '<start_of_turn>' + role }}",
    "functiongemma": "{{ '<start_of_turn>' }}{{ '<start_function_call>call:' }}{{ '<escape>' }}",
    "gemma4": "{{ '<|tool_call>call:' }}{{ '<|channel>thought\\n' }}",
    "harmony": "{{ '<|start|>assistant<|channel|>final<|message|>' }}",
    "unknown": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
}

_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "places": {"type": "array", "items": {"type": "string"}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "a forecast", "parameters": _WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Transcript:
    name: str
    template: str
    text: str
    meaning: Meaning
    malformed: bool = False
    """Its arguments need not be JSON."""


def call(arguments: str, name: str = "get_weather") -> tuple[str, ...]:
    return ("call", name, arguments)


def text(words: str) -> tuple[str, ...]:
    return ("text", words)


def thought(words: str) -> tuple[str, ...]:
    return ("reasoning", words)


_OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
_NOW = '{"name": "now", "arguments": {}}'
_LONG_CITY = '{\n    "city": "Oslo",\n    "unit": "celsius"\n  }'
_LONG_OSLO = f'{{\n  "name": "get_weather",\n  "arguments": {_LONG_CITY}\n}}'
_DEEPSEEK_OPEN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_DEEPSEEK_CLOSE = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

WELL_FORMED = [
    Transcript("plain", "hermes", ' Hello, {"a": 1}! \n', [text(' Hello, {"a": 1}! \n')]),
    Transcript("hermes", "hermes", f"<tool_call>\n{_OSLO}\n</tool_call>", [call('{"city": "Oslo"}')]),
    Transcript(
        "hermes, two calls and words around them",
        "hermes",
        f'I look.\n\n<tool_call>\n{_OSLO}\n</tool_call>\n<tool_call>{{"name":"now","arguments":{{}}}}</tool_call>\nSo.',
        [text("I look."), call('{"city": "Oslo"}'), call("{}", "now"), text("So.")],
    ),
    Transcript(
        "nested braces, markers and escapes in strings",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "</tool_call> }} \\"x\\" \\u00e9\\ud83d\\ude00 '
        '<tool_call>", "places": [[{"a": {}}], "]"]}}</tool_call>',
        [call('{"city": "</tool_call> }} \\"x\\" \\u00e9\\ud83d\\ude00 <tool_call>", "places": [[{"a": {}}], "]"]}')],
    ),
    Transcript(
        "arguments before the name, an id, a name with an escape",
        "hermes",
        '<tool_call>{"arguments": {"city": "Bonn"}, "id": "7", "name": "get\\u005fweather"}</tool_call>',
        [call('{"city": "Bonn"}')],
    ),
    Transcript(
        "an id behind the arguments",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}, "id": "x", "type": "function"}</tool_call>.',
        [call("{}", "now"), text(".")],
    ),
    Transcript(
        "arguments as a string, as null, and none",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Ulm\\"}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call><tool_call>{"name": "now"}</tool_call>',
        [call('{"city": "Ulm"}'), call("{}", "now"), call("{}", "now")],
    ),
    Transcript(
        "a line break inside of a string",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        [call('{"city": "a\\nb\\tc"}')],
    ),
    Transcript("a call in a fence", "hermes", f"```json\n{_LONG_OSLO}\n```", [call(_LONG_CITY)]),
    Transcript("a call in a fence that never closes", "hermes", f"```\n{_OSLO}", [call('{"city": "Oslo"}')]),
    Transcript("a call is the answer", "hermes", f" {_OSLO}\n", [call('{"city": "Oslo"}')]),
    Transcript(
        "calls are the answer, one in each line",
        "smollm2",
        f'{_OSLO}\n{{"name": "now", "parameters": {{}}, "id": 3}}',
        [call('{"city": "Oslo"}'), call("{}", "now")],
    ),
    Transcript(
        "words, then fences with a call each",
        "hermes",
        f'I look:\n\n```json\n{_OSLO}\n```\nand\n```\n{{"arguments": {{}}, "name": "now"}}```\nSo.',
        [text("I look:"), call('{"city": "Oslo"}'), text("and"), call("{}", "now"), text("So.")],
    ),
    Transcript(
        "a list of calls in a fence, then several in one, with and without tags",
        "hermes",
        f"```json\n[{_OSLO},\n {_NOW}]\n```\n```json\n{_OSLO}\n{_NOW}\n```\n"
        f"```xml\n<tool_call>\n{_NOW}\n</tool_call>\n```",
        [call('{"city": "Oslo"}'), call("{}", "now")] * 2 + [call("{}", "now")],
    ),
    Transcript(
        "a call in a fence for a template without tools",
        "unknown",
        f"Sure.\n```json\n{_OSLO}\n```",
        [text("Sure."), call('{"city": "Oslo"}')],
    ),
    Transcript(
        "a fence of code, then a call in one",
        "hermes",
        f"```python\nprint('```')\n```\n```json\n{_OSLO}\n```",
        [text("```python\nprint('```')\n```"), call('{"city": "Oslo"}')],
    ),
    Transcript(
        "qwen3 thinks",
        "qwen3",
        f"<think>\nOslo <tool_call>?\n</think>\n\nWell:\n<tool_call>\n{_OSLO}\n</tool_call>",
        [thought("Oslo <tool_call>?"), text("Well:"), call('{"city": "Oslo"}')],
    ),
    Transcript("qwen3 does not think", "qwen3", "It is <think> late.", [text("It is <think> late.")]),
    Transcript(
        "the template has opened the thought",
        "qwen3-thinking",
        "so, so\n</think>\n\nYes.",
        [thought("so, so"), text("Yes.")],
    ),
    Transcript("opened twice", "qwen3-thinking", "<think>\nhm</think>Yes.", [thought("hm"), text("Yes.")]),
    Transcript("a thought without an end", "qwen3-thinking", "on and </thin", [thought("on and </thin")]),
    Transcript(
        "qwen coder",
        "qwen-coder",
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "Paulo"\nBR </function>\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=places>\n["a", "b"]\n'
        "</parameter>\n<parameter=note>\nnull\n</parameter>\n<parameter=other>5</parameter>\n</function>\n</tool_call>\nDone",
        [
            call(
                '{"city": "São \\"Paulo\\"\\nBR </function>", "days": 3, "exact": true, "places": ["a", "b"], '
                '"note": null, "other": "5"}'
            ),
            text("Done"),
        ],
    ),
    Transcript(
        "qwen coder, values of another type than the schema's",
        "qwen-coder",
        "<function=get_weather>\n<parameter=days>\nmany\n</parameter>\n<parameter=note>\n7\n</parameter>\n</function>",
        [call('{"days": "many", "note": "7"}')],
    ),
    Transcript(
        "smollm2 writes a list",
        "smollm2",
        f'<tool_call>[{_OSLO}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        [call('{"city": "Oslo"}'), call("{}", "now")],
    ),
    Transcript(
        "smollm3, xml",
        "smollm3",
        f"<think>\nx\n</think>\n<tool_call>\n{_OSLO}\n</tool_call>",
        [thought("x"), call('{"city": "Oslo"}')],
    ),
    Transcript(
        "smollm3, python",
        "smollm3",
        "Code:\n<code>\nget_weather(city='Os\\'lo )', days=-2, exact=True, places=[\"a\", 'b'], note=None)\n"
        "print(now())\n</code>",
        [
            text("Code:"),
            call('{"city":"Os\'lo )","days":-2,"exact":true,"places":["a","b"],"note":null}'),
            call("{}", "now"),
        ],
    ),
    Transcript(
        "llama",
        "llama",
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        [call('{"city": "Oslo"}')],
    ),
    Transcript(
        "llama, two in a row",
        "llama",
        '{"type": "function", "name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "B"}}',
        [call("{}", "now"), call('{"city": "B"}')],
    ),
    Transcript(
        "llama, python tag",
        "llama",
        'Right.<|python_tag|>{"name": "now", "parameters": {}}',
        [text("Right."), call("{}", "now")],
    ),
    Transcript("llama, built-in tool", "llama", '<|python_tag|>get_weather.call(city="Ulm")', [call('{"city":"Ulm"}')]),
    Transcript(
        "llama, python list", "llama", "[get_weather(city='A'), now()]", [call('{"city":"A"}'), call("{}", "now")]
    ),
    Transcript("llama answers in JSON", "llama", '{"name": "Ada", "age": 36}', [text('{"name": "Ada", "age": 36}')]),
    Transcript(
        "mistral, a list",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Lyon"}, "id": "abc123def"}, '
        '{"name": "now", "arguments": {}}]',
        [call('{"city": "Lyon"}'), call("{}", "now")],
    ),
    Transcript(
        "mistral, names",
        "mistral",
        'Bon.[TOOL_CALLS]get_weather{"city": "[TOOL_CALLS]"}[TOOL_CALLS]now{}',
        [text("Bon."), call('{"city": "[TOOL_CALLS]"}'), call("{}", "now")],
    ),
    Transcript(
        "magistral",
        "magistral",
        '[THINK]Voyons.[/THINK]Oui.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Lyon"}'
        "[TOOL_CALLS]now[ARGS]{}",
        [thought("Voyons."), text("Oui."), call('{"city": "Lyon"}'), call("{}", "now")],
    ),
    Transcript(
        "deepseek, fenced",
        "deepseek-r1",
        f'Let us see\n</think>\n\n{_DEEPSEEK_OPEN}function<｜tool▁sep｜>get_weather\n```json\n{{"city": "X"}}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```" + _DEEPSEEK_CLOSE,
        [thought("Let us see"), call('{"city": "X"}'), call("{}", "now")],
    ),
    Transcript(
        "deepseek, plain",
        "deepseek",
        f'ok {_DEEPSEEK_OPEN}get_weather<｜tool▁sep｜>{{"city": "X"}}{_DEEPSEEK_CLOSE}',
        [text("ok"), call('{"city": "X"}')],
    ),
    Transcript(
        "phi, tags",
        "phi",
        f"<|tool_call|>[{_OSLO}]<|/tool_call|>",
        [call('{"city": "Oslo"}')],
    ),
    Transcript(
        "phi, functools",
        "phi",
        'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}] ok',
        [call('{"city": "Oslo"}'), text("ok")],
    ),
    Transcript("granite 3", "granite", f"<|tool_call|>[{_OSLO}]", [call('{"city": "Oslo"}')]),
    Transcript(
        "granite thinks",
        "granite",
        "Here is my thought process:\nhm\n\nHere is my response:\nYes",
        [thought("hm"), text("Yes")],
    ),
    Transcript(
        "gemma, python in a fence",
        "gemma",
        'Sure.\n```tool_code\nprint(get_weather(city="Rome"))\n```\n',
        [text("Sure."), call('{"city":"Rome"}')],
    ),
    Transcript(
        "gemma, json in a fence",
        "gemma",
        '```json\n{"name": "now", "parameters": {}}\n```',
        [call("{}", "now")],
    ),
    Transcript("gemma, python alone", "gemma", "[get_weather(city='Rome')]", [call('{"city":"Rome"}')]),
    Transcript(
        "gemma writes code",
        "gemma",
        '```json\n{"a": 1}\n```\nfor (i) ```python\nx()```',
        [text('```json\n{"a": 1}\n```\nfor (i) ```python\nx()```')],
    ),
    Transcript(
        "functiongemma",
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>a "b", {c}<escape>,days:3,places:[<escape>x<escape>,y],'
        "exact:true}<end_function_call>",
        [call('{"city": "a \\"b\\", {c}", "days": 3, "places": ["x", "y"], "exact": true}')],
    ),
    Transcript(
        "gemma 4",
        "gemma4",
        '<|channel>thought\nhm\n<channel|><|tool_call>call:get_weather{city:<|"|>Rome<|"|>,note:{<|"|>k<|"|>:null}}<tool_call|>',
        [thought("hm"), call('{"city": "Rome", "note": {"k": null}}')],
    ),
    Transcript(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [thought("hm <b>"), call('{"city": "Oslo"}')],
    ),
    Transcript(
        "harmony, the recipient first, then the answer",
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>",
        [text("I look."), call("{}", "now"), text("Done.")],
    ),
    Transcript(
        "a template that nobody knows",
        "unknown",
        f"I look. <tool_call>{_OSLO}</tool_call>",
        [text("I look."), call('{"city": "Oslo"}')],
    ),
    Transcript("a template that nobody knows, without tags", "unknown", _OSLO, [call('{"city": "Oslo"}')]),
    Transcript("a template that nobody knows, other words", "unknown", f"So: {_OSLO}", [text(f"So: {_OSLO}")]),
]


def _stays_text(name: str, template: str, words: str) -> Transcript:
    return Transcript(name, template, words, [text(words)], malformed=True)


MALFORMED = [
    _stays_text("an unknown tool", "hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call> x'),
    _stays_text("no name", "hermes", '<tool_call>{"arguments": {"city": "x"}}</tool_call>'),
    _stays_text("not JSON", "hermes", "<tool_call>get_weather(Oslo)</tool_call>"),
    _stays_text("cut in the name", "hermes", '<tool_call>{"name": "get_wea'),
    _stays_text("arguments that are no object", "hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    _stays_text("a string that is no object", "hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
    _stays_text("only tags", "hermes", "<tool_call></tool_call><tool_call>"),
    _stays_text("a marker's beginning at the end", "hermes", "a </tool_cal"),
    _stays_text("mistral, an unknown tool", "mistral", '[TOOL_CALLS]rm{"a": 1}'),
    _stays_text("deepseek, an unknown tool", "deepseek", f"{_DEEPSEEK_OPEN}rm<｜tool▁sep｜>{{}}{_DEEPSEEK_CLOSE}"),
    _stays_text("qwen coder, an unknown tool", "qwen-coder", "<tool_call>\n<function=rm>\n</function>\n</tool_call>"),
    _stays_text("python that computes", "smollm3", "<code>get_weather(city=name + 'x')</code>"),
    _stays_text("python with a place", "smollm3", "<code>get_weather('x')</code>"),
    _stays_text("python without an end", "gemma", "```tool_code\nget_weather(city='x'"),
    _stays_text("gemma 4, an unknown tool", "gemma4", "<|tool_call>call:rm{}<tool_call|>"),
    _stays_text("harmony without messages", "harmony", "a <|channel|>b <|end|> c"),
    _stays_text("harmony, an unknown tool", "harmony", "<|channel|>commentary to=functions.rm<|message|>{}"),
    _stays_text("other JSON in a fence", "hermes", 'So:\n```json\n{"name": "Ada", "arguments": {"a": 1}}\n```\n'),
    _stays_text("a call and more keys in a fence", "hermes", f'```json\n{_OSLO[:-1]}, "why": 1}}\n```'),
    _stays_text("a call and words in a fence", "hermes", f"```json\n{_OSLO}\nand so on\n```"),
    _stays_text("a list of a call and a number", "hermes", f"```json\n[{_OSLO}, 1]\n```"),
    _stays_text("a call without arguments in a fence", "hermes", '```json\n{"name": "now"}\n```'),
    _stays_text("arguments in a fence as a string", "hermes", '```json\n{"name": "now", "arguments": "{}"}\n```'),
    _stays_text("arguments in a fence that are no JSON", "hermes", '```\n{"name": "now", "arguments": {a}}\n```'),
    _stays_text("a call in a fence of code", "hermes", f"```python\n{_OSLO}\n```\n"),
    _stays_text("a call behind a fence", "hermes", f"```\nx = 1\n```\n{_OSLO}\n```"),
    _stays_text("a call in a fence, cut off", "hermes", f"```json\n{_OSLO[:-4]}"),
    _stays_text("an answer that only begins with a call", "hermes", f"{_OSLO} is a call"),
    _stays_text("an answer of an unknown tool", "smollm2", '{"name": "hello", "arguments": {"message": "Hello"}}'),
    Transcript(
        "one brace too many",
        "hermes",
        f"<tool_call>{_OSLO}}}</tool_call> y",
        [call('{"city": "Oslo"}'), text("} y")],
        True,
    ),
    Transcript(
        "one brace too few",
        "hermes",
        f"<tool_call>{_OSLO[:-1]}</tool_call> y",
        [call('{"city": "Oslo"}'), text("y")],
        True,
    ),
    Transcript(
        "two braces too few",
        "hermes",
        f"<tool_call>{_OSLO[:-2]}</tool_call> y",
        [call('{"city": "Oslo"'), text("y")],
        True,
    ),
    Transcript(
        "broken arguments",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "A" <b> days 3}}</tool_call> y',
        [call('{"city": "A" <b> days 3}'), text("y")],
        True,
    ),
    Transcript(
        "an unknown tool after a known one",
        "smollm2",
        f'<tool_call>[{_OSLO}, {{"name": "rm"}}]</tool_call>',
        [call('{"city": "Oslo"}'), text(', {"name": "rm"}]')],
        True,
    ),
    Transcript(
        "cut in the arguments",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Os\\',
        [call('{"city": "Os\\')],
        True,
    ),
    Transcript(
        "a key that calls do not have",
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}, "note": "hear"}</tool_call>',
        [call("{}", "now"), text(', "note": "hear"}')],
        True,
    ),
    Transcript(
        "qwen coder, cut",
        "qwen-coder",
        "<tool_call><function=get_weather><parameter=city>Os",
        [call('{"city": "Os')],
        True,
    ),
    Transcript(
        "qwen coder, words between",
        "qwen-coder",
        "<tool_call><function=now>so what</function></tool_call>",
        [call("{}", "now"), text("so what</function>")],
        True,
    ),
    Transcript(
        "gemma 4, broken",
        "gemma4",
        "<|tool_call>call:get_weather{city}<tool_call|>",
        [call('{"city"'), text("}")],
        True,
    ),
    Transcript(
        "deepseek, cut by its own end",
        "deepseek",
        f'{_DEEPSEEK_OPEN}now<｜tool▁sep｜>{{"a": [1{_DEEPSEEK_CLOSE}.',
        [call('{"a": [1', "now"), text(".")],
        True,
    ),
]
