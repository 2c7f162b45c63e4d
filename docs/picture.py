"""Draws docs/demo.svg from what the commands really print: `python docs/picture.py`."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    ["run", "What is a river? Answer in two sentences.", "--seed", "1"],
    ["info", "smollm2", "--roofline"],
)


def main() -> None:
    console = Console(record=True, width=112, file=io.StringIO())
    for arguments in COMMANDS:
        shown = " ".join(f'"{a}"' if " " in a else a for a in arguments)
        console.print(Text(f"$ bankfull {shown}", style="bold green"))
        done = subprocess.run(
            [sys.executable, "-m", "bankfull", *arguments], capture_output=True, text=True, check=True
        )
        home = re.escape(str(Path.home()))
        console.print(Text(re.sub(home, "~", done.stdout.rstrip())))
        if done.stderr:
            console.print(Text(done.stderr.rstrip(), style="cyan"))
        console.print()
    # Without the fonts that it would load from elsewhere: a picture in a repository stands alone.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="bankfull"), flags=re.DOTALL)
    picture = re.sub(r"<!--.*?-->\s*", "", picture).replace("Fira Code, monospace", "monospace")
    Path(__file__).with_name("demo.svg").write_text(picture)


if __name__ == "__main__":
    main()
