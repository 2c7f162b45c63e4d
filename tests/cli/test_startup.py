"""A command's quick start gives the same torch, the same model and the same errors as a plain one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.tiny import speaking_folder

ROOT = Path(__file__).parents[2]


def run_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="maps of a process")
def test_the_libraries_are_loaded_before_torch_is_imported_and_torch_uses_them() -> None:
    program = """
import sys
from bankfull.cli.startup import load_torch_libraries
def loaded():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if "libtorch_cpu" in line}
load_torch_libraries()
early = loaded()
assert early and "torch" not in sys.modules
import torch
assert loaded() == early
heads = [torch.ones(1, 2, 3, 4)] * 3
print(torch.nn.functional.scaled_dot_product_attention(*heads).sum().item())
"""
    assert run_python(program) == "24.0\n"


def test_a_command_leaves_torch_whole_and_the_import_system_as_it_was() -> None:
    program = f"""
import sys
finders = list(sys.meta_path)
from bankfull.cli.app import run_command
assert run_command(["run", "Hello", "--max-tokens", "2", "--no-limit", "-m", {str(speaking_folder())!r}]) == 0
from torch._meta_registrations import meta_conv
print()
print(set(sys.meta_path) - set(finders), "torch._decomp" in sys.modules)
"""
    assert run_python(program).splitlines()[-1] == "set() True"


def test_the_text_is_read_once(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    import bankfull.loading
    import bankfull.text.load

    read, reads = bankfull.text.load.load_tokenizer, []
    counting = lambda files: reads.append(files.path) or read(files)  # noqa: E731
    monkeypatch.setattr(bankfull.text.load, "load_tokenizer", counting)
    monkeypatch.setattr(bankfull.loading, "load_tokenizer", counting)
    assert cli("run", "Hello", "--max-tokens", "1", "--no-limit", "-m", str(speaking_folder())).code == 0
    assert len(reads) == 1


def test_missing_weights_are_reported_before_a_missing_tokenizer(cli: Cli, tmp_path: Path) -> None:
    """The text is read first, but its problems are reported in the order in which a model is loaded."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "holds no weights" in cli("run", "Hello", "-m", str(tmp_path)).sentence


def test_an_option_is_refused_before_the_model_is_looked_for(cli: Cli) -> None:
    done = cli("run", "Hello", "--kv-dtype", "int3", "-m", "./no-such-model")
    assert "int3" in done.sentence and "no-such-model" not in done.sentence
