"""Ranks as processes: they meet, run, and end with rank 0; what goes wrong is said in one sentence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bankfull import LLM, SamplingParams
from bankfull.errors import ConfigError
from bankfull.mesh import MeshSpec
from bankfull.parallel import hot
from bankfull.parallel.groups import RankLost
from bankfull.parallel.leading import Followers
from bankfull.runtime.refused import refuse_feed_ranks_without_use
from bankfull.serve.engine.exchange_end import ExchangeEnd
from bankfull.serve.engine.wire import ExchangeEnds
from tests.tiny import folder_of, reference_of, speaking_folder

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


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    shutil.copytree(folder_of("experts"), path, dirs_exist_ok=True)
    for file in speaking_folder().glob("token*"):
        shutil.copy(file, path)
    return path


def numbers(llm: LLM) -> list[list[int]]:
    """Tokens of a model whose vocabulary is not the tokenizer's."""
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, {"prompt_token_ids": [40, 3, 60]}]
    how = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, how)]


@pytest.fixture(scope="module")
def of_one_process(experts: Path) -> list[list[int]]:
    return numbers(LLM(str(experts), dtype="float32", rows=4))


@pytest.mark.parametrize(
    "mesh",
    [
        "tp=2,ep=2,hot=2",
        "tp=2,sp=on",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("tp=2,ffn=2", "ffn=2,ep=2,hot=1", "pp=2,ffn=1")),
    ],
)
def test_experts_and_tokens_over_ranks_give_the_tokens_of_one_process(
    mesh: str, experts: Path, of_one_process: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hot, "COUNTED_TOKENS", 12)  # of rank 0, which decides for all
    llm = LLM(str(experts), dtype="float32", rows=4, parallel=mesh)
    assert (followers_of(llm).hot is not None) == ("hot" in mesh)
    assert numbers(llm) == of_one_process
    assert followers_of(llm).hot is None, "experts were copied in one of the steps"


def test_a_rank_of_feed_forward_layers_gives_the_tokens_of_one_process_and_its_loss_ends_the_replica(
    experts: Path, of_one_process: list[list[int]]
) -> None:
    llm = LLM(str(experts), dtype="float32", rows=4, parallel="ffn=1")
    assert numbers(llm) == of_one_process
    (process,) = followers_of(llm)._processes
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with pytest.raises(RankLost) as problem:
        numbers(llm)
    assert "Timed out" not in str(problem.value)


@pytest.mark.full
def test_ranks_of_feed_forward_layers_end_with_rank_0(experts: Path) -> None:
    code = f"""
import time
from bankfull import LLM
llm = LLM({str(experts)!r}, dtype="float32", rows=4, parallel="ffn=1")
print(llm.loaded.engine.runner.followers._processes[0].pid, flush=True)
time.sleep(600)
"""
    leader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    feeding = int(leader.stdout.readline())
    os.kill(feeding, 0)  # it runs
    leader.kill()
    leader.wait()
    until = time.monotonic() + 60
    while Path(f"/proc/{feeding}/cmdline").exists() and Path(f"/proc/{feeding}/cmdline").read_bytes():
        assert time.monotonic() < until, "a rank outlives rank 0"
        time.sleep(0.1)


def test_state_that_is_split_over_ranks_is_not_handed_to_another_engine(split: LLM) -> None:
    with pytest.raises(ConfigError, match="hands over the state of one rank, and --parallel splits it"):
        ExchangeEnd(split, ExchangeEnds([], 0), print)


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
        ({"parallel": "cp=2"}, "cannot be run yet"),
        ({"parallel": "tp=2,pp=2,sp=on"}, "sp=on runs with tp alone"),
        ({"parallel": "pp=3"}, "3 stages, but the model has only 2 layers"),
        ({"parallel": "pp=2", "speculative": "lookahead"}, "which the first of the 2 stages does not have"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(speaking_folder()), **options)  # type: ignore[arg-type]


def test_ranks_for_feed_forward_layers_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="ffn=1 gives feed-forward layers ranks of their own, but this model has"):
        refuse_feed_ranks_without_use(reference_of("mamba"), MeshSpec(ffn=1))
