"""Ranks as processes: they meet, run, and end with rank 0; what goes wrong is said in one sentence."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError
from bankfull.mesh import MeshSpec
from bankfull.parallel.groups import RankLost
from bankfull.parallel.leading import Followers
from bankfull.serve.engine.exchange_end import ExchangeEnd
from bankfull.serve.engine.wire import ExchangeEnds
from tests.models.diffusion import make_speaking
from tests.tiny import folder_of, speaking_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The river runs", "The engine", "its channel, and"]


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def split() -> Iterator[LLM]:
    yield LLM(str(speaking_folder()), dtype="float32", parallel="tp=2", rows=4)


def followers_of(llm: LLM) -> Followers:
    found = llm.loaded.engine.runner.followers
    assert isinstance(found, Followers)
    return found


def test_two_processes_give_the_tokens_of_one(split: LLM) -> None:
    alone = LLM(str(speaking_folder()), dtype="float32", rows=4)
    assert tokens(split) == tokens(alone)
    constrained = SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=list(range(20, 60)))
    assert tokens(split, constrained) == tokens(alone, constrained)
    assert split.embed(PROMPTS)[0].embedding == pytest.approx(alone.embed(PROMPTS)[0].embedding, abs=1e-5)


def test_stages_of_tensor_ranks_give_the_tokens_of_one_process() -> None:
    alone = LLM(str(speaking_folder()), dtype="float32", rows=4)
    staged = LLM(str(speaking_folder()), dtype="float32", rows=4, parallel="tp=2,pp=2")
    assert tokens(staged) == tokens(alone)
    scored = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    one, other = (llm.generate(PROMPTS[:1], scored)[0] for llm in (alone, staged))
    assert [list(line) for line in one.outputs[0].logprobs or []] == [
        list(line) for line in other.outputs[0].logprobs or []
    ]
    assert len(one.prompt_logprobs or []) == len(other.prompt_logprobs or [])
    assert staged.embed(PROMPTS)[0].embedding == pytest.approx(alone.embed(PROMPTS)[0].embedding, abs=1e-5)


@pytest.mark.parametrize(
    "mesh",
    [
        "cp=2",
        *(
            pytest.param(mesh, marks=pytest.mark.full)
            for mesh in ("cp=2,sp=ulysses", "tp=2,cp=2", "cp=2,pp=2", "tp=2,cp=2,sp=on", "tp=2,pp=2,sp=on")
        ),
    ],
)
def test_processes_that_divide_tokens_give_those_of_one(mesh: str) -> None:
    """With samples that copy a page, prompts that are cached, logprobs and pooled states."""
    alone, divided = (
        LLM(str(speaking_folder()), dtype="float32", rows=4, page_tokens=4, step_tokens=16, parallel=layout)
        for layout in ("", mesh)
    )
    assert tokens(divided) == tokens(alone)
    drawn = SamplingParams(temperature=0.8, n=3, max_tokens=8, seed=3, logprobs=1, prompt_logprobs=1)
    found = [
        [[list(sample.token_ids) for sample in output.outputs] for output in llm.generate(PROMPTS, drawn)]
        for llm in (alone, divided)
    ]
    assert found[0] == found[1]
    assert divided.embed(PROMPTS)[0].embedding == pytest.approx(alone.embed(PROMPTS)[0].embedding, abs=1e-5)
    runner, spread = divided.loaded.engine.runner, MeshSpec.parse(mesh).page_ranks
    assert len(runner.storage.frames) == 1 + -(-divided.loaded.sizes.frames // spread)
    assert divided.loaded.sizes.frames == alone.loaded.sizes.frames
    followers_of(divided).close()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,sp=ulysses", "tp=2,sp=on"])
def test_blocks_of_a_diffusion_model_are_those_of_one_process(mesh: str, tmp_path: Path) -> None:
    folder = make_speaking(tmp_path / "sdar")
    how = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    alone, divided = (LLM(str(folder), max_model_len=128, dtype="float32", parallel=layout) for layout in ("", mesh))
    assert tokens(divided, how) == tokens(alone, how)


def test_experts_and_tokens_over_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    shutil.copytree(folder_of("experts"), tmp_path, dirs_exist_ok=True)
    for file in speaking_folder().glob("token*"):
        shutil.copy(file, tmp_path)
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [40, 3, 60]}]
    how = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True)
    found = []
    for mesh in ("", "tp=2,ep=2", "tp=2,ep=2,sp=on"):
        llm = LLM(str(tmp_path), dtype="float32", rows=4, parallel=mesh)
        found.append([list(output.outputs[0].token_ids) for output in llm.generate(prompts, how)])
    assert found[0] == found[1] == found[2]


def test_ranks_hand_no_state_to_other_engines(split: LLM) -> None:
    ends = ExchangeEnds([], 0)
    with pytest.raises(ConfigError, match="--parallel spreads it over several; leave out one"):
        ExchangeEnd(split, ends, lambda message: None)


def test_bytes_on_the_wire_are_those_of_the_formula(split: LLM) -> None:
    """Per step of n tokens: an all-reduce of (n, hidden) for the embedding and two for each layer, and the logits of
    the sampled rows gathered. A rank of two sends as many bytes as each of these tensors has."""
    build, model = split.loaded.build, split.loaded.model
    assert build.shard is not None
    group = build.shard.group
    before = group.sent  # type: ignore[attr-defined]
    prompt = list(range(5, 26))
    steps = split.loaded.engine.totals.steps
    split.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    steps = split.loaded.engine.totals.steps - steps
    rows = len(prompt) + steps - 1
    share = -(-model.vocab // 2)
    expected = 4 * (rows * model.hidden * (1 + 2 * len(model.blocks)) + steps * share)
    assert group.sent - before == expected  # type: ignore[attr-defined]


def test_a_lost_rank_ends_the_replica_and_the_others_end_with_rank_0() -> None:
    llm = LLM(str(speaking_folder()), dtype="float32", parallel="tp=2", rows=4)
    process = followers_of(llm)._processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RankLost) as problem:
        tokens(llm)
    assert "Timed out" not in str(problem.value)
    followers_of(llm).close()
    assert all(one.poll() is not None for one in followers_of(llm)._processes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parallel": "tp=3"}, "num_attention_heads of 4 cannot be split evenly over 3 tensor ranks"),
        ({"parallel": "tp"}, "gives no value for tp"),
        ({"parallel": "xp=2"}, "no axis 'xp'"),
        ({"parallel": 2}, "is no layout"),
        ({"parallel": "tp=2", "kv_disk": "1GiB"}, "need one rank"),
        ({"parallel": "tp=2", "speculative": "mtp"}, "reads the model's head"),
        ({"parallel": "tp=2", "speculative": "chain:medusa:heads"}, "medusa reads the model's head"),
        ({"parallel": "cp=2", "speculative": "streaming:streams"}, "whose tokens cp=2 divides"),
        ({"parallel": "cp=3,sp=ulysses"}, "4 heads.*cannot be divided over 3 context ranks"),
        ({"parallel": "ffn=1"}, "cannot be run yet"),
        ({"parallel": "pp=3"}, "3 stages, but the model has only 2 layers"),
        ({"parallel": "pp=2", "speculative": "lookahead"}, "which the first of the 2 stages does not have"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(speaking_folder()), **options)  # type: ignore[arg-type]
