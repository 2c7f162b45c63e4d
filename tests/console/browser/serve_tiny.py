"""`bankfull serve` with a tiny model of long context, on a machine with measured ceilings."""

from __future__ import annotations

import json
import sys

from bankfull.cli import main
from bankfull.limits.machine import ceilings
from tests.tiny import speaking_folder

CONTEXT = 100_000
OPTIONS = ["--port", "0", "--served-model-name", "tiny", "--dtype", "float32", "--memory", "256MiB", "--rows", "8"]

if __name__ == "__main__":
    ceilings.measure(budget=1.0)
    folder = speaking_folder()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    sys.argv = ["bankfull", "serve", str(folder), *OPTIONS]
    sys.exit(main())
