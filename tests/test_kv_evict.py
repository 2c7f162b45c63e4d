"""Eviction inside a sequence: the first and the last tokens stay. It is exactly the mask that it says, frees the pages
between, and shares nothing with exact requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bankfull import LLM, SamplingParams
from bankfull.assembly import Assembled, assemble
from bankfull.config import RunConfig, SchedConfig, StateConfig
from bankfull.errors import BankfullError, ConfigError
from bankfull.limits.meter.metered import MeteredModel
from bankfull.limits.meter.step import StepShape
from bankfull.runtime.naive import hidden_states
from bankfull.types import NULL, StepPlan
from bankfull.weights.source import open_model
from tests.test_tiers import flush
from tests.tiny import folder_of, speaking_folder

SINKS, WINDOW = 3, 11
EVICT = f"sinks:{SINKS},window:{WINDOW}"
PROMPT = [3 + number * 7 % 90 for number in range(61)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def made(**options: Any) -> LLM:
    usual = {"dtype": "float32", "memory": "4MiB", "page_tokens": 4, "kv_evict": EVICT, "speculative": "off"}
    return LLM(str(speaking_folder()), **{**usual, **options})


def answer(llm: LLM, prompt: list[int] = PROMPT, tokens: int = 30) -> list[int]:
    return list(llm.generate([prompt], greedy(tokens))[0].outputs[0].token_ids)


def assembled(shape: str, evict: str | None = EVICT) -> Assembled:
    run = RunConfig("cpu", "float32", kv_evict=evict, speculative="off")
    return assemble(open_model(folder_of(shape)), run, SchedConfig(rows=2), StateConfig(page_tokens=4, memory="4MiB"))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return answer(made())


def dense_mask(size: int) -> torch.Tensor:
    """Zeros where a query sees a key, written out by hand."""
    query, key = torch.arange(size)[:, None], torch.arange(size)[None, :]
    seen = (key <= query) & ((query - key < WINDOW) | (key < SINKS))
    return torch.zeros(size, size).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def theirs(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def test_tokens_equal_those_of_another_implementation_under_a_dense_mask(expected: list[int]) -> None:
    model, known = theirs(speaking_folder()), list(PROMPT)
    for _ in expected:
        with torch.inference_mode():
            logits = model(torch.tensor([known]), attention_mask=dense_mask(len(known)), use_cache=False).logits
        known.append(int(logits[0, -1].argmax()))
    assert known[len(PROMPT) :] == expected


@pytest.mark.parametrize("shape", ["llama", "experts"])
@pytest.mark.parametrize("chunk", [1, 9, 60])
def test_logits_equal_those_of_another_implementation_under_a_dense_mask(shape: str, chunk: int) -> None:
    built = assembled(shape).model
    tokens = PROMPT[:60]
    chunks = [min(chunk, 60 - start) for start in range(0, 60, chunk)]
    with torch.inference_mode():
        own = built.head(hidden_states(built, tokens, torch.device("cpu"), chunks))
        other = theirs(folder_of(shape))(torch.tensor([tokens]), attention_mask=dense_mask(60)).logits[0]
    assert torch.allclose(own, other, atol=2e-3)
    assert own.argmax(-1).tolist() == other.argmax(-1).tolist()


def test_eviction_changes_the_answer_and_a_wide_window_does_not(expected: list[int]) -> None:
    exact = answer(made(kv_evict=None))
    assert expected != exact
    assert answer(made(kv_evict="sinks:3,window:200")) == exact


@pytest.mark.parametrize(
    "options",
    [
        {"step_tokens": 7, "rows": 2},
        {"depth": 1},
        {"providers": "torch"},
        {"prefix_cache": False},
        {"speculative": "ngram"},
        {"speculative": "lookahead"},
        {"page_tokens": 16},
    ],
    ids=str,
)
def test_chunks_depth_drafts_and_page_sizes_do_not_change_the_tokens(
    options: dict[str, Any], expected: list[int]
) -> None:
    assert answer(made(**options)) == expected


def test_a_warm_prefix_gives_the_tokens_of_a_cold_one(expected: list[int]) -> None:
    llm = made()
    assert answer(llm) == expected
    [again] = llm.generate([PROMPT], greedy(30))
    assert list(again.outputs[0].token_ids) == expected
    assert again.metrics is not None and again.metrics.cached_tokens >= 56
    longer = [*PROMPT, *expected[:8]]
    assert answer(llm, longer, 22) == expected[8:]


def test_preempted_sequences_continue_with_the_same_tokens(expected: list[int]) -> None:
    others = [[5 + (number * 11 + start) % 90 for number in range(50)] for start in range(5)]
    llm = made(memory="40KiB", rows=6, max_model_len=128)
    found = llm.generate([PROMPT, *others], greedy(30))
    alone = [answer(made(), prompt) for prompt in others]
    assert [list(one.outputs[0].token_ids) for one in found] == [expected, *alone]


def test_pages_between_are_freed_while_a_sequence_runs() -> None:
    llm = made(max_model_len=256, prefix_cache=False)
    engine = llm.loaded.engine
    state = engine.scheduler.state
    held: list[int] = []
    tables: list[list[int]] = []

    def note(plan: StepPlan) -> None:
        held.append(state.pages.census().held)
        tables.extend(list(seq.state.tables[0]) for seq in engine.scheduler._running if seq.state is not None)

    engine.on_launch.append(note)
    answer(llm, PROMPT, 120)
    # The page of the sinks, those of the window, the one that is written, and one that was reserved ahead.
    most = 1 + -(-WINDOW // 4) + 3
    assert max(held[5:]) <= most < 180 // 4
    last = tables[-1]
    assert last[0] != NULL and NULL not in last[-2:] and last.count(NULL) >= len(last) - most


def test_an_exact_engine_never_finds_pages_that_were_computed_under_eviction(tmp_path: Path) -> None:
    def cached(**options: Any) -> int:
        llm = made(kv_disk=f"8MiB:{tmp_path}", **options)
        llm.loaded.engine.scheduler.pace.forecast = None  # a model as small as this is computed faster than read
        [found] = llm.generate([PROMPT], greedy(4))
        flush(llm)
        assert found.metrics is not None
        return found.metrics.cached_tokens

    assert cached() == 0
    assert cached(kv_evict=None) == 0
    assert cached(kv_evict="sinks:4,window:11") == 0
    assert cached() > 0 and cached(kv_evict=None) > 0


def test_layers_with_windows_of_their_own_keep_them() -> None:
    sights = {str(group.window) for group in assembled("gemma").layout.paged}
    assert sights == {"8", "last 11 + first 3 tokens"}


def test_layers_that_share_keys_and_values_see_what_their_owner_keeps() -> None:
    made_of = assembled("shared")
    assert {str(mixer.heads.mask) for mixer in made_of.model.mixers} == {"last 11 + first 3 tokens"}  # type: ignore[attr-defined]


def test_costs_count_only_what_is_read() -> None:
    few, whole = (
        MeteredModel.of_build(one.files, one.build).cost(StepShape((1,), (200,), 1)).sum().read
        for one in (assembled("llama"), assembled("llama", None))
    )
    assert few < whole


@pytest.mark.parametrize(
    "given", ["", "sinks:4", "window:4", "sinks:4,window:0", "sinks:-1,window:5", "4,1024", "sinks:a,window:b", 7]
)
def test_what_cannot_be_read_ends_with_one_sentence(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read; give the first and the last tokens"):
        made(kv_evict=given)


@pytest.mark.parametrize(
    ("shape", "evict", "reason"),
    [
        ("llama", "sinks:4,window:252", "nothing would be evicted; give a smaller window"),
        ("latent", EVICT, "latent attention sees and keeps all tokens"),
        ("mamba", EVICT, "no layer of this model has full attention"),
    ],
)
def test_what_has_no_use_ends_with_one_sentence(shape: str, evict: str, reason: str) -> None:
    with pytest.raises(BankfullError, match=reason):
        assembled(shape, evict)
