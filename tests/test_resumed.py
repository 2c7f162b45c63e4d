"""A request that continues the tokens of another engine gets what the uninterrupted run would have given it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bankfull import LLM, SamplingParams
from bankfull.aio import AsyncEngine
from bankfull.errors import RequestError
from bankfull.frontend import Frontend
from bankfull.outputs import Delta, Logprob, RequestOutput
from bankfull.sample.params import StructuredOutput
from bankfull.types import Output
from tests.kit import late_devices
from tests.quick import examples
from tests.tiny import speaking_folder

PROMPT = "The river runs at the full capacity of its channel"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
CHANCE = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
GRAMMARS = (
    StructuredOutput(regex="[a-z ]{4,30}[.!]"),
    StructuredOutput(choice=["perhaps not", "perhaps", "yes and no"]),
    StructuredOutput(json='{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 5}'),
)
Pair = tuple[Frontend, Frontend]


def speaking_mamba(folder: Path) -> Path:
    """A model with recurrent state and the tokenizer of the speaking model."""
    shutil.copytree(speaking_folder(), folder, dirs_exist_ok=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(6)
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(
            vocab_size=config.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=4,
            conv_kernel=4,
            expand=2,
            time_step_rank=2,
            tie_word_embeddings=True,
            eos_token_id=config.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("A_log", "dt_proj.bias", "D")):
                weight.copy_(torch.randn_like(weight) * 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["cpu", "late"], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """With a device that answers at once, and with one that is a step behind (loop depth 1)."""
    with late_devices() if request.param == "late" else nullcontext():
        yield request.param


def two_engines(folder: Path) -> Pair:
    """The second one has other pages and shorter steps; both keep what they have computed in their prefix cache."""
    options: dict[str, object] = {"dtype": "float32", "memory": "8MiB", "rows": 8}
    first = LLM(str(folder), page_tokens=16, **options)  # type: ignore[arg-type]
    second = LLM(str(folder), page_tokens=4, step_tokens=24, **options)  # type: ignore[arg-type]
    return first.loaded.frontend, second.loaded.frontend


@pytest.fixture(scope="module")
def paged(device: str) -> Pair:
    return two_engines(speaking_folder())


@pytest.fixture(scope="module")
def recurrent(device: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return two_engines(speaking_mamba(tmp_path_factory.mktemp("mamba")))


def run(
    front: Frontend,
    params: SamplingParams,
    generated: Sequence[Sequence[int]] = (),
    finished: Sequence[int] = (),
    prompt: str = PROMPT,
) -> tuple[list[Delta], RequestOutput]:
    request = front.submit(prompt, params, generated=generated, finished=finished)
    deltas = []
    while not front.pending[request].result.finished:
        deltas += front.step()
    while front.engine.busy:  # a step in flight
        assert not front.step()
    grammars = front.engine._grammars
    assert not grammars._matchers and not grammars._pending, "the engine remembers grammars of samples that have ended"
    return deltas, front.take(request)


def streamed(deltas: Sequence[Delta], sample: int) -> tuple[list[int], str, list[dict[int, Logprob]]]:
    own = [delta for delta in deltas if delta.index == sample]
    lines = [line for delta in own for line in delta.logprobs or []]
    return [token for delta in own for token in delta.token_ids], "".join(delta.text for delta in own), lines


def assert_resumes(pair: Pair, params: SamplingParams, cuts: Sequence[int | None]) -> RequestOutput:
    """Run to the end on one engine. On the other one, continue each sample from its cut; None: it has finished."""
    deltas, whole = run(pair[0], params)
    kept: list[list[Delta]] = []
    for sample, cut in enumerate(cuts):
        own = [delta for delta in deltas if delta.index == sample]
        kept.append(own if cut is None else own[: cut % len(own)])
    generated = [[token for delta in own for token in delta.token_ids] for own in kept]
    finished = [sample for sample, cut in enumerate(cuts) if cut is None]
    later, result = run(pair[1], params, generated, finished)
    for sample, (expected, got) in enumerate(zip(whole.outputs, result.outputs, strict=True)):
        before, after = streamed(kept[sample], sample), streamed(later, sample)
        assert got.token_ids == expected.token_ids == before[0] + after[0]
        assert got.text == expected.text == before[1] + after[1]
        assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert_close(expected.logprobs, [*before[2], *after[2]])
        assert_close(got.logprobs, after[2])
        assert sum(delta.index == sample and delta.finish_reason is not None for delta in later) == (
            sample not in finished
        )
    assert result.metrics.output_tokens == whole.metrics.output_tokens
    assert result.metrics.cached_tokens <= len(result.prompt_token_ids)
    assert (result.prompt_logprobs is None) == (whole.prompt_logprobs is None)
    assert_close(whole.prompt_logprobs, result.prompt_logprobs or [])
    return result


def assert_close(
    expected: Sequence[dict[int, Logprob] | None] | None, got: Sequence[dict[int, Logprob] | None] | None
) -> None:
    """The same tokens in the same order, and the same values up to rounding."""
    for one, other in zip(expected or [], got or [], strict=True):
        assert (one is None) == (other is None)
        for (token, value), (same, close) in zip((one or {}).items(), (other or {}).items(), strict=True):
            assert (token, value.token) == (same, close.token)
            assert close.logprob == pytest.approx(value.logprob, abs=1e-4)


@st.composite
def requests(draw: st.DrawFn) -> SamplingParams:
    greedy = draw(st.integers(0, 3)) == 0
    most = draw(st.integers(1, 24))
    return SamplingParams(
        n=1 if greedy else draw(st.integers(1, 3)),
        temperature=0.0 if greedy else draw(st.sampled_from((0.7, 1.0, 2.0))),
        seed=draw(st.integers(0, 2**40)),
        top_k=draw(st.sampled_from((0, 0, 5, 40))),
        top_p=draw(st.sampled_from((1.0, 0.9))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 1.3))),
        presence_penalty=draw(st.sampled_from((0.0, 0.0, 1.0))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.0, 0.7))),
        logit_bias=draw(st.sampled_from((None, {5: 4.0, 40: -9.0}))),
        bad_words=draw(st.sampled_from(((), ("e", "the river")))),
        stop=draw(st.sampled_from(((), ("e", " t"), ("ne", "\n"), ("\ufffd",), ("a" * 9, "in", "it")))),
        stop_token_ids=draw(st.sampled_from(((), (30, 31, 32, 33, 34, 35), tuple(range(100, 140))))),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        logprobs=draw(st.sampled_from((None, 0, 3))),
        prompt_logprobs=draw(st.sampled_from((None, None, 1))),
        skip_special_tokens=draw(st.booleans()),
    )


def cuts_of(draw: st.DrawFn, n: int) -> list[int | None]:
    """A place for each sample, in pieces of its stream; None for one that has finished. The last one goes on."""
    places: list[int | None] = [draw(st.one_of(st.none(), st.integers(0, 23))) for _ in range(n - 1)]
    return [*places, draw(st.integers(0, 23))]


@pytest.mark.parametrize("kind", ["paged", "recurrent"])
@examples(150)
@given(params=requests(), data=st.data())
def test_a_resumed_request_gives_what_the_uninterrupted_one_gives(
    kind: str, request: pytest.FixtureRequest, params: SamplingParams, data: st.DataObject
) -> None:
    pair: Pair = request.getfixturevalue(kind)
    cuts = cuts_of(data.draw, params.n)  # type: ignore[arg-type]
    if data.draw(st.booleans(), label="a stop string from the text itself"):
        text = run(pair[0], replace(params, stop=()))[1].outputs[-1].text
        if len(text) > 1:
            first = data.draw(st.integers(0, len(text) - 2))
            last = data.draw(st.integers(first + 1, min(len(text), first + 6)))
            params = replace(params, stop=(text[first:last],))
    assert_resumes(pair, params, cuts)


@examples(80)
@given(
    grammar=st.sampled_from(GRAMMARS),
    n=st.integers(1, 3),
    seed=st.integers(0, 999),
    most=st.sampled_from((6, 60)),
    data=st.data(),
)
def test_a_resumed_request_stays_within_its_grammar(
    paged: Pair, grammar: StructuredOutput, n: int, seed: int, most: int, data: st.DataObject
) -> None:
    params = SamplingParams(n=n, seed=seed, structured=grammar, max_tokens=most, logprobs=1)
    assert_resumes(paged, params, cuts_of(data.draw, n))  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [GREEDY, CHANCE], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["paged", "recurrent"])
def test_every_place_of_an_answer_can_be_continued(
    kind: str, params: SamplingParams, request: pytest.FixtureRequest
) -> None:
    for cut in range(12):
        assert_resumes(request.getfixturevalue(kind), params, [cut])


def test_a_character_of_several_bytes_is_sent_once_when_the_cut_is_inside(paged: Pair) -> None:
    """The grammar allows only the four bytes of one character: all cuts but each fourth one are inside of it."""
    tokenizer = paged[0].tokenizer
    ids = tokenizer.encode("\U0001f30a", add_bos=False)
    assert len(ids) == 4 and len(set(ids)) == 4, "the tokenizer has to split the character into bytes"
    params = SamplingParams(structured=StructuredOutput(regex="\U0001f30a{3}"), temperature=0.0, max_tokens=12)
    for cut in range(1, 11):
        result = assert_resumes(paged, params, [cut])
        assert result.outputs[0].text == "\U0001f30a" * 3


def test_a_stop_string_is_found_across_the_cut(paged: Pair) -> None:
    text = run(paged[0], GREEDY)[1].outputs[0].text
    stop = text[-5:]
    for cut in range(1, 12):
        params = replace(GREEDY, stop=(stop,))
        result = assert_resumes(paged, params, [cut])
        assert result.outputs[0].stop_reason == stop


@examples(500)
@given(
    places=st.lists(st.integers(0, 99), min_size=1, max_size=12),
    early=st.integers(0, 12),
    stop=st.sampled_from(("e", "ne", "\ufffd", "in")),
    data=st.data(),
)
def test_the_text_depends_on_the_tokens_and_not_on_the_steps_that_gave_them(
    paged: Pair, places: list[int], early: int, stop: str, data: st.DataObject
) -> None:
    """Verified drafts give several tokens in a step, also across min_tokens."""
    params = SamplingParams(max_tokens=20, min_tokens=early, stop=(stop,), ignore_eos=True)
    words = paged[0].tokenizer.encode("then in the engine \U0001f30a", add_bos=False)
    tokens = [words[place % len(words)] for place in places]

    def text(pieces: list[list[int]]) -> tuple[str, str | None]:
        pending = paged[0].prepare_prompt(PROMPT, params)
        [sample] = pending.samples
        found = "".join(paged[0]._text(sample, pending, Output(0, 0, piece)) for piece in pieces)
        assert sample.stop is not None
        return found, sample.stop.stopped

    borders = sorted(data.draw(st.sets(st.integers(1, len(tokens)))))
    pieces = [tokens[a:b] for a, b in zip([0, *borders], [*borders, len(tokens)], strict=True)]
    assert text(pieces) == text([[token] for token in tokens])


def test_an_interrupted_resumption_can_be_resumed(paged: Pair) -> None:
    whole = run(paged[0], CHANCE)[1].outputs[0]
    for first, second in ((0, 3), (2, 3), (3, 9), (10, 11)):
        request = paged[1].submit(PROMPT, CHANCE, generated=[whole.token_ids[:first]])
        tokens = list(whole.token_ids[:first])
        while len(tokens) < second:
            tokens += [token for delta in paged[1].step() for token in delta.token_ids]
        paged[1].abort(request)
        del paged[1].pending[request]
        while paged[1].engine.busy:
            paged[1].step()
        assert run(paged[0], CHANCE, [tokens])[1].outputs[0].token_ids == whole.token_ids


def test_tokens_that_an_engine_knows_are_not_computed_again(paged: Pair) -> None:
    params = replace(CHANCE, seed=99, max_tokens=60)
    whole = run(paged[1], params)[1].outputs[0]
    before = paged[1].engine.totals.tokens
    assert run(paged[1], params, [whole.token_ids[:58]])[1].outputs[0].token_ids == whole.token_ids
    assert paged[1].engine.totals.tokens - before <= 4 + 2 + 1, "a page, two tokens, and a step in flight"


def test_lists_without_tokens_are_a_new_request(paged: Pair) -> None:
    params = replace(CHANCE, n=2)
    new = run(paged[0], params)[1]
    for generated in ((), [[], []]):
        assert [o.token_ids for o in run(paged[0], params, generated)[1].outputs] == [o.token_ids for o in new.outputs]


def test_asyncio_callers_resume_too(device: str) -> None:
    llm = LLM(str(speaking_folder()), dtype="float32", memory="8MiB")
    params = replace(CHANCE, n=2)
    whole = llm.generate(PROMPT, params)[0].outputs
    engine = AsyncEngine(llm)

    async def rest() -> list[Delta]:
        how = {"generated": [whole[0].token_ids, whole[1].token_ids[:5]], "finished": [0]}
        return [delta async for delta in engine.generate(PROMPT, params, **how)]

    try:
        tokens, _, _ = streamed(asyncio.run(rest()), 1)
    finally:
        engine.close()
    assert tokens == whole[1].token_ids[5:]


REFUSED = {
    "too few samples": (replace(CHANCE, n=2), [[1]], [], "1 samples but n is 2"),
    "finished without tokens": (CHANCE, [], [0], "0 samples but n is 1"),
    "not an id": (CHANCE, [[1, 99999]], [], "Token 99999 of sample 0"),
    "negative": (CHANCE, [[-1]], [], "Token -1 of sample 0"),
    "not a number": (CHANCE, [[True]], [], "Token True of sample 0"),
    "too many tokens": (CHANCE, [[50] * 13], [], "13 tokens but the request allows 12"),
    "as many as allowed": (CHANCE, [[50] * 12], [], "already ended with its 12 generated tokens .length."),
    "an end token": (replace(CHANCE, stop_token_ids=(50,)), [[51, 50]], [], "already ended .* .stop."),
    "tokens after the end": (replace(CHANCE, stop_token_ids=(50,)), [[50, 51]], [], "Token 1 of sample 0 .* ends"),
    "a stop string": (replace(CHANCE, stop=("ri",)), "river", [], "already ended .* .stop."),
    "outside of the grammar": (
        replace(CHANCE, ignore_eos=False, structured=StructuredOutput(regex="[0-9]+")),
        "river",
        [],
        "not allowed by the request's grammar",
    ),
    "a complete grammar": (
        replace(CHANCE, ignore_eos=False, structured=StructuredOutput(regex="river")),
        "river",
        [],
        "already ended .* .stop.",
    ),
    "no seed": (replace(CHANCE, seed=None), [[50]], [], "set seed"),
    "all finished": (CHANCE, [[50]], [0], "nothing is left to continue"),
    "a sample that is not there": (CHANCE, [[50]], [1], r"finished is \[1\]"),
    "a sample twice": (replace(CHANCE, n=3), [[50], [], []], [0, 0], r"finished is \[0, 0\]"),
    "no tokens wanted": (replace(CHANCE, max_tokens=0, prompt_logprobs=0), [[50]], [], "submit it anew"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_continued_is_refused_in_one_sentence(paged: Pair, case: str) -> None:
    params, generated, finished, reason = REFUSED[case]
    if isinstance(generated, str):
        generated = [paged[0].tokenizer.encode(generated, add_bos=False)]
    with pytest.raises(RequestError, match=reason) as refused:
        paged[0].submit(PROMPT, params, generated=generated, finished=finished)
    assert str(refused.value).count(". ") == 0
    assert not paged[0].engine.busy


def test_embeddings_are_not_continued(paged: Pair) -> None:
    with pytest.raises(RequestError, match="submit it anew"):
        paged[0].submit(PROMPT, replace(CHANCE, n=1), pool="mean", generated=[[50]])
