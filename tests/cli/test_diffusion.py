"""`bankfull bench diffusion`."""

from __future__ import annotations

from pathlib import Path

from tests.bench.test_diffusion import model_with_text
from tests.cli.conftest import Cli
from tests.tiny import speaking_folder


def test_the_command_prints_all_figures(cli: Cli, tmp_path: Path) -> None:
    folder = model_with_text("sdar", tmp_path / "model")
    asked = ("bench", "diffusion", "-m", folder, "--with", "threshold=1", "--with", "tokens=2", "--output-len", 8)
    short = ("--prompt-len", 8, "--reps", 1)
    done = cli(*asked, *short)
    assert done.code == 0 and "per forward" in done.out and "tokens=2" in done.out
    found = cli(*asked, *short, "--json").json["ways"]
    assert [one["diffusion"] for one in found] == ["threshold=1", "tokens=2"]
    assert all({"tokens_per_s", "tokens_per_forward", "equal_share", "kl"} <= one.keys() for one in found)
    (tmp_path / "prompts.txt").write_text("!#%\n\n&&\n")
    assert cli(*asked, "--reps", 1, "--prompts", tmp_path / "prompts.txt").code == 0
    (tmp_path / "empty.txt").write_text("\n")
    assert "has no prompts" in cli(*asked, "--prompts", tmp_path / "empty.txt").sentence
    assert "cannot be read" in cli(*asked, "--prompts", tmp_path / "none.txt").sentence
    assert "no option 'speed'" in cli(*asked, "--with", "speed=3").sentence
    causal = cli("bench", "diffusion", "-m", speaking_folder(), *short)
    assert "needs a diffusion model" in causal.sentence
