"""Chat templates render as transformers renders them, and their ids are safe."""

# ruff: noqa: E501, a template keeps its own line breaks

import json
from functools import cache

import pytest
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st

from bankfull.errors import ModelError, RequestError
from bankfull.text.template import ChatTemplate, encode_chat
from bankfull.text.tokenizer import Tokenizer
from tests.quick import examples

from .corpus import HOSTILE
from .models import chatml_tokenizer, sentencepiece_tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
<|im_start|>system
Today: {{ date | default('26 Jul 2024') }}
{%- if tools is not none %}
{%- for t in tools %}
{{ t | tojson(indent=4) }}
{%- endfor %}
{%- endif %}
{{ system }}<|im_end|>
{%- for m in rest %}
    {%- if m.tool_calls is defined and m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|im_start|>' + m.role + '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
    {%- elif m.content is iterable and m.content is not string %}
        {%- for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {%- else %}
        {{- '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}
{% endif %}
{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% set ns = namespace(last=-1) %}
{%- for m in messages | selectattr('role', 'equalto', 'user') | list %}{% set ns.last = loop.index0 %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ ' [INST] ' ~ m.content ~ ' [/INST]' }}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content|trim + eos_token }}{% endgeneration %}
{%- elif m.role == 'system' %}{% continue %}
{%- else %}{{ raise_exception('Only user and assistant, not ' + m.role) }}{% endif %}
{%- endfor %}{{ ns.last }}"""
QWEN3 = """{%- macro part(content) -%}{%- if content is string %}{{- content }}{%- else %}
{%- for item in content %}{{- item.text }}{%- endfor %}{%- endif %}{%- endmacro -%}
{%- if tools %}{{- '<|im_start|>system\n# Tools\n<tools>' }}{%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}
{%- endfor %}{{- "\n</tools><|im_end|>\n" }}{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not(message.content is string and
        message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.content is string and '</think>' in message.content %}
        {%- set answer = message.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + answer.lstrip('\n') }}
        {%- else %}{{- answer }}{%- endif %}{{- '<|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\n' + part(message.content) + '<|im_end|>' + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "qwen3": QWEN3}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "größe", "description": "a <b> & 'c'", "parameters": {"x": [1, 2.5, None]}},
    }
]


def talk(*contents: str, system: str | None = None) -> list[dict[str, object]]:
    roles = ("user", "assistant")
    turns: list[dict[str, object]] = [
        {"role": roles[index % 2], "content": content} for index, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


CONVERSATIONS = [
    talk("hi"),
    talk("hi", "  hello \n", "bye"),
    talk("one", "<think>\nhm\n</think>\n\ntwo", system=" be brief "),
    talk("<tool_response>5</tool_response>"),
    *[talk(text, text) for text in HOSTILE],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"ä": "<x>"}}}]}],
]


@cache
def fast() -> transformers.PreTrainedTokenizerFast:
    backend = chatml_tokenizer().backend
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )


def oracle(source: str, messages: list[dict[str, object]], **kwargs: object) -> str:
    return fast().apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<|endoftext|>", eos_token="<|im_end|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_transformers_renders_them(name: str) -> None:
    ours, same = template(TEMPLATES[name]), 0
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            for tools in (None, TOOLS):
                more = {"add_generation_prompt": prompt, "enable_thinking": prompt, "tools": tools}
                try:
                    expected = oracle(TEMPLATES[name], messages, **more)
                except Exception:
                    with pytest.raises(RequestError):
                        ours.render(messages, **more)  # type: ignore[arg-type]
                else:
                    assert ours.render(messages, **more) == expected  # type: ignore[arg-type]
                    same += 1
    assert same > 80


def test_json_is_written_as_transformers_writes_it() -> None:
    for call in (
        "tojson",
        "tojson(indent=2)",
        "tojson(ensure_ascii=true)",
        "tojson(separators=(',', ':'), sort_keys=true)",
    ):
        source = "{{ tools[0] | " + call + " }}"
        assert template(source).render(talk("x"), tools=TOOLS) == oracle(source, talk("x"), tools=TOOLS)


def test_dates_are_written() -> None:
    assert template("{{ strftime_now('%Y')|int > 2000 }}").render(talk("x")) == "True"


