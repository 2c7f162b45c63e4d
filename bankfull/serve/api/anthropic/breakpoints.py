"""`cache_control` of /v1/messages: which blocks are marked, and how far each mark reaches in the rendered prompt.

A mark pins the prompt up to the end of its block. Where that is depends on the chat template, which may trim, wrap or
reorder blocks. So the conversation is rendered a second time with a sentinel behind the block: the prompt's tokens up
to the first difference are those that the mark covers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from bankfull.serve.api.errors import Refusal

if TYPE_CHECKING:
    from bankfull.serve.api.anthropic.messages_call import CountTokensCall

MOST_BREAKPOINTS = 4
LIFETIMES = {"5m": 300.0, "1h": 3600.0}
"""Seconds since the last use after which a pin ends."""
SENTINEL = "\N{DOUBLE DAGGER}"

Place = tuple[str | int, ...]
"""The path of a block in the call: ("messages", 2, "content", 0)."""


@dataclass(frozen=True, slots=True)
class Breakpoint:
    place: Place
    ttl: str

    @property
    def path(self) -> str:
        return path_of(self.place)

    @property
    def seconds(self) -> float:
        return LIFETIMES[self.ttl]


def path_of(place: Place) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in place]
    return "".join(steps).removeprefix(".")


def breakpoints_of(call: CountTokensCall) -> list[Breakpoint]:
    """The marks of a call, in the order of the API: tools, system, messages; checked."""
    breakpoints: list[Breakpoint] = []
    for place, block in _blocks(call):
        control = getattr(block, "cache_control", None)
        if control is not None:
            if getattr(block, "text", None) == "":
                raise _refused(f"{path_of(place)} is empty: an empty text cannot have cache_control.", place)
            breakpoints.append(Breakpoint(place, control.ttl or "5m"))
    if call.cache_control is not None:
        place = _last_place(call)
        if not breakpoints or breakpoints[-1].place != place:
            breakpoints.append(Breakpoint(place, call.cache_control.ttl or "5m"))
    if len(breakpoints) > MOST_BREAKPOINTS:
        raise _refused(
            f"There are {len(breakpoints)} blocks with cache_control: give it to at most {MOST_BREAKPOINTS}.",
            breakpoints[-1].place,
        )
    for before, after in pairwise(breakpoints):
        if after.seconds > before.seconds:
            raise _refused(
                f"{after.path} has cache_control with ttl={after.ttl!r} behind {before.path} with {before.ttl!r}: put "
                "longer lifetimes before shorter ones.",
                after.place,
            )
    return breakpoints


def _refused(message: str, place: Place) -> Refusal:
    return Refusal(message, param=f"{path_of(place)}.cache_control", code="invalid_value")


def _blocks(call: CountTokensCall) -> Iterator[tuple[Place, Any]]:
    for number, tool in enumerate(call.tools or ()):
        yield ("tools", number), tool
    if isinstance(call.system, list):
        for number, block in enumerate(call.system):
            yield ("system", number), block
    for number, message in enumerate(call.messages):
        if isinstance(message.content, list):
            for index, part in enumerate(message.content):
                place: Place = ("messages", number, "content", index)
                inner = getattr(part, "content", None)
                for line, text in enumerate(inner if isinstance(inner, list) else ()):
                    yield (*place, "content", line), text
                yield place, part


def _last_place(call: CountTokensCall) -> Place:
    """The end of the last message; `conversation_of` refuses a call without messages."""
    number = len(call.messages) - 1
    content = call.messages[number].content if call.messages else ""
    if isinstance(content, str) or not content:
        return "messages", number
    return "messages", number, "content", len(content) - 1


def with_sentinel(call: CountTokensCall, mark: Breakpoint) -> CountTokensCall:
    """The call with a sentinel directly behind the marked block of its system prompt or messages."""
    changed: CountTokensCall = call if mark.place[0] == "tools" else _changed(call, mark.place)
    return changed


def tools_with_sentinel(tools: list[dict[str, Any]] | None, mark: Breakpoint) -> list[dict[str, Any]] | None:
    """Tools as templates take them, with a sentinel behind the marked one."""
    kind, *rest = mark.place
    if tools is None or kind != "tools":
        return tools
    [index] = rest
    assert isinstance(index, int)
    sentinel = {"type": "function", "function": {"name": SENTINEL, "description": SENTINEL, "parameters": {}}}
    return [*tools[: index + 1], sentinel, *tools[index + 1 :]]


def _changed(value: Any, place: Place) -> Any:
    if not place:
        return _extended(value)
    step, *rest = place
    if isinstance(step, str):
        return replace(value, **{step: _changed(getattr(value, step), tuple(rest))})
    return _changed_item(list(value), step, tuple(rest))


def _changed_item(items: list[Any], index: int, rest: Place) -> list[Any]:
    item = items[index]
    if not rest and hasattr(item, "input"):
        items.insert(index + 1, replace(item, id=SENTINEL, name=SENTINEL, input={}))
    else:
        items[index] = _changed(item, rest)
    return items


def _extended(block: Any) -> Any:
    """A text, a message of one text or the result of a tool, with the sentinel at its end."""
    if hasattr(block, "text"):
        return replace(block, text=block.text + SENTINEL)
    content = block.content
    if isinstance(content, list) and content:
        return replace(block, content=[*content[:-1], _extended(content[-1])])
    return replace(block, content=(content or "") + SENTINEL)
