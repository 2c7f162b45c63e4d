"""Chat templates: turn messages into the prompt format, and the token ids, that a model was trained on.

A template runs in a process of its own, with limits on time and memory (`render_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from bankfull.errors import ModelError, RequestError
from bankfull.text.generic_tools import with_tools_as_text
from bankfull.text.render_process import SHORT, Source, long_calls, short_calls
from bankfull.text.tokenizer import Tokenizer

_LONGEST_SOURCE = 1 << 20
_DEEPEST = 64  # levels of lists and objects in one message or tool
_PROBE = "Can this be seen?"


class ChatTemplate:
    """A chat template, compiled at its first use. `tool_source` is the variant that some models have for requests with
    tools. `tokens` are the texts of the special tokens that the template may use, such as `bos_token`.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        given = {**(tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in given.items() if token is not None}
        longest = max(len(source), len(self.tool_source))
        if longest > _LONGEST_SOURCE:
            raise ModelError(f"the model's chat template has {longest} characters, above the {_LONGEST_SOURCE} allowed")
        self._plain = Source(source)
        self._with_tools = self._plain if tool_source is None else Source(tool_source)

    def same_as(self, other: ChatTemplate) -> bool:
        """Whether both render every conversation to the same text."""
        own, others = ((t.source, t.tool_source, t._tokens) for t in (self, other))
        return own == others

    @cached_property
    def variables(self) -> tuple[frozenset[str], frozenset[str]]:
        """The variables that the template reads without setting them, with and without tools. Raises ModelError if it
        is
        broken."""
        return short_calls.variables(self._plain), short_calls.variables(self._with_tools)

    @property
    def at_once(self) -> bool:
        """Whether a short conversation without tools would be rendered at once."""
        return short_calls.at_once(self._plain)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template supports tools. Otherwise they become part of the messages (`generic_tools`)."""
        return "tools" in self.variables[1]

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template supports a system message: some refuse it, and some ignore it."""
        asked = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]
        try:
            return _PROBE in self._render({"messages": asked, "tools": None, "documents": None}, True)
        except RequestError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt of a conversation as the template renders it."""
        given = self._checked(messages, tools, kwargs)
        return self._render(given, add_generation_prompt)

    def _checked(self, messages: object, tools: object, kwargs: Mapping[str, object]) -> dict[str, Any]:
        if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
            raise RequestError("messages must be a list of objects with a role and a content")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise RequestError(f"message {index} is a {type(message).__name__}, not an object with a role")
        return {
            "messages": plain(messages, "messages"),
            "tools": None if tools is None else plain(tools, "tools"),
            "documents": None,
            **{name: plain(value, name) for name, value in kwargs.items()},
        }

    def _render(self, given: Mapping[str, object], add_generation_prompt: bool) -> str:
        template = self._plain if given["tools"] is None else self._with_tools
        size = sum(map(len, _texts(given)))
        process = short_calls if size <= SHORT else long_calls
        values = {**self._tokens, **given, "add_generation_prompt": add_generation_prompt}
        return process.render(template, values, size)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, object]], **how: Any
) -> list[int]:
    """The prompt of a conversation as ids: `tokenizer.encode` of the rendered text."""
    return tokenizer.opened(tokenizer.encode_marked(*render_chat(tokenizer, template, messages, **how)))


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    *,
    tools: Sequence[Mapping[str, object]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: object,
) -> tuple[str, str | None]:
    """The prompt of a conversation as text, and the marker in it that keeps special tokens as text (`guard`), if any.

    If the template does not support tools, they become part of the messages first (`generic_tools`).

    The spelling of a special token in a message, a tool or another value stays text; only the template itself can
    produce special tokens. This also covers a value that begins or ends with part of a spelling. The one exception is a
    template that splits a value and joins the parts again.
    """
    given = template._checked(messages, tools, kwargs)
    if not template.takes_tools and (given["tools"] or any(map(_has_tools, given["messages"]))):
        told = with_tools_as_text(given["messages"], given["tools"], takes_system=template.takes_system)
        given |= {"messages": told, "tools": None}
    guard = tokenizer.guard
    texts = _texts(given)
    if not any(map(guard.touches, texts)):
        return template._render(given, add_generation_prompt), None
    marker = guard.marker_for(texts)
    marked = changed(given, lambda text, key: guard.mark(text, marker, edges=not key))
    assert isinstance(marked, dict)
    return template._render(marked, add_generation_prompt), marker


def _has_tools(message: Mapping[str, object]) -> bool:
    """Whether a message is a call of a tool, or its result."""
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def plain(value: object, name: str, depth: int = 0) -> object:
    """A copy of `value` in plain lists, dicts, strings and numbers: a template gets nothing else."""
    if depth > _DEEPEST:
        raise RequestError(f"{name} is nested more than {_DEEPEST} levels deep: flatten it")
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise RequestError(f"{name} has an object with a key that is not a string: use strings as keys")
        return {str(key): plain(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain(item, name, depth + 1) for item in value]
    raise RequestError(f"{name} contains a {type(value).__name__}: use only strings, numbers, lists and objects")


def changed(value: object, change: Callable[[str, bool], str]) -> object:
    """`value` with every string replaced by `change(text, is_key)`."""
    if isinstance(value, str):
        return change(value, False)
    if isinstance(value, dict):
        return {change(key, True): changed(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [changed(item, change) for item in value]
    return value


def _texts(value: object) -> list[str]:
    """Every string in `value`, including keys."""
    texts: list[str] = []

    def note(text: str, key: bool) -> str:
        texts.append(text)
        return text

    changed(value, note)
    return texts
