"""Stop strings end a stream at the same place however it is cut, and never leak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bankfull.errors import RequestError
from bankfull.text.stop import StopText
from tests.quick import examples


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grow the text by one character at a time and look whether it ends with a stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    stream = StopText(stops, include)
    emitted = [stream.push(piece) for piece in pieces]
    return "".join(emitted) + stream.finish(), stream.stopped, emitted


texts = st.text("abc", max_size=12)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@examples(400, deadline=None)
@given(text=texts, stops=stop_lists, include=st.booleans(), data=st.data())
def test_every_split_gives_the_oracles_text(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, stopped, emitted = run(pieces, stops, include)
    assert (whole, stopped) == oracle(text, stops, include)
    # What is out is out: each prefix of the stream must be a prefix of the final text.
    assert whole.startswith("".join(emitted))


@examples(200, deadline=None)
@given(text=st.text("ab", max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_all_two_way_splits_agree(text: str, stops: list[str]) -> None:
    expected = oracle(text, stops, False)
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], stops, False)[:2] == expected


@examples(200, deadline=None)
@given(text=texts, stops=stop_lists)
def test_text_is_held_only_while_it_may_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopText(stops)
    emitted = ""
    for end, character in enumerate(text, 1):
        emitted += stream.push(character)
        if stream.stopped is not None:
            return
        held = text[len(emitted) : end]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_stop_that_is_complete_first_wins_and_ties_go_to_the_longest() -> None:
    assert run(["xabcd"], ["abcd", "c"], False)[:2] == ("xab", "c")
    assert run(["xabc"], ["abc", "bc", "c"], False)[:2] == ("x", "abc")
    assert run(["xabc"], ["c", "abc"], True)[:2] == ("xabc", "abc")


def test_nothing_follows_a_stop() -> None:
    stream = StopText(["b"])
    assert [stream.push("ab"), stream.push("c"), stream.finish()] == ["a", "", ""]


@pytest.mark.parametrize("stops", ["abc", [""], [1], ["a", None]])
def test_bad_stops_are_refused(stops: object) -> None:
    with pytest.raises(RequestError):
        StopText(stops)  # type: ignore[arg-type]
