"""`bankfull pull`: download a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[str, typer.Argument(help="A hub id (org/name), or a short name (smollm2).")] = "smollm2",
) -> None:
    """Download a model unless it is cached, and print its path.

    A model with a short name is verified against its pinned SHA-256, even if it is cached.
    """
    from bankfull.weights.fetch import SHORT_NAMES, verify
    from bankfull.weights.locate import locate

    path = locate(model)
    if model in SHORT_NAMES:
        verify(path, SHORT_NAMES[model])
    print(path)
