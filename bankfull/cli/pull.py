"""`bankfull pull`: have a model's files on this machine before they are needed."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[str, typer.Argument(help="A hub id (org/name), or a short name (smollm2).")] = "smollm2",
) -> None:
    """Download a model if it is not here yet, and print where it is.

    A model with a short name is checked against its pinned SHA-256, also when it was here already.
    """
    from bankfull.weights.fetch import SHORT_NAMES, verify
    from bankfull.weights.locate import locate

    path = locate(model)
    if model in SHORT_NAMES:
        verify(path, SHORT_NAMES[model])
    print(path)
