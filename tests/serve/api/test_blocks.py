"""Blocks keep the order of an answer, and log-probabilities stay with visible text."""

from __future__ import annotations

from bankfull.outputs import Delta, Logprob
from bankfull.serve.api.blocks import Began, Blocks, Ended, Grew
from bankfull.serve.api.events import Event, Reasoning, Text, ToolArguments, ToolStart, Turn


def turn(*events: Event, tokens: int = 0, finish: str | None = None) -> Turn:
    ids = list(range(tokens))
    lines = [{token: Logprob(-1.0, "x")} for token in ids]
    return Delta(1, 0, "", ids, lines, finish), list(events)


def test_a_block_ends_before_the_next_begins_and_the_last_with_the_answer() -> None:
    blocks = Blocks()
    first = blocks.add(turn(Reasoning("a"), Reasoning("b"), Text("c")))
    second = blocks.add(turn(ToolStart(0, "id", "name"), ToolArguments(0, "{}"), Text("d"), finish="stop"))
    thought, text, call, more = blocks.all
    assert [block.text for block in blocks.all] == ["ab", "c", "{}", "d"]
    assert [(type(change), change.block) for change in first + second] == [
        (Began, thought),
        (Grew, thought),
        (Grew, thought),
        (Ended, thought),
        (Began, text),
        (Grew, text),
        (Ended, text),
        (Began, call),
        (Grew, call),
        (Ended, call),
        (Began, more),
        (Grew, more),
        (Ended, more),
    ]
    assert (call.id, call.name) == ("id", "name") and blocks.open is None and not blocks.cut_short


def test_a_later_thought_needs_no_empty_lines_before_it() -> None:
    blocks = Blocks()
    blocks.add(turn(Reasoning("a"), Reasoning("\n\nb"), Text("c"), Reasoning("\n\nd"), finish="length"))
    assert [block.text for block in blocks.all] == ["a\n\nb", "c", "d"] and blocks.cut_short


def test_log_probabilities_of_held_back_tokens_come_with_their_text_and_those_of_thoughts_never() -> None:
    blocks = Blocks()
    blocks.add(turn(tokens=2))
    blocks.add(turn(Reasoning("a"), tokens=1))
    blocks.add(turn(tokens=3))
    grown = [change for change in blocks.add(turn(Text("b"), tokens=1)) if isinstance(change, Grew)]
    assert len(grown[0].lines) == 4
    last = blocks.add(turn(tokens=1, finish="stop"))
    assert isinstance(last[0], Grew) and last[0].text == "" and len(last[0].lines) == 1
    assert [len(block.lines) for block in blocks.all] == [0, 5]


def test_an_answer_without_words_has_no_blocks() -> None:
    blocks = Blocks()
    assert blocks.add(turn(Reasoning("\n"), tokens=1, finish="stop")) == [] and blocks.all == []
