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
from bankfull.cli.app import run_command
from bankfull.combinations import refuse_impossible
from bankfull.config import RunConfig
from bankfull.errors import ConfigError, RankLost
from bankfull.parallel import hot, leading
from bankfull.parallel.groups import Bounds
from bankfull.parallel.leading import Followers
from bankfull.parallel.messages import RankReady, encoded
from bankfull.ranks.mesh import MeshSpec
from bankfull.runtime.device import Cpu
from bankfull.weights.source import open_model
from tests.cluster.listening import sockets_of
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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of its sockets in files of Linux")
def test_nobody_connects_to_ranks_that_have_met(split: LLM) -> None:
    """`tests/cluster/test_listening.py` compares whole servers with docs/security.md."""
    found = sockets_of({process.pid: "rank" for process in followers_of(split)._processes})
    assert [(one.loopback, one.deaf) for one in found] == [(True, True)], "Gloo listens once, and the store does not"
    assert followers_of(split)._folder.path.stat().st_mode & 0o777 == 0o700


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
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in ("tp=2,ffn=2", "ffn=2,ep=2,hot=1", "pp=2,ffn=1", "tp=2,ep=2,sp=on")
        ),
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


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["tp=2", "pp=2"])
def test_a_rank_that_stops_in_the_middle_is_lost_within_the_bound(
    parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "BOUNDS", Bounds(collective=2.0, step=4.0))
    llm = LLM(str(speaking_folder()), dtype="float32", parallel=parallel, rows=4)
    os.kill(followers_of(llm)._processes[0].pid, signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"did not answer within [24] s"):
        tokens(llm)
    followers_of(llm).close()
    assert all(one.poll() is not None for one in followers_of(llm)._processes)


SAYS = """
import socket, sys, time
own = socket.socket(fileno=int(sys.argv[1]))
for frame in sys.argv[2:]:
    own.sendall(bytes.fromhex(frame))
    own.recv(1)  # rank 0's answer
"""
"""A rank that only talks."""


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the other ranks say, message by message, instead of starting."""
    frames: list[bytes] = []

    def command(socket_number: int) -> list[str]:
        return [sys.executable, "-c", SAYS, str(socket_number), *(frame.hex() for frame in frames)]

    monkeypatch.setattr(leading, "rank_command", command)
    return frames


def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started from now on."""
    found: list[int] = []
    start = Followers._start

    def watched(self: Followers, rank: int) -> None:
        start(self, rank)
        found.append(self._processes[-1].pid)

    monkeypatch.setattr(Followers, "_start", watched)
    return found


def alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_a_rank_of_another_version_is_refused(talking: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    talking.append(encoded(leading.HelloMessage("0.0.9", "there")))
    begun = started(monkeypatch)
    with pytest.raises(ConfigError, match=r"Rank 1 runs bankfull 0\.0\.9, and rank 0 runs .*install the same version"):
        Followers(MeshSpec.parse("tp=3"), "cpu")
    assert len(begun) == 2 and not any(map(alive, begun)), "none is left, nor is the one that fits"


def test_a_rank_that_cannot_load_ends_the_start_and_no_process_is_left(
    talking: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody_came(*args: object) -> None:
        raise RankLost("the ranks did not meet.")

    monkeypatch.setattr(leading, "join", nobody_came)
    monkeypatch.setattr(leading, "BOUNDS", Bounds(word=30.0))
    talking += [
        encoded(leading.HelloMessage(leading.bankfull.__version__, "there")),
        encoded(RankReady("The weights are not readable; copy them again.", refused=True)),
    ]
    begun = started(monkeypatch)
    with pytest.raises(ConfigError, match=r"^The weights are not readable; copy them again\.$"):
        LLM(str(speaking_folder()), dtype="float32", parallel="tp=2")
    assert len(begun) == 1 and not any(map(alive, begun))


def test_a_rank_that_ends_at_once_is_named(talking: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    begun = started(monkeypatch)
    with pytest.raises(RankLost, match=r"^rank 1 ended before it began\.$"):
        Followers(MeshSpec.parse("tp=2"), "cpu")
    assert not any(map(alive, begun))


def test_a_command_whose_rank_is_lost_ends_with_one_sentence(
    talking: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", "The river", "--model", str(speaking_folder()), "--dtype", "float32", "--parallel", "tp=2"]
    assert run_command(asked) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("rank 1 ended before it began.")


@pytest.mark.full
def test_a_model_that_other_ranks_do_not_find_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begin = Followers.begin
    monkeypatch.setattr(Followers, "begin", lambda self, model, *more: begin(self, str(tmp_path / "none"), *more))
    begun = started(monkeypatch)
    with pytest.raises(ConfigError, match="none"):
        LLM(str(speaking_folder()), dtype="float32", parallel="tp=2")
    assert len(begun) == 1 and not any(map(alive, begun))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"parallel": "tp=3"}, "num_attention_heads of 4 cannot be split evenly over 3 tensor ranks"),
        ({"parallel": "tp"}, "gives no value for tp"),
        ({"parallel": "xp=2"}, "no axis 'xp'"),
        ({"parallel": 2}, "is no layout"),
        ({"parallel": "cp=2", "kv_disk": "1GiB"}, "but cp=2 deals whole pages out to ranks"),
        ({"parallel": "tp=2,cp=2", "kv_host": "1GiB"}, "use tp, pp or sp=ulysses, or leave out the tiers"),
        ({"parallel": "tp=2", "speculative": "streaming:streams"}, "which the layout tp=2 spreads over ranks"),
        ({"parallel": "ffn=1", "speculative": "chain:tree-streaming:streams"}, "which the layout ffn=1 spreads"),
        ({"parallel": "pp=2", "speculative": "mtp"}, "which the first of the 2 stages does not have"),
        ({"parallel": "cp=3,sp=ulysses"}, "4 heads.*cannot be divided over 3 context ranks"),
        ({"parallel": "pp=3"}, "3 stages, but the model has only 2 layers"),
        ({"parallel": "pp=2", "speculative": "lookahead"}, "which the first of the 2 stages does not have"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LLM(str(speaking_folder()), **options)  # type: ignore[arg-type]


def test_ranks_for_feed_forward_layers_that_a_model_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="ffn=1 gives feed-forward layers ranks of their own, but this model has"):
        refuse_impossible(open_model(folder_of("mamba")), Cpu(), RunConfig(parallel="ffn=1"))
