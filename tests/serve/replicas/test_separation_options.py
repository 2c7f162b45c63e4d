"""`--separate`: what can be asked for, and one sentence for everything else."""

from __future__ import annotations

import re

import msgspec
import pytest

from bankfull.cli.app import run_command
from bankfull.errors import ConfigError
from bankfull.fleet.reports import Facts
from bankfull.runtime.tiering import layout_facts
from bankfull.serve.engine.exchange_end import told_facts
from bankfull.serve.replicas.fitting import border_of, handed_length, state_misfit
from bankfull.serve.replicas.local import Separation
from bankfull.state.spec import Paged, TensorSpec, layout_of
from tests.serve.replicas.fake_links import FACTS


def test_pools_and_their_exchange_are_read() -> None:
    assert Separation.parse("prefill=1,decode=2") == Separation(1, 2, 1 << 30)
    assert Separation.parse(" decode = 3, exchange=2MiB ,prefill=2") == Separation(2, 3, 2 << 20)
    assert Separation.parse("prefill=1,decode=1,link=socket") == Separation(1, 1, 1 << 30, "socket")
    assert Separation.parse("prefill=1,decode=1,link=memory") == Separation(1, 1, 1 << 30, "memory")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefill=0,decode=1", "prefill=0 is no number of engines"),
        ("prefill=1,decode=-1", "decode=-1 is no number of engines"),
        ("prefill=one,decode=1", "prefill=one is no number of engines"),
        ("prefill=1", "has no engine for decode"),
        ("decode=1", "has no engine for prefill"),
        ("", "give prefill=1,decode=2"),
        ("1", "give prefill=1,decode=2"),
        ("prefill=1,decode=1,mixed=1", "has no 'mixed=1'"),
        ("prefill=1,decode=1,decode=2", "names decode twice"),
        ("prefill=40,decode=40", "at most 64"),
        ("prefill=1,decode=1,exchange=big", "exchange='big' is not a size"),
        ("prefill=1,decode=1,exchange=0", "exchange='0' is not a size"),
        ("prefill=1,decode=1,link=nixl", "link=nixl is unknown; give memory or socket"),
        ("prefill=1,decode=1,link=", "link= is unknown; give memory or socket"),
    ],
)
def test_other_pools_are_refused_by_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        Separation.parse(text)
    assert "\n" not in str(found.value) and str(found.value).endswith(".")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "2"], "leave --replicas out, or --separate"),
        (["--replica-cpus", "1"], "leave --replica-cpus out, or give --ray"),
        (["--replica-gpus", "1"], "leave --replica-gpus out, or give --ray"),
        (["--parallel", "tp=2"], "with the layout tp=2 each rank keeps a part of every page: leave out --parallel"),
        (["--no-prefix-cache"], "needs the prefix cache, by which state is found: leave out --no-prefix-cache"),
        (["--diffusion", "threshold=0.9"], "has no use for a diffusion model"),
        (["--ray", "localhost:1", "--replica-cpus", "0"], "leaves a replica no processor"),
        (["--ray", "localhost:1", "--separate", "prefill=1,decode=1,link=memory"], "link=memory needs engines on one"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["serve", "nowhere", "--separate", "prefill=1,decode=1", *options]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1


def test_a_bad_pool_ends_the_command_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["serve", "nowhere", "--separate", "prefill=0,decode=1"]) == 2
    said = capsys.readouterr().err
    assert "prefill=0 is no number of engines" in said and said.count("\n") == 1


def test_engines_with_state_of_another_kind_are_refused_by_one_sentence() -> None:
    own = msgspec.structs.replace(FACTS, state={"dtype": "torch.bfloat16", "layout": "a"})
    other = msgspec.structs.replace(FACTS, state={"dtype": "torch.float32", "layout": "a"})
    assert state_misfit("prefill-0", own, own) == state_misfit("prefill-0", own, None) == ""
    said = state_misfit("prefill-0", own, other)
    assert "prefill-0 keeps its state with dtype torch.bfloat16" in said and "torch.float32" in said
    assert "start both with the same model and options" in said and "\n" not in said


def engine_with(dtype: str, page: int, heads: int = 4) -> Facts:
    """The facts of an engine with pages of this form."""
    layout = layout_of([(Paged((TensorSpec("k", (heads, 8), dtype), TensorSpec("v", (heads, 8), dtype))),)], page)
    told = told_facts({"model": "tiny", "version": "1", "layout": layout_facts(layout)}, layout)
    return msgspec.structs.replace(FACTS, state=told)


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        (
            ("bfloat16", 16),
            ("int8", 16),
            "KV dtype bfloat16, those of the other pool of --separate with int8: .*rounded",
        ),
        (("float32", 16), ("float8_e4m3fn", 16), "KV dtype float32, .* with float8_e4m3fn: .*rounded"),
        (("bfloat16", 16), ("bfloat16", 32), "pages in tokens of 16, .* with 32: pages cannot"),
        (("bfloat16", 16, 4), ("bfloat16", 16, 2), "tokens of k 4x8 and v 4x8, .* with k 2x8 and v 2x8: pages cannot"),
    ],
)
def test_pages_of_another_form_are_refused_by_a_sentence_with_both(
    own: tuple[str, int], other: tuple[str, int], said: str
) -> None:
    found = state_misfit("prefill-0", engine_with(*own), engine_with(*other))
    assert re.search(f"^Engine prefill-0 keeps its state with {said}", found) and found.endswith("options.")
    assert state_misfit("prefill-0", engine_with(*own), engine_with(*own)) == ""


def test_whole_pages_of_every_group_are_handed_over() -> None:
    groups = msgspec.structs.replace(FACTS, groups=[(16, 0), (32, 64)])
    assert border_of(FACTS) == 16 and border_of(groups) == 32
    assert [handed_length(groups, tokens) for tokens in (31, 32, 70)] == [0, 32, 64]
    recurrent = msgspec.structs.replace(FACTS, snapshots=16)
    assert [handed_length(recurrent, tokens) for tokens in (16, 17, 32)] == [0, 16, 16]
