"""What a command leaves undone at its start is done as soon as anybody could miss it."""

import subprocess
import sys
from pathlib import Path

from tests.tiny import speaking_folder

ROOT = Path(__file__).parents[2]


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_command_does_not_wait_for_what_only_compilers_need() -> None:
    program = f"""
import sys
from bankfull.cli.app import run_command
assert run_command(["run", "Hello", "--max-tokens", "2", "--no-limit", "-m", {str(speaking_folder())!r}]) == 0
print("loaded:", sorted({{"torch._decomp", "torch._refs", "torch._prims"}} & set(sys.modules)))
"""
    assert run_python(program).splitlines()[-1] == "loaded: []"


def test_a_module_that_torch_had_not_imported_finds_torch_whole() -> None:
    """Tracing works by then, and knows what an attention would give, which nothing but the deferred module tells."""
    program = """
import sys
from bankfull.cli.startup import soon
with soon():
    import torch
assert "torch._decomp" not in sys.modules
import torch._dynamo
assert "torch._decomp" in sys.modules
from torch._meta_registrations import meta_conv
heads = [torch.empty(1, 2, 3, 4, device="meta")] * 3
print(tuple(torch.nn.functional.scaled_dot_product_attention(*heads).shape), meta_conv.__name__)
"""
    assert run_python(program) == "(1, 2, 3, 4) meta_conv\n"


def test_a_torch_that_is_there_stays_as_it_is() -> None:
    program = """
import sys
import torch
before = set(sys.meta_path), set(sys.modules)
from bankfull.cli.startup import soon
with soon():
    pass
print(set(sys.meta_path) == before[0], "torch._decomp" in before[1])
"""
    assert run_python(program) == "True True\n"
