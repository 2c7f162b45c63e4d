"""Many prompts in one call, before a house that has room for few."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from bankfull.outputs import Delta
from bankfull.serve.api.calls import Caller
from bankfull.serve.api.openai.completions import Completions
from bankfull.serve.api.openai.embeddings import Embeddings
from bankfull.serve.engine.admission import Admission, QueueLimits
from bankfull.serve.engine.backend import Busy, DeadlineExceeded
from bankfull.serve.engine.wire import RequestDone
from bankfull.submit import Submit
from tests.serve.scripted import FACTS, Scripted, scripted_texts, settings


class Crowded(Scripted):
    """Room for three: two rows, and a queue of one."""

    def __init__(self) -> None:
        super().__init__(["a", "b"], pause=0.001)
        self.admission = Admission(QueueLimits(requests=1))
        self.admission.open(msgspec.structs.replace(FACTS, rows=2))
        self.refused = self.most = 0

    def generate(self, submit: Submit) -> AsyncIterator[list[Delta | RequestDone]]:
        left, params = submit.seconds_left(), submit.params
        if left is not None and left <= 0:
            raise DeadlineExceeded("It is over.")
        try:
            ticket = self.admission.enter(len(submit.prompt), params.n, params.max_tokens, 0)
        except Busy:
            self.refused += 1
            raise

        async def steps() -> AsyncIterator[list[Delta | RequestDone]]:
            try:
                await asyncio.sleep(self.pause)
                async for items in super(Crowded, self).generate(submit):
                    self.most = max(self.most, self.running)
                    yield items
            finally:
                self.admission.leave(ticket)

        return steps()


PROMPTS = [f"prompt {number}" for number in range(20)]


def api_of(backend: Crowded, kind: type[Completions] | type[Embeddings]) -> Completions | Embeddings:
    return kind(backend, scripted_texts(), settings(prompts_at_once=64))


async def said(api: Completions | Embeddings, **body: Any) -> bytes:
    answer = await api.answer(msgspec.json.encode({"model": "tiny", **body}), Caller())
    return answer if isinstance(answer, bytes) else b"".join([chunk async for chunk in answer])


def test_completions_wait_for_their_own_kind() -> None:
    backend = Crowded()
    answer = msgspec.json.decode(asyncio.run(said(api_of(backend, Completions), prompt=PROMPTS)))
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 20
    assert backend.most == 3 and backend.refused and backend.admission.samples == 0


def test_streamed_completions_do_too() -> None:
    backend = Crowded()
    text = asyncio.run(said(api_of(backend, Completions), prompt=PROMPTS, stream=True))
    assert text.count(b'"finish_reason":"stop"') == 20 and text.endswith(b"data: [DONE]\n\n")
    assert backend.refused and backend.admission.samples == 0


def test_embeddings_do_too() -> None:
    backend = Crowded()
    answer = msgspec.json.decode(asyncio.run(said(api_of(backend, Embeddings), input=PROMPTS)))
    assert len(answer["data"]) == 20 and backend.refused and backend.admission.samples == 0


@pytest.mark.parametrize("how", [{"stream": False}, {"stream": True}])
def test_the_first_is_refused_by_a_full_house(how: dict[str, Any]) -> None:
    backend = Crowded()
    for _ in range(3):
        backend.admission.enter(1, 1, 1, 0)
    with pytest.raises(Busy):
        asyncio.run(said(api_of(backend, Completions), prompt=PROMPTS, **how))
    assert not backend.asked


def test_waiting_ends_with_the_deadline() -> None:
    backend = Crowded()
    backend.pause = 1e6  # the room that it waits for never comes
    with pytest.raises(DeadlineExceeded):
        asyncio.run(said(api_of(backend, Completions), prompt=PROMPTS, timeout=0.2))
    assert backend.admission.samples == 0


def test_others_that_take_the_room_delay_a_call_that_has_begun_but_do_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bankfull.serve.engine.admission.SHORTEST_WAIT", 0.02)
    backend = Crowded()
    for _ in range(2):
        backend.admission.enter(1, 1, 1, 0)

    async def crowd() -> bytes:
        answering = asyncio.ensure_future(said(api_of(backend, Completions), prompt=PROMPTS[:3]))
        while not backend.asked:
            await asyncio.sleep(0)
        while backend.running:
            await asyncio.sleep(0)
        other = backend.admission.enter(1, 1, 1, 0)  # takes the room before the second prompt asks again
        await asyncio.sleep(0.1)
        assert not answering.done()
        backend.admission.leave(other)
        return await answering

    assert len(msgspec.json.decode(asyncio.run(crowd()))["choices"]) == 3
