"""A call of OpenAI's /v1/responses: how it is spelled, and the conversation that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from bankfull.sample.params import SamplingParams
from bankfull.serve.api.calls import (
    Caller,
    JsonSchema,
    ResponseFormat,
    explained,
    params_over,
    refuse_parts,
    structured_output,
    submit_of,
    text_of,
)
from bankfull.serve.api.chat import Ask, NamedTool, ToolChoice
from bankfull.serve.api.errors import Refusal
from bankfull.serve.api.openai.chat_completions import MAX_MESSAGES, Function, Tool, template_tools
from bankfull.serve.api.switches import Effort, Switches

#: Parameter names of the core -> of this API.
NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "truncate_prompt_tokens": "truncation",
    "response_format": "text.format",
}
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

Status = Literal["in_progress", "completed", "incomplete"]


# -- the input


class InputText(msgspec.Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    text: str


class SpokenText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """An earlier answer of the model."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = None


class ResponseMessage(msgspec.Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | SpokenText]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class FunctionCallInput(msgspec.Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True):
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: None = None


class FunctionOutputInput(msgspec.Struct, tag_field="type", tag="function_call_output", forbid_unknown_fields=True):
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text", forbid_unknown_fields=True):
    text: str


class ThoughtText(msgspec.Struct, tag_field="type", tag="reasoning_text", forbid_unknown_fields=True):
    text: str


class ReasoningInput(msgspec.Struct, tag_field="type", tag="reasoning", forbid_unknown_fields=True):
    id: str | None = None
    summary: list[SummaryText] = []
    content: list[ThoughtText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


class ReferenceInput(msgspec.Struct, tag_field="type", tag="item_reference"):
    id: str


InputItem = ResponseMessage | FunctionCallInput | FunctionOutputInput | ReasoningInput | ReferenceInput


# -- the call


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    """These three are ignored: for the caller's own records."""
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    explain: bool | None = None
    """The fields from top_k on are parameters of this server beyond OpenAI's, as in chat completions."""


def ask_of(call: ResponsesCall, caller: Caller, defaults: Mapping[str, Any], switches: Switches) -> Ask:
    _refuse(call)
    options = dict(call.chat_template_kwargs or {})
    if call.reasoning is not None and call.reasoning.effort is not None:
        options |= switches.effort(call.reasoning.effort, "reasoning.effort")
    return Ask(
        messages=conversation_of(call),
        submit=submit_of(call, caller, _params(call, defaults), explain=bool(call.explain)),
        tools=_tools(call.tools),
        tool_choice=_tool_choice(call.tool_choice),
        parallel_tools=call.parallel_tool_calls is not False,
        template_options=options,
        truncate=-1 if call.truncation == "auto" else None,
    )


def _refuse(call: ResponsesCall) -> None:
    if call.store:
        raise Refusal("store is true, but this server keeps no responses: leave it out.", param="store")
    if call.previous_response_id is not None:
        raise Refusal(
            "previous_response_id needs responses that were stored, and this server keeps none: send the whole "
            "conversation as input.",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    if call.stream_options is not None and not call.stream:
        raise Refusal("stream_options is for streams only: set stream, or leave it out.", param="stream_options")
    if call.max_output_tokens is not None and call.max_output_tokens < 1:
        raise Refusal(
            f"max_output_tokens is {call.max_output_tokens}: give at least 1.",
            param="max_output_tokens",
            code="invalid_value",
        )
    metadata = call.metadata or {}
    if (
        len(metadata) > MAX_METADATA
        or any(len(key) > MAX_METADATA_KEY for key in metadata)
        or any(len(value) > MAX_METADATA_VALUE for value in metadata.values())
    ):
        raise Refusal(
            f"metadata is too large: give at most {MAX_METADATA} pairs, with keys of up to {MAX_METADATA_KEY} "
            f"characters and values of up to {MAX_METADATA_VALUE}.",
            param="metadata",
            code="invalid_value",
        )


def wants_logprobs(call: ResponsesCall) -> bool:
    return bool(call.include) or bool(call.top_logprobs)


def _params(call: ResponsesCall, defaults: Mapping[str, Any]) -> SamplingParams:
    given = {
        "max_tokens": call.max_output_tokens,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "top_k": call.top_k,
        "min_p": call.min_p,
        "seed": call.seed,
        "stop": call.stop,
        "ignore_eos": call.ignore_eos,
        "structured": structured_output(_response_format(call.text), None),
    }
    if call.top_logprobs is not None and not 0 <= call.top_logprobs <= 20:
        raise Refusal(
            f"top_logprobs is {call.top_logprobs}: give an integer from 0 to 20.",
            param="top_logprobs",
            code="invalid_value",
        )
    if wants_logprobs(call):
        given["logprobs"] = call.top_logprobs or 0
    return params_over(defaults, given)


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    form = text.format
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.schema is None or form.name is None:
        raise Refusal("text.format of type json_schema needs a name and a schema.", param="text.format")
    return ResponseFormat(form.type, JsonSchema(form.name, form.schema))


def _tools(tools: list[FunctionTool] | None) -> list[dict[str, Any]] | None:
    chat_tools = [Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)) for tool in tools or ()]
    return template_tools(chat_tools)