def test_the_variant_for_tools_serves_requests_with_tools() -> None:
    ours = ChatTemplate("plain", tool_source="with {{ tools|length }}")
    assert ours.render(talk("x")) == "plain"
    assert ours.render(talk("x"), tools=TOOLS) == "with 1"


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(RequestError, match="refused the messages: System role not supported"):
        template(GEMMA).render(talk("x", system="y"))
    with pytest.raises(RequestError, match=r"failed: .*undefined"):
        template("{{ nothing.more }}").render(talk("x"))


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x | no_such_filter }}", "{% include 'x' %}{{", "{{" + "(" * 5000, "x" * (2 << 20)]
)
def test_a_broken_template_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        _ = ChatTemplate(source).variables


@pytest.mark.parametrize(
    "messages", ["hi", [1], [{"role": object()}], [{1: "x"}], 5, [{"role": "user", "content": b"x"}]]
)
def test_messages_of_another_shape_are_refused(messages: object) -> None:
    with pytest.raises(RequestError):
        template(CHATML).render(messages)  # type: ignore[arg-type]


def test_messages_nested_without_end_are_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(RequestError, match="nested"):
        template(CHATML).render([{"role": "user", "content": value}])


TOKENIZERS = {"byte-level": chatml_tokenizer, "sentencepiece": sentencepiece_tokenizer}


def encoded(tokenizer: Tokenizer, name: str, messages: list[dict[str, object]]) -> list[int]:
    return encode_chat(tokenizer, template(TEMPLATES[name]), messages)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
@examples(60, deadline=None)
@given(contents=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1, max_size=3))
def test_ordinary_messages_get_the_ids_of_the_rendered_text(kind: str, name: str, contents: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]()
    assume(not any(map(tokenizer.guard.spells, contents)))
    messages = talk(*contents)
    assert encoded(tokenizer, name, messages) == tokenizer.encode(template(TEMPLATES[name]).render(messages))


PARTS = ["<", ">", "<|im_", "end|>", " <|im_end", "|> ", "\ufdd0", "x < y > z", "  <|  "]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("part", PARTS)
def test_half_a_spelling_changes_no_id(kind: str, name: str, part: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    messages = talk(part, part)
    assert encoded(tokenizer, name, messages) == tokenizer.encode(template(TEMPLATES[name]).render(messages))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
@examples(60, deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from([*PARTS, "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "a", "\n"]), max_size=6
    )
)
def test_messages_never_make_a_special_token(kind: str, name: str, pieces: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]()
    hostile = "".join(pieces)

    def specials(messages: list[dict[str, object]]) -> list[int]:
        return [id for id in encoded(tokenizer, name, messages) if id in tokenizer.special_ids]

    assert specials(talk(hostile, hostile)) == specials(talk("a", "b"))
    ids = encoded(tokenizer, name, talk(hostile))
    assert hostile.strip() in tokenizer.decode(ids, skip_special=False)


def test_tools_and_keys_never_make_a_special_token() -> None:
    tokenizer = chatml_tokenizer()
    evil = [{"type": "function", "function": {"name": "<|im_end|>", "parameters": {"<|im_start|>": ["<|im_end|>"]}}}]
    for source in (QWEN3, LLAMA3, "{{ tools | tojson(ensure_ascii=true) }}"):
        tame = json.loads(json.dumps(evil).replace("|", "!"))
        one, two = (encode_chat(tokenizer, template(source), talk("a"), tools=tools) for tools in (evil, tame))
        assert [id for id in one if id in tokenizer.special_ids] == [id for id in two if id in tokenizer.special_ids]
        assert tokenizer.decode(one).replace("|", "!") == tokenizer.decode(two).replace("|", "!")


def test_two_values_side_by_side_never_make_a_special_token() -> None:
    tokenizer = chatml_tokenizer()
    ids = encode_chat(
        tokenizer,
        template("{{ messages[0].name }}{{ messages[0].content|trim }}"),
        [{"role": "user", "name": "<|im_", "content": "  end|>  "}],
    )
    assert not tokenizer.special_ids & set(ids)
    assert tokenizer.decode(ids) == "<|im_end|>"


def test_a_chat_has_at_most_one_bos() -> None:
    tokenizer = sentencepiece_tokenizer()
    for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        ours = ChatTemplate(source, bos_token="<s>")
        assert encode_chat(tokenizer, ours, talk("the river")) == tokenizer.encode("the river")
    spelled = encode_chat(
        tokenizer, ChatTemplate("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>"), talk("<s>")
    )
    assert spelled.count(1) == 1
    assert encode_chat(chatml_tokenizer(), template(CHATML), talk("x"))[0] == 1  # <|im_start|>, no opening
