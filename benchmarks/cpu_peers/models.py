"""The same model in the format of each engine."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from benchmarks.cpu_peers.install import CannotInstall

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mamba": "MambaForCausalLM",
    "opt": "OPTForCausalLM",
}


def vocabulary(model: Path) -> int:
    from bankfull.weights.source import open_model

    return int(open_model(model).config["vocab_size"])


def gguf_only(model: Path) -> Path:
    if model.suffix != ".gguf":
        raise CannotInstall(f"llama.cpp reads .gguf files only, and {model.name} is not one")
    return model


def requantized(model: Path, work: Path, quantizer: str, kind: str) -> Path:
    """Another storage type of a .gguf file, converted by llama.cpp itself, which quantizes a second time."""
    target = work / "models" / f"{gguf_only(model).stem}.{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        command = [quantizer, "--allow-requantize", str(model), str(partial), kind]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotInstall(f"{model.name} could not be stored as {kind}: {done.stderr.strip()[-200:]}")
        partial.rename(target)
    return target


def widened(model: Path, work: Path) -> Path:
    """A directory with bfloat16 weights for engines that do not read .gguf files; a directory is returned as is."""
    if model.is_dir():
        return model
    target = work / "models" / f"{model.stem}.bf16"
    if not target.exists():
        import torch
        from safetensors.torch import save_file

        from bankfull.weights.source import open_model

        files = open_model(model)
        kind = str(files.config["model_type"])
        if kind not in ARCHITECTURES:
            raise CannotInstall(
                f"{model.name} cannot be converted for other engines: the architecture class of {kind!r} is unknown"
            )
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {n: files.source.get(n).dequantize(torch.bfloat16).contiguous() for n in files.source.names()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        config = {**files.config, "architectures": [ARCHITECTURES[kind]], "dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(config, indent=1, default=str))
        partial.rename(target)
    return target
