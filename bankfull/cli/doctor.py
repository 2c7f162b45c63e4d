"""`bankfull doctor`: the facts about this machine that a bug report needs, and no private data."""

from __future__ import annotations

import json as json_text
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bankfull.cli.options import Json

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "llguidance",
    "msgspec",
    "typer",
    "rich",
    "huggingface_hub",
)
FILES_COUNTED = 100_000


def doctor(json: Json = False) -> None:
    """Print versions, devices, kernels, the cache and the measured limits, for a bug report."""
    report = examine()
    if json:
        print(json_text.dumps(report))
        return
    for title, part in report.items():
        print(title)
        for name, value in part.items():
            print(f"  {name}: {_shown(value)}")


def examine() -> dict[str, dict[str, Any]]:
    from bankfull import __version__

    return {
        "versions": {"bankfull": __version__, "python": platform.python_version(), **_packages()},
        "machine": _machine(),
        "kernels": _kernels(),
        "devices": _devices(),
        "cache": _cache(),
        "limits": _limits(),
    }


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _machine() -> dict[str, Any]:
    from bankfull.limits.machine.cpu_ceilings import machine
    from bankfull.ops.native import memory_nodes, thread_choice
    from bankfull.runtime.host import available_memory

    known, chosen = machine(), thread_choice()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": known["cpu"],
        "cores": known["cores"],
        "threads": chosen.threads,
        "threads, why": chosen.why,
        "memory nodes": len(memory_nodes()) or None,
        "free memory, bytes": available_memory(),
    }


def _kernels() -> dict[str, Any]:
    from bankfull.errors import ConfigError
    from bankfull.ops import native
    from bankfull.ops.native.extension import kernels

    if kernels is None:
        return {"native": native.status()}
    try:
        chosen = native.select_isa()
    except ConfigError as error:
        return {"native": f"present, but {error}", "instruction sets": kernels.isas()}
    return {
        "native": "present",
        "instruction set": chosen,
        "instruction sets": kernels.isas(),
        "threads": native.threads(),
    }


def _devices() -> dict[str, Any]:
    import torch

    devices: dict[str, Any] = {"cpu": "yes"}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            devices[f"cuda:{index}"] = f"{facts.name}, {facts.total_memory} bytes, sm {facts.major}.{facts.minor}"
    return devices


def _cache() -> dict[str, Any]:
    from bankfull.errors import ConfigError
    from bankfull.paths import cache_dir

    try:
        folder = cache_dir()
    except ConfigError as error:
        return {"directory": None, "problem": str(error)}
    size = count = 0
    for root, _, names in os.walk(folder):
        for name in names:
            count += 1
            try:
                size += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
        if count > FILES_COUNTED:
            return {"directory": _without_home(folder), "bytes": f"more than {size}", "files": f"more than {count}"}
    return {"directory": _without_home(folder), "bytes": size, "files": count}


def _without_home(path: Path) -> str:
    """A report is public, so the user's home directory is left out."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return str(path)


def _limits() -> dict[str, Any]:
    """Stored measurements only: a report does not wait for a new one."""
    from bankfull.errors import ConfigError
    from bankfull.limits.machine.ceilings import known

    try:
        ceilings = known()
    except ConfigError:
        ceilings = None
    return ceilings.as_json() if ceilings is not None else {"measured": "no; run `bankfull limits`"}


def _shown(value: object, absent: str = "not installed") -> object:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item, 'not measured')}" for key, item in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else absent if value is None else value
