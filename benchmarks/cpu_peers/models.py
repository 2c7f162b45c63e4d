"""The same model in the form that each engine reads."""

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
        raise CannotInstall(f"llama.cpp reads .gguf files only, and {model.name} is none")
    return model


def requantized(model: Path, work: Path, quantizer: str, kind: str) -> Path:
    """Another storage type of a .gguf file, made by llama.cpp itself: what was rounded once is rounded again."""
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
    """A directory with bfloat16 weights, for engines that read no .gguf files; a directory is taken as it is."""
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
            raise CannotInstall(f"{model.name} cannot be stored for other engines: nobody said what they call {kind!r}")
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {n: files.source.get(n).dequantize(torch.bfloat16).contiguous() for n in files.source.names()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        config = {**files.config, "architectures": [ARCHITECTURES[kind]], "dtype": "bfloat16"}
        (partial / "config.json").write_text(json.dumps(config, indent=1, default=str))
        partial.rename(target)
    return target
