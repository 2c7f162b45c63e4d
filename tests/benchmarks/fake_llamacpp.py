"""Replaces all llama.cpp tools, by the name it is called as: prints figures in their formats, faster without flash
attention, and records its arguments."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

FASTER = {"on": 1.0, "off": 2.0, "auto": 1.0}


def main() -> None:
    tool, given = Path(sys.argv[0]), sys.argv[1:]
    with (tool.parent / "calls").open("a") as calls:
        print(json.dumps([tool.name, *given]), file=calls)
    if (tool.parent / "broken").exists():
        sys.exit("the model is not to my taste")
    if tool.name == "llama-quantize":
        Path(given[-2]).write_text(given[-1])
        return
    option = dict(itertools.pairwise(given))
    factor = FASTER[option["-fa"]] * (10 if (tool.parent / "fast").exists() else 1)
    if tool.name == "llama-bench":
        samples = [factor * rate for rate in (90.0, 100.0, 130.0)]
        print(json.dumps([{"avg_ts": sum(samples) / 3, "samples_ts": samples}]))
    else:
        print("what it says before")
        print(json.dumps({"t": 2.0 / factor, "speed": 1.0, "speed_tg": 50.0 * factor}))
        print("what it says behind")


if __name__ == "__main__":
    main()
