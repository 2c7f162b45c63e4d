"""A model as the engine would run it, without its weights: configuration, storage scheme of each tensor, dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bankfull.config import RunConfig
from bankfull.errors import ConfigError, ModelError
from bankfull.layers.attention import Attention
from bankfull.layers.build import Build
from bankfull.limits.meter.metered import MeteredModel, RequestedShapes, dense_scheme, torch_dtype
from bankfull.models.registry import Config, family_of
from bankfull.ops.meter import Meter
from bankfull.ops.products.activations import EXACT, ActivationRule
from bankfull.precision import as_read, choose_dtype, choose_precision
from bankfull.quantize.at_load import is_rounded, suited_sparsity
from bankfull.quantize.outliers import NAME as LLM_INT8
from bankfull.state.mask import Mask
from bankfull.state.spec import Paged, layout_of
from bankfull.weights.formats.dense import DTYPES
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.hf_config import normalize_config, read_json
from bankfull.weights.hub import config_from_hub, looks_like_hub_id
from bankfull.weights.known_shapes import known_shape
from bankfull.weights.locate import locate
from bankfull.weights.outliers import OutlierSource, outlier_count
from bankfull.weights.presets import preset
from bankfull.weights.requantized import EXPERT, Requantized, block_types, is_inner_matrix, parse_quantization
from bankfull.weights.scheme import Scheme
from bankfull.weights.source import ModelFiles, TensorSource, open_model


@dataclass(frozen=True, slots=True)
class Recipe:
    files: ModelFiles
    run: RunConfig
    """The options given by the user; the fields below are the values chosen from them."""
    config: Config
    schemes: Mapping[str, Scheme]
    """Storage scheme by tensor name; tensors not listed are dense."""
    dtype: torch.dtype
    """Dtype of the computation."""
    kv_dtype: torch.dtype
    activations: ActivationRule = EXACT
    outliers: Mapping[str, int] = field(default_factory=dict)
    """Columns that are kept beside matrices (LLM.int8()), by the matrix's name."""
    kv_evict: Mask | None = None
    """What layers with full attention see instead of all tokens."""
    windows: tuple[int | None, ...] | None = None
    """Attention window of each layer; None = as configured."""

    @staticmethod
    def of_build(files: ModelFiles, build: Build) -> Recipe:
        """The recipe of a loaded model."""
        dtype = str(build.dtype).removeprefix("torch.")
        # Other storage repeats the choices of `auto`; an explicit float computation is kept.
        run = RunConfig() if build.activations.rounds else RunConfig(dtype=dtype, activations=EXACT.name)
        held = replace(files, source=build.source)
        schemes = {} if build.expand else {name: held.source.scheme(name) for name in held.source.names()}
        kept = {} if build.expand else _outliers(held)
        return Recipe(
            files, run, files.config, schemes, build.dtype, build.pages, build.activations, kept, build.kv_evict
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def matrices(self) -> torch.dtype:
        """Dtype in which matrices that are not quantized are multiplied."""
        return self.activations.matrices(self.dtype)

    @property
    def quantized_types(self) -> list[str]:
        """The quantized storage types in use."""
        return sorted({scheme.name for scheme in self.schemes.values() if not scheme.is_dense})

    def metered(self, meter: Meter | None = None) -> MeteredModel:
        dense = dense_scheme(self.matrices)

        def choose(name: str, shape: tuple[int, ...]) -> Scheme:
            wanted = self.schemes.get(name, dense)
            return wanted if not wanted.is_dense and shape[-1] % wanted.block == 0 else dense

        model = MeteredModel(
            self.config,
            dtype=self.dtype_name,
            kv_dtype=self.kv_dtype,
            activations=self.activations,
            kv_evict=self.kv_evict,
            meter=meter,
            shapes=RequestedShapes(choose, self.schemes, stacks_experts=True, outliers=self.outliers),
        )
        if self.windows is not None:
            _set_windows(model, self.windows)
        return model


def _set_windows(metered: MeteredModel, windows: tuple[int | None, ...]) -> None:
    """Set the attention window of each layer. Model families know only their own pattern, so the layers are changed."""
    for mixer, window in zip(metered.model.mixers, windows, strict=True):
        if isinstance(mixer, Attention) and isinstance(pages := mixer.states[0], Paged):
            mixer.heads = replace(mixer.heads, window=window, mask=None)
            mixer.states = (replace(pages, window=window),)
    metered.layout = layout_of(metered.model.states(), metered.layout.block_tokens)


def open_model_or_config(name: str) -> ModelFiles | Config:
    """Open a model's files, or only its configuration: a config.json is enough, and for a hub id nothing else is
    downloaded."""
    path = Path(name).expanduser()
    if (bare := config_without_weights(name)) is not None:
        return bare
    if looks_like_hub_id(name) and not name.endswith(".gguf") and not path.exists() and not path.parent.is_dir():
        config = config_from_hub(name)
        if config is not None:
            return _read_config(config)
    return open_model(locate(name))


def config_without_weights(name: str) -> Config | None:
    """The configuration of a preset, a known shape, a config.json, or a directory that has one and no weights; None
    otherwise. A file or directory comes before a shape of the same name."""
    path = preset(name) or Path(name).expanduser()
    if not path.exists():
        return known_shape(name)
    if path.suffix == ".json" and path.is_file():
        return _read_config(path)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return _read_config(path / "config.json")
    return None


def _read_config(path: Path) -> Config:
    config = normalize_config(read_json(path))
    family_of(config)
    return config


def recipe_of(model: ModelFiles | Config, device: str, run: RunConfig | None = None) -> Recipe:
    """The recipe that the engine would choose on a kind of device ("cpu", "cuda") with these options."""
    run = run or RunConfig()
    unrounded = model if isinstance(model, ModelFiles) else files_for_config(model)
    files = suited_sparsity(unrounded, run, device, choose_dtype(run.dtype, unrounded, device))
    if run.quantize is not None and is_rounded(run):
        if types := block_types(files.source):
            raise ConfigError(
                f"{files.path.name} is quantized already ({', '.join(types)}), so that quantize={run.quantize[:40]!r} "
                "would lose twice; leave the option out, or give an unquantized checkpoint."
            )
        if run.quantize == LLM_INT8:
            files = replace(files, source=_with_outliers(files.source))
        else:
            wish = parse_quantization(run.quantize, device)
            files = replace(files, source=Requantized(files.source, wish.types, wish.tables))
    files = as_read(files, run, device)
    chosen = choose_precision(files, run, device)
    schemes = {name: files.source.scheme(name) for name in files.source.names()}
    return Recipe(
        unrounded, run, files.config, schemes, chosen.dtype, chosen.pages, chosen.activations, _outliers(files)
    )


def _outliers(files: ModelFiles) -> dict[str, int]:
    counts = {name: outlier_count(files.source, name) for name in files.source.names()}
    return {name: count for name, count in counts.items() if count is not None}


def _with_outliers(source: TensorSource) -> OutlierSource:
    """The matrices as LLM.int8() has them. Which columns are outliers is known only after calibration: none count."""
    linears = [name for name in source.names() if is_inner_matrix(source, name) and len(source.shape(name)) == 2]
    columns: dict[str, Sequence[int]] = {name: () for name in linears if not EXPERT.search(name)}
    return OutlierSource(Requantized(source, (INT8_ROW,)), columns, torch.device("meta"))


def files_for_config(config: Config, name: str = "config.json") -> ModelFiles:
    """The files that a configuration would have: all tensors dense, in the configured dtype. `name`: as shown."""
    saved = str(config.get("dtype") or "bfloat16").removeprefix("torch.")
    known = {str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
    if saved not in known:
        raise ModelError(
            f"The configuration has the unknown dtype {saved[:40]!r}; use one of {', '.join(sorted(known))}."
        )
    stored = dense_scheme(torch_dtype(saved, config))
    requested = RequestedShapes(lambda name, shape: stored, stacks_experts=True)
    shapes = MeteredModel(config, dtype=saved, shapes=requested).shapes
    return ModelFiles(Path(name), "hf", {**config, "dtype": saved}, shapes, {}, {})
