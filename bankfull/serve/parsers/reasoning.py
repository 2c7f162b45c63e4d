"""Reasoning between two tags at the beginning of a model's output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from bankfull.serve.parsers.reader import Markers, Steps
from bankfull.serve.parsers.session import Session

_QUOTED = re.compile(r"'((?:[^'\\]++|\\.)*+)'|\"((?:[^\"\\]++|\\.)*+)\"", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    opening: str
    closing: str
    sign: str
    """A string in the template that identifies these tags."""

    def opened_by(self, template_source: str, prompt: str | None) -> bool:
        """Whether the prompt ends inside reasoning, so that the model writes only the closing tag. Without the prompt,
        the strings after the template's last `add_generation_prompt` decide."""
        if prompt is not None:
            return _open_at_end(prompt, self.opening, self.closing) and prompt.rstrip().endswith(self.opening)
        _, separator, last = template_source.rpartition("add_generation_prompt")
        if not separator:
            return False
        strings = ["".join(match.groups("")) for match in _QUOTED.finditer(last)]
        return any(_open_at_end(text, self.opening, self.closing) for text in strings)


REASONING_TAGS = (
    ReasoningTags("<think>", "</think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]", "[THINK]"),
    ReasoningTags("<|channel>thought", "<channel|>", "<|channel>"),
    ReasoningTags("Here is my thought process:", "Here is my response:", "Here is my thought process:"),
)


@lru_cache(maxsize=16)
def reasoning_tags_of(template_source: str) -> ReasoningTags | None:
    return next((tags for tags in REASONING_TAGS if tags.sign in template_source), None)


def read_reasoning(session: Session, tags: ReasoningTags, opened: bool) -> Steps[None]:
    """Read the reasoning, if any. The model may repeat an opening tag that the prompt already has."""

    def opening(session: Session) -> Steps[bool]:
        yield from session.reader.spaces()
        return (yield from session.reader.literal(tags.opening))

    if (yield from session.attempt(opening)) or opened:
        session.writer.reasoning_begins()
        yield from session.reader.until(Markers([tags.closing]), session.writer.reasoning)


def _open_at_end(text: str, opening: str, closing: str) -> bool:
    return text.rfind(opening) > text.rfind(closing)
