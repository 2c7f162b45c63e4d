"""Selects the tool call format of a model by its chat template, which shows the model its own earlier calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bankfull.sample.params import StructuredOutput
from bankfull.serve.api.events import Event, OutputParser, Text
from bankfull.serve.parsers.deepseek import CALLS_BEGIN, DEEPSEEK_BLOCKS
from bankfull.serve.parsers.fenced import FENCED, bare_calls
from bankfull.serve.parsers.forced import LIST, OBJECTS, TAGGED, ForcedForm, forcing_grammar
from bankfull.serve.parsers.gemma import FUNCTION_GEMMA_BLOCKS, GEMMA4_BLOCKS, GEMMA_BARE, GEMMA_BLOCKS
from bankfull.serve.parsers.harmony import read_harmony
from bankfull.serve.parsers.json_calls import json_calls
from bankfull.serve.parsers.llama import LLAMA_BARE, LLAMA_BLOCKS
from bankfull.serve.parsers.mistral import MISTRAL_BLOCKS
from bankfull.serve.parsers.qwen_coder import QWEN_CODER_BLOCKS
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.reasoning import read_reasoning, reasoning_tags_of
from bankfull.serve.parsers.session import CallBlock, Parser, ReadCalls, Session, read_answer
from bankfull.serve.parsers.tagged import GRANITE_BLOCKS, HERMES_BLOCKS, PHI_BLOCKS, SMOLLM3_BLOCKS
from bankfull.serve.parsers.tools import MakeId, id_maker, is_forced, tools_of


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    signs: tuple[str, ...]
    """Strings that the template's source must all contain."""
    blocks: tuple[CallBlock, ...] = ()
    bare: tuple[ReadCalls, ...] = ()
    forced: ForcedForm | None = LIST
    """How a forced call is written; None if calls cannot be forced. Markers that are special tokens are left out,
    because a grammar produces only text."""
    single_call: bool = False
    """Whether only one call is forced: a model that was not trained to stop calling would continue until max_tokens."""


HARMONY = ToolFormat("harmony", ("<|channel|>", "<|message|>"), forced=None)
# In order of precedence; the first format whose signs all occur is used.
FORMATS = (
    HARMONY,
    ToolFormat("deepseek", (CALLS_BEGIN,), DEEPSEEK_BLOCKS),
    ToolFormat("mistral", ("[TOOL_CALLS]",), MISTRAL_BLOCKS),
    ToolFormat("gemma4", ("<|tool_call>",), GEMMA4_BLOCKS),
    ToolFormat("functiongemma", ("<start_function_call>",), FUNCTION_GEMMA_BLOCKS),
    ToolFormat("granite", ("<|start_of_role|>", "<|tool_call|>"), GRANITE_BLOCKS),
    ToolFormat("phi", ("<|tool_call|>",), PHI_BLOCKS),
    ToolFormat("phi", ("<|tool|>",), PHI_BLOCKS),
    ToolFormat("qwen-coder", ("<function=",), QWEN_CODER_BLOCKS),
    ToolFormat("smollm3", ("<tool_call>", "<code>"), SMOLLM3_BLOCKS, forced=TAGGED),
    ToolFormat("hermes", ("<tool_call>",), (*HERMES_BLOCKS, FENCED), (bare_calls,), forced=TAGGED),
    ToolFormat("llama", ("<|start_header_id|>",), LLAMA_BLOCKS, LLAMA_BARE, forced=OBJECTS),
    ToolFormat("gemma", ("<start_of_turn>",), GEMMA_BLOCKS, GEMMA_BARE),
    # SmolLM2 and many fine-tuned models know the tags although their template does not show them.
    ToolFormat("chatml", ("<|im_start|>",), (*HERMES_BLOCKS, FENCED), (bare_calls,), forced=TAGGED),
)


# The format of unknown templates, which `text.generic_tools` asks the model for.
GENERIC = ToolFormat("json", (), (*HERMES_BLOCKS, FENCED), (json_calls(),), forced=TAGGED, single_call=True)


@lru_cache(maxsize=16)
def format_of(template_source: str, takes_tools: bool = True) -> ToolFormat:
    """The tool call format. If the template does not support tools, they are described and called in the generic
    format."""
    if not takes_tools:
        return GENERIC
    return next((one for one in FORMATS if all(sign in template_source for sign in one.signs)), GENERIC)


class PlainParser:
    """A parser without tool calls or reasoning: everything is text."""

    wants_special_tokens = False

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


def parser_for(
    template_source: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    reasoning: bool,
    takes_tools: bool = True,
    parallel: bool = True,
    prompt: str | None = None,
    make_id: MakeId | None = None,
) -> OutputParser:
    """The parser of one sample. `takes_tools` is whether the template supports tools. `prompt` is the rendered
    prompt, whose end shows more reliably than the template whether reasoning is open. Without `parallel` only the first
    call is a call; further ones are text."""
    format = format_of(template_source, takes_tools)
    tags = reasoning_tags_of(template_source) if reasoning else None
    if not tools and tags is None and format is not HARMONY:
        return PlainParser()
    callable_tools = tools_of(tools, tool_choice)
    session = Session(callable_tools, parallel, make_id or id_maker(template_source))
    if format is HARMONY:
        return Parser(session, read_harmony)
    if not callable_tools:
        format = ToolFormat("text", ())
    bare = format.bare
    if callable_tools and is_forced(tool_choice) and bare in ((), (bare_calls,)):
        bare = (json_calls(),)
    if not (format.blocks or bare or tags):
        return PlainParser()
    opened = tags is not None and tags.opened_by(template_source, prompt)

    def read(session: Session) -> Steps[None]:
        if tags is not None:
            yield from read_reasoning(session, tags, opened)
        yield from read_answer(session, format.blocks, bare)

    return Parser(session, read)


def grammar_for(
    template_source: str,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel: bool = True,
    *,
    takes_tools: bool = True,
    reasoning: bool = False,
    prompt: str | None = None,
) -> StructuredOutput | None:
    """A grammar that forces required calls or a call of the named tool; None if nothing is forced or the format does
    not support it. With `reasoning`, reasoning that the prompt has opened comes first."""
    format = format_of(template_source, takes_tools)
    offered = tools_of(tools, tool_choice)
    if format.forced is None or not offered or not is_forced(tool_choice):
        return None
    tags = reasoning_tags_of(template_source) if reasoning else None
    opened = tags is not None and tags.opened_by(template_source, prompt)
    reasoning_end = tags.closing if tags and opened else None
    several = parallel and tool_choice == "required" and not format.single_call
    return forcing_grammar(format.forced, list(offered.values()), several, reasoning_end)
