"""Chats that offer tools: what their body says, the completion that a plain loop makes of them, and how a client reads
the answer. A case names the tools that it offers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from bankfull.serve.api.events import Text, ToolStart
from bankfull.serve.parsers import parser_for
from tests.trial import vocabulary
from tests.trial.case import Ask
from tests.trial.tools import TOOLS, calls, obeys

NOT_FORCED = ("auto", "none")
_WHOLE_CALL = re.compile(r'<tool_call>\n\{"name": "(\w+)", "arguments": (.*?)\}\n</tool_call>', re.DOTALL)


@dataclass
class Message:
    """An answer as a client has it."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """The name of each, and its arguments as JSON."""


def forced(ask: Ask) -> bool:
    return "tools" in ask.settings and ask.get("tools")["choice"] not in NOT_FORCED


def body(ask: Ask) -> dict[str, Any]:
    """The fields of a chat completion that stand for the prompt and the tools."""
    wants = ask.get("tools")
    tools = [{"type": "function", "function": {"name": n, "parameters": TOOLS[n]}} for n in wants["offered"]]
    choice = wants["choice"]
    if choice in wants["offered"]:
        choice = {"type": "function", "function": {"name": choice}}
    said: dict[str, Any] = {"messages": [{"role": "user", "content": wants["content"]}], "tools": tools}
    said |= {"tool_choice": choice, "parallel_tool_calls": wants["parallel"]}
    if "logprobs" in ask.settings:
        said |= {"logprobs": True, "top_logprobs": ask.get("logprobs")}
    return said


def meant(ask: Ask, vocab: int) -> Ask:
    """The completion that this chat is: the template's prompt, and the grammar of calls where one is forced."""
    if "tools" not in ask.settings:
        return ask
    wants, content = ask.get("tools"), vocabulary.text_of(ask.prompt, vocab)
    offered = () if wants["choice"] == "none" else wants["offered"]
    prompt = vocabulary.encode(vocabulary.chat(content, offered), vocab)
    set_by_server: list[str] = []
    settings = {**ask.settings, "tools": {**wants, "content": content, "set_by_server": set_by_server}}
    if offered:  # a parser may look for special tokens
        settings["skip_special_tokens"] = False
        set_by_server.append("skip_special_tokens")
    if forced(ask) and "structured" not in settings:  # with both it is refused
        set_by_server.append("structured")
        several = wants["choice"] == "required" and wants["parallel"]
        names = wants["offered"] if wants["choice"] == "required" else [wants["choice"]]
        settings["structured"] = {"grammar": calls(names, several)}
    return replace(ask, prompt=tuple(prompt), settings=settings)


def read(ask: Ask, text: str) -> Message:
    """The whole text read at once; pieces of it have to give the same."""
    wants, found = ask.get("tools"), Message()
    if wants["choice"] == "none":
        return Message(text)
    said = body(ask)
    parser = parser_for(
        vocabulary.TEMPLATE,
        tools=said["tools"],
        tool_choice=said["tool_choice"],
        reasoning=True,
        parallel=wants["parallel"],
        prompt="",
    )
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, Text):
            found.content += event.text
        elif isinstance(event, ToolStart):
            found.calls.append([event.name, ""])
        else:
            found.calls[event.index][1] += event.text  # type: ignore[union-attr]
    return found


def problem(ask: Ask, got: Message, text: str, complete: bool) -> str:
    """What is wrong with the answer to a text of the plain loop. `complete`: the text has ended by itself."""
    want = read(ask, text)
    if got != want:
        return f"{got} is not what {text!r} says: {want}"
    if not forced(ask):
        return ""
    written = [[name, arguments] for name, arguments in _WHOLE_CALL.findall(text)]
    if got.calls[: len(written)] != written:
        return f"the calls {got.calls} are not those of {text!r}"
    if complete and (got.content.strip() or len(written) != len(got.calls) or not written):
        return f"a forced call came with {got}"
    for name, arguments in written:
        try:
            fits = obeys(json.loads(arguments), TOOLS[name])
        except ValueError:
            fits = False
        if not fits:
            return f"the arguments {arguments!r} of {name} do not obey its schema"
    return ""


def begins(got: Message, want: Message) -> bool:
    """Whether one message may be the other's beginning."""
    pairs = list(zip(got.calls, want.calls, strict=False))
    return (
        want.content.startswith(got.content)
        and len(got.calls) <= len(want.calls)
        and all(a[0] == b[0] and b[1].startswith(a[1]) for a, b in pairs)
    )
