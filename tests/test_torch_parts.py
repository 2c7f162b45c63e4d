"""What a start leaves out of torch, and that whoever needs it has it."""

import subprocess
import sys

HEAD = """
from bankfull.torch_parts import LEFT_OUT, complete, leave_out, with_all
leave_out()
import sys
import torch

def left_out():
    return [name for name in LEFT_OUT if type(sys.modules[name].__spec__.loader).__name__ == "_Absent"]

def meta(*shape):
    return torch.empty(*shape, device="meta")
"""


def in_a_process(body: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", HEAD + body], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_start_computes_without_the_parts_and_gets_them_when_a_shape_needs_them() -> None:
    said = in_a_process(
        """
assert left_out() == list(LEFT_OUT)
assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 2), torch.full((2, 2), 3.0))
assert meta(2, 3).chunk(3, -1)[0].reshape(-1).shape == (2,)
runs = []
assert with_all(lambda: (runs.append(1), meta(4, 2).flip(0))[1]).shape == (4, 2)
assert runs == [1, 1] and left_out() == []
assert not complete()
print("done")
"""
    )
    assert said == "done\n"


def test_an_attribute_of_a_part_brings_the_real_module() -> None:
    said = in_a_process(
        """
from torch._meta_registrations import register_meta
assert left_out() == [] and callable(register_meta)
print("done")
"""
    )
    assert said == "done\n"


def test_what_is_not_implemented_for_another_reason_is_raised_once() -> None:
    said = in_a_process(
        """
runs = []

def refuse():
    runs.append(1)
    raise NotImplementedError("no such thing")

complete()
try:
    with_all(refuse)
except NotImplementedError as error:
    assert str(error) == "no such thing" and runs == [1]
    print("done")
"""
    )
    assert said == "done\n"


def test_the_default_model_answers_without_the_parts() -> None:
    body = """
from bankfull.cli import main
sys.argv = ["bankfull"]
try:
    main(["run", "The river is", "--max-tokens", "4", "--temperature", "0", "--device", "cpu", "--json"])
except SystemExit as end:
    assert not end.code
assert left_out() == list(LEFT_OUT), left_out()
"""
    assert '"text"' in in_a_process(body)
