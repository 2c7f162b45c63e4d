"""A model as an engine would run it, without its weights: the configuration, how each tensor is stored, the dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.limits.meter.metered import AskedShapes, MeteredModel, dense_scheme
from bankfull.loading import choose_arithmetic, choose_kv_dtype
from bankfull.models.registry import Config, family_of
from bankfull.ops.meter import Meter
from bankfull.ops.registry import BF16, FLOAT
from bankfull.state.spec import Paged, layout_of
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.hub import config_from_hub, looks_like_hub_id
from bankfull.weights.locate import locate
from bankfull.weights.requantized import Requantized, block_types, parse_wish
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles, open_model


@dataclass(frozen=True, slots=True)
class Recipe:
    files: ModelFiles
    run: RunConfig
    """What was asked for; the fields below are what it came to."""
    config: Config
    schemes: Mapping[str, Scheme]
    """By the names of tensors; what is not here is dense."""
    dtype: torch.dtype
    """Of the computation."""
    kv_dtype: torch.dtype
    activations: str = FLOAT
    windows: tuple[int | None, ...] | None = None
    """How far back each layer sees; None = as the configuration says."""

    @staticmethod
    def of_build(files: ModelFiles, build: Build) -> Recipe:
        """Of a model that is loaded."""
        dtype = str(build.dtype).removeprefix("torch.")
        # What was chosen by `auto` is chosen again for other storage; a wider computation stays as it is.
        run = RunConfig(dtype=dtype, activations=FLOAT) if build.kit.activations == FLOAT else RunConfig()
        schemes = {} if build.expand else {name: files.source.scheme(name) for name in files.source.names()}
        return Recipe(files, run, files.config, schemes, build.dtype, build.pages, build.kit.activations)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def matrices(self) -> torch.dtype:
        """Of those that are not in blocks, while they are multiplied."""
        return torch.bfloat16 if self.activations == BF16 else self.dtype

    @property
    def blocks(self) -> list[str]:
        """The quantized types that it is stored in."""
        return sorted({scheme.name for scheme in self.schemes.values() if not scheme.is_dense})

    def metered(self, meter: Meter | None = None) -> MeteredModel:
        dense = dense_scheme(self.matrices)

        def choose(name: str, shape: tuple[int, ...]) -> Scheme:
            wanted = self.schemes.get(name, dense)
            return wanted if not wanted.is_dense and shape[-1] % wanted.block == 0 else dense

        made = MeteredModel(
            self.config,
            dtype=self.dtype_name,
            kv_dtype=self.kv_dtype,
            activations=self.activations,
            meter=meter,
            shapes=AskedShapes(choose, self.schemes),
        )
        if self.windows is not None:
            _see(made, self.windows)
        return made


def _see(metered: MeteredModel, windows: tuple[int | None, ...]) -> None:
    """Layers look back as far as `windows` says. Families know only their own pattern, so their layers are changed."""
    for mixer, window in zip(metered.model.mixers, windows, strict=True):
        if isinstance(mixer, Attention) and isinstance(pages := mixer.states[0], Paged):
            mixer.heads = replace(mixer.heads, window=window)
            mixer.states = (replace(pages, window=window),)
    metered.layout = layout_of(metered.model.states(), metered.layout.block_tokens)


def open_subject(name: str) -> ModelFiles | Config:
    """A model's files, or its configuration where there are no weights: a config.json is enough, and of a hub id
    nothing else is downloaded."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _configuration(path)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return _configuration(path / "config.json")
    if looks_like_hub_id(name) and not name.endswith(".gguf") and not path.exists() and not path.parent.is_dir():
        config = config_from_hub(name)
        if config is not None:
            return _configuration(config)
    return open_model(locate(name))


def _configuration(path: Path) -> Config:
    config = normalize_config(read_json(path))
    family_of(config)
    return config


def recipe_of(model: ModelFiles | Config, device: str, run: RunConfig | None = None) -> Recipe:
    """As the engine would run it on a kind of device ("cpu", "cuda") with these options."""
    run = run or RunConfig()
    files = unrounded = model if isinstance(model, ModelFiles) else imagined(model)
    if run.quantize is not None:
        if found := block_types(files.source):
            raise ConfigError(
                f"{files.path.name} is quantized already ({', '.join(found)}), so that quantize={run.quantize[:40]!r} "
                "would lose twice; leave the option out, or give an unquantized checkpoint."
            )
        wish = parse_wish(run.quantize, device)
        files = replace(files, source=Requantized(files.source, wish.types, wish.tables))
    dtype, activations = choose_arithmetic(files, run, device)
    schemes = {name: files.source.scheme(name) for name in files.source.names()}
    pages = choose_kv_dtype(run.kv_dtype, dtype, activations)
    return Recipe(unrounded, run, files.config, schemes, dtype, pages, activations)


def imagined(config: Config) -> ModelFiles:
    """The files that a configuration would have: all tensors dense, in the dtype that it names."""
    saved = str(config.get("dtype") or "bfloat16").removeprefix("torch.")
    if saved not in {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}:
        raise ModelError(f"The configuration names the dtype {saved[:40]!r}, which is unknown.")
    shapes = MeteredModel(config, dtype=saved).shapes
    return ModelFiles(Path("config.json"), "hf", {**config, "dtype": saved}, shapes, {}, {})
