"""A call of Anthropic's /v1/messages: how it is spelled, and the conversation that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from bankfull.serve.api.anthropic.breakpoints import breakpoints_of, tools_with_sentinel, with_sentinel
from bankfull.serve.api.calls import (
    Caller,
    JsonSchema,
    ResponseFormat,
    params_over,
    refuse_parts,
    structured_output,
    submit_of,
    text_of,
)
from bankfull.serve.api.chat import Ask, CacheMark, NamedTool, ToolChoice
from bankfull.serve.api.errors import Refusal
from bankfull.serve.api.openai.chat_completions import MAX_MESSAGES, Function, Tool, template_tools
from bankfull.serve.api.switches import Switches
from bankfull.submit import Submit

#: Parameter names of the core -> of this API.
NAMES = {
    ", or set truncate_prompt_tokens": "",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
}


# -- the content of messages


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Pins the prompt up to the end of its block in the prefix cache (`breakpoints`)."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Encrypted: it is left out of the prompt."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


ContentBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class MessageInput(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


# -- the call


class MessageTool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ChoiceAuto(msgspec.Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class ChoiceAny(msgspec.Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    disable_parallel_tool_use: bool = False


class ChoiceTool(msgspec.Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    name: str
    disable_parallel_tool_use: bool = False


class ChoiceNone(msgspec.Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    pass


MessageToolChoice = ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone


class ThinkingEnabled(msgspec.Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    """The budget is checked, but not enforced: max_tokens bounds reasoning and answer together."""

    budget_tokens: int


class ThinkingAdaptive(msgspec.Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    pass


class ThinkingDisabled(msgspec.Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    pass


ThinkingOptions = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CallMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None
    """Ignored: for the caller's own records."""


class CountTokensCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The parameters that determine the prompt."""

    messages: list[MessageInput]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesCall(CountTokensCall, kw_only=True, forbid_unknown_fields=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: CallMetadata | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    min_p: float | None = None
    seed: int | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    explain: bool | None = None
    """The fields from min_p on, and chat_template_kwargs, are parameters of this server beyond Anthropic's."""


def ask_of(call: MessagesCall, caller: Caller, defaults: Mapping[str, Any], switches: Switches) -> Ask:
    if call.max_tokens < 1:
        raise Refusal(f"max_tokens is {call.max_tokens}: give at least 1.", param="max_tokens", code="invalid_value")
    budget = call.thinking.budget_tokens if isinstance(call.thinking, ThinkingEnabled) else None
    if budget is not None and not 1 <= budget < call.max_tokens:
        raise Refusal(
            f"thinking.budget_tokens is {budget}: give at least 1, and less than max_tokens.",
            param="thinking.budget_tokens",
            code="invalid_value",
        )
    given = {
        "max_tokens": call.max_tokens,
        "stop": call.stop_sequences,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k,
        "min_p": call.min_p,
        "seed": call.seed,
        "structured": _structured(call.output_config),
    }
    submit = submit_of(call, caller, params_over(defaults, given), explain=bool(call.explain))
    ask = prompt_of(call, submit, switches)
    for mark in breakpoints_of(call):
        beyond = conversation_of(with_sentinel(call, mark))
        ask.marks.append(CacheMark(beyond, tools_with_sentinel(ask.tools, mark), mark.seconds))
    return ask


def prompt_of(call: CountTokensCall, submit: Submit, switches: Switches) -> Ask:
    choice, parallel = _tool_choice(call.tool_choice)
    options = switches.thinking(isinstance(call.thinking, ThinkingEnabled | ThinkingAdaptive), "thinking")
    if call.output_config is not None and call.output_config.effort is not None:
        options |= switches.effort(call.output_config.effort, "output_config.effort")
    return Ask(
        messages=conversation_of(call),
        submit=submit,
        tools=_tools(call.tools),
        tool_choice=choice,
        parallel_tools=parallel,
        template_options={**options, **(call.chat_template_kwargs or {})},
    )


def _structured(options: OutputOptions | None) -> Any:
    if options is None or options.format is None:
        return None
    return structured_output(ResponseFormat("json_schema", JsonSchema("output", options.format.schema)), None)


def _tools(tools: list[MessageTool] | None) -> list[dict[str, Any]] | None:
    return template_tools([Tool(Function(t.name, t.description, t.input_schema, t.strict)) for t in tools or ()])


def _tool_choice(choice: MessageToolChoice | None) -> tuple[ToolChoice, bool]:
    """Which tools may be called, and whether several at once."""
    match choice:
        case ChoiceAny():
            return "required", not choice.disable_parallel_tool_use
        case ChoiceTool():
            return NamedTool(choice.name), not choice.disable_parallel_tool_use
        case ChoiceAuto():
            return "auto", not choice.disable_parallel_tool_use
        case ChoiceNone():
            return "none", True
    return "auto", True


# -- from blocks to messages as chat templates take them


def conversation_of(call: CountTokensCall) -> list[dict[str, Any]]:
    if not call.messages:
        raise Refusal("messages is empty: give at least one.", param="messages")
    if len(call.messages) > MAX_MESSAGES:
        raise Refusal(f"There are {len(call.messages)} messages: give at most {MAX_MESSAGES}.", param="messages")
    contents = [call.system, *(message.content for message in call.messages)]
    refuse_parts(sum(len(content) for content in contents if isinstance(content, list)), "messages")
    if call.messages[-1].role == "assistant":
        raise Refusal(
            "messages ends with the assistant's own words, which this server cannot continue: end with a user's "
            "message.",
            param="messages",
            code="unsupported_value",
        )
    conversation: list[dict[str, Any]] = []
    if call.system is not None:
        conversation.append({"role": "system", "content": text_of(call.system)})
    tools: dict[str, str] = {}
    for index, message in enumerate(call.messages):
        where = f"messages[{index}]"
        if isinstance(message.content, str):
            conversation.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            conversation.append(_assistant(message.content, where, tools))
        else:
            conversation += _spoken_to(message.role, message.content, where, tools)
    return conversation


def _assistant(blocks: list[ContentBlock], where: str, tools: dict[str, str]) -> dict[str, Any]:
    """One turn of the model; notes which tool each of its calls is for."""
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                tools[block.id] = block.name
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise _misplaced(where, number, "tool_result", "user")
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _spoken_to(role: str, blocks: list[ContentBlock], where: str, tools: dict[str, str]) -> list[dict[str, Any]]:
    """The messages for the template: results of calls are messages of their own."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock() if role == "user":
                if texts:
                    messages.append({"role": role, "content": "\n".join(texts)})
                    texts = []
                messages.append(_result(block, tools))
            case _:
                kind = str(type(block).__struct_config__.tag)
                raise _misplaced(where, number, kind, "user" if isinstance(block, ToolResultBlock) else "assistant")
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _result(block: ToolResultBlock, tools: dict[str, str]) -> dict[str, Any]:
    text = text_of(block.content or "")
    message = {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }
    if block.tool_use_id in tools:
        message["name"] = tools[block.tool_use_id]
    return message


def _misplaced(where: str, number: int, kind: str, role: str) -> Refusal:
    at = f"{where}.content[{number}]"
    return Refusal(f"{at} is a block of type {kind!r}: it belongs into a message of the {role}.", param=at)
