"""The import of Ray, which is an optional package, and the versions that are refused."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bankfull.errors import ConfigError

OLDEST = (2, 52)
"""The first version with token authentication. Older ones have published advisories: their ports accept commands from
any process that reaches them."""


def installed_version() -> str:
    """Ray's version, without its import. Raises ConfigError if Ray is missing or too old."""
    try:
        installed = version("ray")
    except PackageNotFoundError:
        raise ConfigError("Replicas need Ray, which is not installed: pip install 'bankfull[ray]'.") from None
    check_version(installed)
    return installed


def import_ray() -> Any:
    """The module `ray`. Raises ConfigError if it is missing or too old."""
    installed_version()
    import ray

    return ray


def check_version(found: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST:
        least = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"Ray {found} is refused: versions before {least} have known security advisories; "
            "pip install --upgrade 'bankfull[ray]'."
        )
