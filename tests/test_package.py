"""The package as a whole: what importing it costs, what it does without its optional halves, what it says of itself."""

from __future__ import annotations

import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bankfull

ROOT = Path(__file__).parent.parent

BLOCK = """
import sys

class Block:
    def __init__(self, *names):
        self.names = names
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in self.names):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def block(*names):
    sys.meta_path.insert(0, Block(*names))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def output_of(code: str) -> str:
    done = python(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'llguidance', 'msgspec', 'typer', 'rich'}"
    assert output_of(f"import bankfull; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        bankfull.NoSuchThing  # noqa: B018


def test_every_exported_name_is_listed() -> None:
    assert {"LLM", "AsyncEngine", "SamplingParams", "__version__"} <= set(dir(bankfull))


@pytest.mark.parametrize("name", ["LLM", "AsyncEngine", "SamplingParams"])
def test_an_exported_name_is_found_where_it_lives(name: str) -> None:
    assert getattr(bankfull, name).__name__ == name


# What only serves one feature; the rest of the package must work without it.
CORE = [name for _, name, _ in pkgutil.iter_modules(bankfull.__path__) if name not in ("__main__", "_native", "cli")]


def test_the_core_imports_without_the_libraries_of_single_features() -> None:
    assert {"ops", "weights", "sched"} <= set(CORE)
    imports = "".join(f"import bankfull.{name}\n" for name in CORE)
    output_of("block('llguidance', 'msgspec', 'transformers', 'gguf', 'sentencepiece', 'huggingface_hub')\n" + imports)


def test_the_core_runs_without_the_libraries_of_single_features() -> None:
    """A whole request, text to text; only a structured one needs llguidance, and says so."""
    from tests.tiny import speaking_folder

    code = f"""
block('llguidance', 'msgspec', 'transformers', 'gguf', 'sentencepiece', 'huggingface_hub')
from bankfull import LLM, SamplingParams
from bankfull.errors import RequestError
from bankfull.sample.params import StructuredOutput
llm = LLM({str(speaking_folder())!r}, memory='8MiB')
out = llm.generate('The river', SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
assert len(out.outputs[0].token_ids) == 5
try:
    llm.generate('The river', SamplingParams(structured=StructuredOutput(choice=['a'])))
except RequestError as error:
    print(error)
"""
    assert "llguidance" in output_of(code)


def test_without_the_native_extension_a_request_is_served_and_one_line_says_so() -> None:
    from tests.tiny import speaking_folder

    code = f"""
block('bankfull._native')
from bankfull import LLM, SamplingParams
for _ in range(2):
    llm = LLM({str(speaking_folder())!r}, memory='8MiB')
    assert llm.generate('The river', SamplingParams(max_tokens=3, ignore_eos=True))[0].finished
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("native CPU kernels are missing") == 1 and done.stderr.count("\n") == 1


def test_without_the_native_extension_linear_works_and_one_line_says_so() -> None:
    code = """
block('bankfull._native')
import torch
from bankfull.ops import kit_for, linear, native
from bankfull.weights.qtensor import QTensor
weight = QTensor.dense(torch.eye(32))
x = torch.arange(64.0).reshape(2, 32)
run = kit_for('cpu').bind(linear, dtype=torch.float32, weight=weight)
assert torch.equal(run(x, weight), x)
native.notify()
native.notify()
native.set_threads(1)
assert native.threads() == 1 and native.select_isa() is None
print(native.status())
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    line = done.stdout.strip()
    assert "native CPU kernels are missing" in line and "\n" not in line
    assert done.stderr.strip() == f"bankfull: {line}"


def test_an_instruction_set_that_nothing_can_honour_is_refused() -> None:
    done = python(
        "block('bankfull._native')\nimport os; os.environ['BANKFULL_ISA'] = 'avx2'\n"
        "from bankfull.ops import native\nnative.notify()\n"
    )
    assert "ConfigError: BANKFULL_ISA='avx2' has no effect" in done.stderr


def test_version_and_license_agree_everywhere() -> None:
    try:
        metadata = importlib.metadata.metadata("bankfull")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("bankfull is not installed")
    assert metadata["Version"] == bankfull.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert f"## {bankfull.__version__}" in (ROOT / "CHANGELOG.md").read_text()
