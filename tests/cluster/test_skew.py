"""Nodes with other versions: the server ends with one sentence, and leaves nothing behind."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import bankfull
from tests.cluster.kit import ENGINE, processes, until
from tests.cluster.test_nodes import RayNodes, refused, running_nodes

pytest.importorskip("ray", reason="replicas need the package ray")
pytestmark = [pytest.mark.full, pytest.mark.cluster]

WITHOUT_EDITABLE = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if type(one).__module__ != "_editable_skbc_bankfull"]
"""
"""The package comes from PYTHONPATH, although another one is installed."""

WITHOUT_PACKAGE = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "bankfull":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
"""

OTHER_PYTHON = """
import platform
platform.python_version = lambda: "3.10.1"
"""

OTHER_RAY = """
import importlib.util, pathlib, sys

class Other:
    def find_spec(self, name, path=None, target=None):
        if name == "ray._version":
            return importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name("other_version.py"))

sys.meta_path.insert(0, Other())
"""


def changed(folder: Path, code: str) -> str:
    """A folder for PYTHONPATH: the code runs when Python starts."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    (folder / "other_version.py").write_text("commit = 'other'\nversion = '2.58.0'\n")
    return str(folder)


def assert_unused(nodes: RayNodes) -> None:
    """No replica and no engine is left on the nodes."""

    def left() -> list[str]:
        return [
            command for command in processes(nodes.mark).values() if "EngineReplica" in command or ENGINE in command
        ]

    until(lambda: not left(), 30.0)
    assert nodes.process.poll() is None


def test_a_node_with_another_version_of_the_package(tmp_path: Path) -> None:
    folder = Path(changed(tmp_path / "other", WITHOUT_EDITABLE))
    package = Path(bankfull.__file__).parent
    shutil.copytree(package, folder / "bankfull", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "bankfull" / "__init__.py"
    text = re.sub(r'__version__ = ".*"', '__version__ = "99.9"', file.read_text())
    file.write_text(text)
    with running_nodes(PYTHONPATH=str(folder)) as nodes:
        sentence = f"has bankfull 99.9, this server {bankfull.__version__}: install the same version on all nodes."
        refused(tmp_path, sentence, "--replicas", "3", "--ray", nodes.address, RAY_AUTH_TOKEN=nodes.token)
        assert_unused(nodes)


def test_a_node_without_the_package(tmp_path: Path) -> None:
    with running_nodes(PYTHONPATH=changed(tmp_path / "other", WITHOUT_PACKAGE)) as nodes:
        sentence = f"A node of the cluster has no bankfull {bankfull.__version__}: install the same version"
        refused(tmp_path, sentence, "--replicas", "3", "--ray", nodes.address, RAY_AUTH_TOKEN=nodes.token)
        assert_unused(nodes)


def test_a_server_with_another_python_or_ray(tmp_path: Path) -> None:
    with running_nodes() as nodes:
        for name, code, version in (("python", OTHER_PYTHON, "Python: 3.10.1"), ("ray", OTHER_RAY, "Ray: 2.58.0")):
            variables = {"PYTHONPATH": changed(tmp_path / name, code), "RAY_AUTH_TOKEN": nodes.token}
            options = ("--replicas", "1", "--ray", nodes.address)
            line = refused(tmp_path, "has another version of Ray or Python than this server", *options, **variables)
            assert version in line
            assert_unused(nodes)