def _tool_choice(choice: Literal["auto", "none", "required"] | ChosenFunction | None) -> ToolChoice:
    return NamedTool(choice.name) if isinstance(choice, ChosenFunction) else choice or "auto"


# -- from items to messages as chat templates take them


def conversation_of(call: ResponsesCall) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if call.instructions is not None:
        messages.append({"role": "system", "content": call.instructions})
    if isinstance(call.input, str):
        return [*messages, {"role": "user", "content": call.input}]
    if not call.input:
        raise Refusal("input is empty: give a text or at least one item.", param="input")
    if len(call.input) > MAX_MESSAGES:
        raise Refusal(f"There are {len(call.input)} items: give at most {MAX_MESSAGES}.", param="input")
    contents = [item.get("content", item.get("output")) for item in call.input]
    refuse_parts(sum(len(content) for content in contents if isinstance(content, list)), "input")
    folder = _Folder(messages)
    for index, item in enumerate(_items(call.input)):
        folder.add(item, f"input[{index}]")
    return messages


def _items(given: list[dict[str, Any]]) -> list[InputItem]:
    # A message may come without its type, and only a message may.
    typed = [item if "type" in item or "role" not in item else {"type": "message", **item} for item in given]
    try:
        return msgspec.convert(typed, list[InputItem])
    except msgspec.ValidationError as error:
        raise explained(str(error), "input") from None
    except RecursionError:
        raise Refusal("input is nested too deeply.", param="input", code="invalid_json") from None


class _Folder:
    """Puts thoughts, text and calls of one turn of the model into one message, as templates want them."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._turn: dict[str, Any] | None = None
        self._tools: dict[str, str] = {}

    def add(self, item: InputItem, where: str) -> None:
        match item:
            case ResponseMessage(role="assistant"):
                spoken = self._turn is not None and bool(self._turn["content"] or "tool_calls" in self._turn)
                self._assistant(spoken)["content"] = text_of(item.content)
            case ResponseMessage():
                # Templates know only the older name of this role.
                role = "system" if item.role == "developer" else item.role
                self._other({"role": role, "content": text_of(item.content)})
            case ReasoningInput():
                if item.encrypted_content is not None:
                    raise Refusal(
                        f"{where}.encrypted_content cannot be read here: leave it out.",
                        param=f"{where}.encrypted_content",
                        code="unsupported_parameter",
                    )
                thought = "\n\n".join(part.text for part in item.content or item.summary)
                self._assistant(self._turn is not None)["reasoning_content"] = thought
            case FunctionCallInput():
                self._tools[item.call_id] = item.name
                calls = self._assistant(False).setdefault("tool_calls", [])
                calls.append(_call_of(item, where))
            case FunctionOutputInput():
                message = {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
                if item.call_id in self._tools:
                    message["name"] = self._tools[item.call_id]
                self._other(message)
            case ReferenceInput():
                raise Refusal(
                    f"{where} refers to a stored item, and this server keeps none: send the item itself.",
                    param=where,
                    code="unsupported_value",
                )

    def _assistant(self, anew: bool) -> dict[str, Any]:
        if anew or self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        return self._turn

    def _other(self, message: dict[str, Any]) -> None:
        self._turn = None
        self._messages.append(message)


def _call_of(item: FunctionCallInput, where: str) -> dict[str, Any]:
    """Templates write the arguments themselves, so they take them as an object."""
    try:
        arguments = msgspec.json.decode(item.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise Refusal(f"{where}.arguments is no JSON object.", param=f"{where}.arguments") from None
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}
