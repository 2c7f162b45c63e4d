"""Which format a model writes: its chat template tells, because it shows the model its own earlier calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bankfull.sample.params import StructuredOutput
from bankfull.serve.api.events import Event, OutputParser, Text
from bankfull.serve.parsers.deepseek import CALLS_BEGIN, DEEPSEEK_BLOCKS
from bankfull.serve.parsers.forced import LIST, OBJECTS, TAGGED, ForcedForm, forcing_grammar
from bankfull.serve.parsers.gemma import FUNCTION_GEMMA_BLOCKS, GEMMA4_BLOCKS, GEMMA_BARE, GEMMA_BLOCKS
from bankfull.serve.parsers.harmony import read_harmony
from bankfull.serve.parsers.json_calls import json_calls
from bankfull.serve.parsers.llama import LLAMA_BARE, LLAMA_BLOCKS
from bankfull.serve.parsers.mistral import MISTRAL_BLOCKS
from bankfull.serve.parsers.qwen_coder import QWEN_CODER_BLOCKS
from bankfull.serve.parsers.reader import Steps
from bankfull.serve.parsers.reasoning import read_reasoning, thinking_of
from bankfull.serve.parsers.session import Block, Parser, ReadCalls, Session, read_answer
from bankfull.serve.parsers.tagged import GRANITE_BLOCKS, HERMES_BLOCKS, PHI_BLOCKS, SMOLLM3_BLOCKS
from bankfull.serve.parsers.tools import MakeId, id_maker, is_forced, tools_of


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    signs: tuple[str, ...]
    """All of them stand in the template's source."""
    blocks: tuple[Block, ...] = ()
    bare: tuple[ReadCalls, ...] = ()
    forced: ForcedForm | None = LIST
    """How a call that must come is written. Markers that are special tokens are left out of it: a grammar allows only
    text. None where a call cannot be forced."""
    one_at_a_time: bool = False
    """A forced call comes alone: a model that has not learnt when to stop calling would go on until its tokens end."""


HARMONY = Family("harmony", ("<|channel|>", "<|message|>"), forced=None)
#: The first whose signs are all there.
FAMILIES = (
    HARMONY,
    Family("deepseek", (CALLS_BEGIN,), DEEPSEEK_BLOCKS),
    Family("mistral", ("[TOOL_CALLS]",), MISTRAL_BLOCKS),
    Family("gemma4", ("<|tool_call>",), GEMMA4_BLOCKS),
    Family("functiongemma", ("<start_function_call>",), FUNCTION_GEMMA_BLOCKS),
    Family("granite", ("<|start_of_role|>", "<|tool_call|>"), GRANITE_BLOCKS),
    Family("phi", ("<|tool_call|>",), PHI_BLOCKS),
    Family("phi", ("<|tool|>",), PHI_BLOCKS),
    Family("qwen-coder", ("<function=",), QWEN_CODER_BLOCKS),
    Family("smollm3", ("<tool_call>", "<code>"), SMOLLM3_BLOCKS, forced=TAGGED),
    Family("hermes", ("<tool_call>",), HERMES_BLOCKS, forced=TAGGED),
    Family("llama", ("<|start_header_id|>",), LLAMA_BLOCKS, LLAMA_BARE, forced=OBJECTS),
    Family("gemma", ("<start_of_turn>",), GEMMA_BLOCKS, GEMMA_BARE),
    # SmolLM2 and many a fine-tuned model have learnt the tags without a template that shows them.
    Family("chatml", ("<|im_start|>",), HERMES_BLOCKS, forced=TAGGED),
)


#: What nothing else is known of, and what `text.generic_tools` asks for.
GENERIC = Family("json", (), HERMES_BLOCKS, (json_calls(),), forced=TAGGED, one_at_a_time=True)


def family_of(template_source: str, takes_tools: bool = True) -> Family:
    """Without a place for tools in the template, they are described in the generic form, and called in it."""
    if not takes_tools:
        return GENERIC
    return next((one for one in FAMILIES if all(sign in template_source for sign in one.signs)), GENERIC)


class PlainParser:
    """All is text."""

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
    """`takes_tools`: whether the template has a place for tools. `prompt` is the rendered one: its end tells whether a
    thought is open more surely than the template does. Without `parallel` only the first call is one, the others are
    text."""
    family = family_of(template_source, takes_tools)
    callable_tools = tools_of(tools, tool_choice)
    thinking = thinking_of(template_source) if reasoning else None
    session = Session(callable_tools, parallel, make_id or id_maker(template_source))
    if family is HARMONY:
        return Parser(session, read_harmony)
    if not callable_tools:
        family = Family("text", ())
    bare = family.bare
    if callable_tools and is_forced(tool_choice) and not bare:
        bare = (json_calls(),)
    if not (family.blocks or bare or thinking):
        return PlainParser()
    opened = thinking is not None and thinking.opened_by(template_source, prompt)

    def read(session: Session) -> Steps[None]:
        if thinking is not None:
            yield from read_reasoning(session, thinking, opened)
        yield from read_answer(session, family.blocks, bare)

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
    """What forces required calls, or one of a named tool; None where nothing is forced, and where the family cannot be.
    With `reasoning`, a thought that the prompt has opened comes first."""
    family = family_of(template_source, takes_tools)
    offered = tools_of(tools, tool_choice)
    if family.forced is None or not offered or not is_forced(tool_choice):
        return None
    thinking = thinking_of(template_source) if reasoning else None
    opened = thinking is not None and thinking.opened_by(template_source, prompt)
    thought_end = thinking.closing if thinking and opened else None
    several = parallel and tool_choice == "required" and not family.one_at_a_time
    return forcing_grammar(family.forced, list(offered.values()), several, thought_end)
