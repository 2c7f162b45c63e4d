"""`bankfull serve` on a tiny model that may talk for long, on a machine whose ceilings were measured. It runs in the
main environment: the browser's own one has no bankfull."""

from __future__ import annotations

import json
import subprocess
import sys

from bankfull.cli import main
from tests.tiny import speaking_folder

CONTEXT = 100_000
OPTIONS = ["--served-model-name", "tiny", "--dtype", "float32", "--memory", "256MiB", "--rows", "8"]

if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "bankfull", "limits"], check=True, stdout=subprocess.DEVNULL)
    folder = speaking_folder()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    sys.argv = ["bankfull", "serve", str(folder), "--port", sys.argv[1], *OPTIONS]
    sys.exit(main())
