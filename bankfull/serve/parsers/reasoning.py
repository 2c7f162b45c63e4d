"""What a model thinks before it answers, between two tags at the beginning of its text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bankfull.serve.parsers.reader import Markers, Steps
from bankfull.serve.parsers.session import Session

_QUOTED = re.compile(r"'((?:[^'\\]++|\\.)*+)'|\"((?:[^\"\\]++|\\.)*+)\"", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Thinking:
    opening: str
    closing: str
    sign: str
    """What a template holds whose model thinks like this."""

    def opened_by(self, template_source: str, prompt: str | None) -> bool:
        """Whether the prompt ends inside of a thought, so that only the closing tag is left to write. Without the
        prompt, the strings behind the template's last `add_generation_prompt` tell."""
        if prompt is not None:
            return _open_at_end(prompt, self.opening, self.closing) and prompt.rstrip().endswith(self.opening)
        _, found, last = template_source.rpartition("add_generation_prompt")
        if not found:
            return False
        strings = ["".join(match.groups("")) for match in _QUOTED.finditer(last)]
        return any(_open_at_end(text, self.opening, self.closing) for text in strings)


THINKING = (
    Thinking("<think>", "</think>", "</think>"),
    Thinking("[THINK]", "[/THINK]", "[THINK]"),
    Thinking("<|channel>thought", "<channel|>", "<|channel>"),
    Thinking("Here is my thought process:", "Here is my response:", "Here is my thought process:"),
)


def thinking_of(template_source: str) -> Thinking | None:
    return next((thinking for thinking in THINKING if thinking.sign in template_source), None)


def read_reasoning(session: Session, thinking: Thinking, opened: bool) -> Steps[None]:
    """The thought, if there is one. One that the prompt has opened may be opened again."""

    def opening(session: Session) -> Steps[bool]:
        yield from session.reader.spaces()
        return (yield from session.reader.literal(thinking.opening))

    if (yield from session.attempt(opening)) or opened:
        session.writer.reasoning_begins()
        yield from session.reader.until(Markers([thinking.closing]), session.writer.reasoning)


def _open_at_end(text: str, opening: str, closing: str) -> bool:
    return text.rfind(opening) > text.rfind(closing)
