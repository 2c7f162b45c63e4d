"""Quantizes a model into files, tensor by tensor or layer by layer; an interrupted run continues."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from bankfull import __version__
from bankfull.errors import ConfigError
from bankfull.quantize.fp8 import scale_name
from bankfull.quantize.method import LayerData, Method
from bankfull.quantize.neurons import SIZE
from bankfull.quantize.recipe import NEURONS, OUTLIERS, QuantizeRecipe, refuse_without_use
from bankfull.quantize.recording import CPU
from bankfull.quantize.rtn import rounded
from bankfull.quantize.table import make_method
from bankfull.quantize.walk import WalkOptions, walk
from bankfull.weights.fetch import Report
from bankfull.weights.fingerprint import weights_fingerprint
from bankfull.weights.formats import SCHEMES, two_of_four
from bankfull.weights.formats.dense import BY_DTYPE, DTYPES
from bankfull.weights.outliers import OutlierSource, outlier_count
from bankfull.weights.qtensor import QTensor, Scheme
from bankfull.weights.requantized import block_types, is_inner_matrix, is_matrix, is_table
from bankfull.weights.source import ModelFiles
from bankfull.weights.sparse_source import compressed
from bankfull.weights.writing.compressed_tensors import CompressedTensors, outlier_bytes
from bankfull.weights.writing.gguf import GgufFile
from bankfull.weights.writing.output import OutputFolder, PlannedFile, output_folder, refuse_existing
from bankfull.weights.writing.target import TargetTensor

LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
EXPANDED = torch.float16
"""Dtype of tensors that a GGUF file holds in blocks and that a model directory holds unquantized."""


class FileForm(Protocol):
    """A format of files."""

    def refuse(self) -> None: ...

    def planned(self) -> list[PlannedFile]: ...

    def scheme(self, target: TargetTensor) -> Scheme:
        """The scheme in which the files hold a tensor."""
        ...

    def stored(self, target: TargetTensor) -> Sequence[str]:
        """Names in the files of the tensors that hold a tensor of the model."""
        ...

    def encoded(self, target: TargetTensor, tensor: QTensor) -> dict[str, Tensor]: ...

    def finish(self, folder: OutputFolder, planned: Sequence[PlannedFile]) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedModel:
    path: Path
    """What runs it: the directory, or the .gguf file in it."""
    bits_per_weight: float
    """Bits per weight of the quantized matrices, scales included."""
    model_bits: float
    """Bits per weight of all matrices, with embeddings and the head."""
    bytes_before: int
    bytes_after: int
    quantized: int
    kept: int
    """Matrices that were meant and fit no group."""
    resumed_bytes: int
    seconds: float


def save_quantized(
    files: ModelFiles,
    recipe: QuantizeRecipe,
    target: Path,
    *,
    requantize: bool = False,
    sequences: Sequence[Sequence[int]] = (),
    given: ModelFiles | None = None,
    device: torch.device = CPU,
    report: Report = lambda what, done, total: None,
) -> SavedModel:
    """Write the quantized model to the new directory `target`. `sequences`: token ids of the calibration text. `given`:
    the model as it was, if `files` were changed from it with this recipe. `device`: where a calibrated method
    computes."""
    begun = perf_counter()
    before = given or files
    refuse_early(before, target, requantize)
    all_names = files.source.names()
    meant = [name for name in all_names if is_inner_matrix(files.source, name)]
    refuse_without_use(recipe, files.source, meant)
    targets = [_target(files, recipe, name) for name in all_names]
    if recipe.activations == "fp8-static":
        targets += [TargetTensor(scale_name(name), (1,), BY_DTYPE[torch.float32]) for name in meant]
    unfit = [t.name for t in targets if t.name in set(meant) and t.scheme.name != _wanted(recipe, t)]
    # Pruning keeps the numbers, and a mixture may choose to keep a scheme.
    kept = [] if recipe.sparsity else [name for name in unfit if name not in recipe.types]
    if recipe.drops_zeros:
        kept = [t.name for t in targets if t.name in set(meant) and not t.scheme.is_sparse]
    form = _form(files, recipe, targets)
    form.refuse()
    planned = form.planned()
    text = hashlib.sha256(json.dumps(sequences).encode()).hexdigest()
    columns = files.source.columns if isinstance(files.source, OutlierSource) else {}
    about = [recipe.about(), dict(recipe.types), weights_fingerprint(files.path), text, columns]
    identity = json.dumps(about, sort_keys=True)
    scales = scale_dtype_of(files, recipe)
    method = make_method(recipe, scales)
    total = sum(place.nbytes for file in planned for place in file.places)
    with output_folder(target, planned, identity) as folder:
        resumed = written = folder.resumed_bytes
        missing = [t for t in targets if any(folder.lacks(name) for name in form.stored(t))]
        what = f"Quantizing {files.path.name}"
        report(what, written, total)
        by_name = {t.name: t for t in missing}
        with finished_layers(target, identity) as kept_layers:
            options = WalkOptions(sequences, kept_layers, {"identity": identity}, device=device)
            for name, tensor in produced(files, method, missing, options, scales):
                for stored, data in form.encoded(by_name[name], tensor).items():
                    written += folder.put(stored, data)
                report(what, written, total)
            form.finish(folder, planned)
    matrices = [t for t in targets if is_matrix(files.source, t.name)]
    changed = [t for t in matrices if t.name in set(meant) - set(kept)]
    return SavedModel(
        path=target / planned[0].name if recipe.form == "gguf" else target,
        bits_per_weight=_bits(form, changed),
        model_bits=_bits(form, matrices),
        bytes_before=sum(_bytes(t.shape, t.scheme) for t in (_source_target(before, name) for name in all_names)),
        bytes_after=total,
        quantized=len(changed),
        kept=len(kept),
        resumed_bytes=resumed,
        seconds=perf_counter() - begun,
    )


def refuse_early(files: ModelFiles, target: Path, requantize: bool) -> None:
    """Refuses what no recipe could change, before anything long begins."""
    refuse_existing(target)
    if (types := block_types(files.source)) and not requantize:
        raise ConfigError(
            f"{files.path.name} is quantized already ({', '.join(types)}), so that its weights would be rounded twice; "
            "give an unquantized checkpoint, or --requantize."
        )


@contextmanager
def finished_layers(target: Path, identity: str, what: str = "layers") -> Iterator[Path]:
    """A folder beside the target for what is done; it goes when the model is whole. That of other recipes goes at
    once."""
    own = f".{target.name}.{what}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    for other in target.parent.glob(f".{glob.escape(target.name)}.{what}-*"):
        if other.name != own:
            shutil.rmtree(other, ignore_errors=True)
    folder = target.with_name(own)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def produced(
    files: ModelFiles,
    method: Method,
    targets: Sequence[TargetTensor],
    options: WalkOptions,
    scale_dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, QTensor]]:
    """The tensors that are still to be written."""
    if method.calibrated:
        wanted = {target.name: target for target in targets}
        for name, tensor in walk(files, method, options):
            if name in wanted:
                yield name, as_meant(tensor.plain, wanted[name], scale_dtype)
        return
    for target in targets:
        tensor = files.source.get(target.name)
        tensor = tensor if target.outliers is not None else tensor.plain
        if not target.scheme.is_dense and target.scheme != tensor.scheme:
            number = LAYER.search(target.name)
            layer = LayerData(int(number[1]) if number else -1, {target.name: tensor.dequantize()})
            if not is_table(target.name):
                method.quantize(layer)
                tensor = layer.quantized[target.name]
        yield target.name, as_meant(tensor, target, scale_dtype)


def as_meant(tensor: QTensor, target: TargetTensor, scale_dtype: torch.dtype) -> QTensor:
    """What is in no layer is rounded to nearest, whatever the method: embeddings, heads, projections beside them, and
    modules that only drafts run. Pruned matrices lose their zeros."""
    if target.scheme.is_dense or target.scheme == tensor.scheme:
        return tensor
    if target.scheme.is_sparse:
        return compressed(tensor, target.scheme.parts[0].dtype, target.name)
    assert tensor.is_dense, (target.name, tensor.scheme.name, target.scheme.name)
    return rounded(tensor.dequantize(), target.scheme.name, scale_dtype=scale_dtype)


def _form(files: ModelFiles, recipe: QuantizeRecipe, targets: Sequence[TargetTensor]) -> FileForm:
    if recipe.form == "gguf":
        return GgufFile(files, targets, files.path.stem if files.kind == "gguf" else files.path.name)
    changes = {SIZE: files.config[SIZE]} if recipe.method == NEURONS else {}
    about = {"bankfull": __version__, **recipe.about()}
    return CompressedTensors(files, targets, recipe.activations, about, changes)


def _target(files: ModelFiles, recipe: QuantizeRecipe, name: str) -> TargetTensor:
    target = _source_target(files, name)
    scheme = recipe.scheme_for(name, target.shape[-1]) if is_inner_matrix(files.source, name) else None
    if scheme is None and recipe.tables and is_matrix(files.source, name) and is_table(name):
        scheme = recipe.table_scheme_of(target.shape[-1])
    if scheme is not None:
        kept = outlier_count(files.source, name) if recipe.method == OUTLIERS else None
        return TargetTensor(name, target.shape, SCHEMES[scheme], kept)
    if not target.scheme.is_dense and recipe.form != "gguf":
        dense = EXPANDED if target.scheme.is_rounded else target.scheme.parts[0].dtype
        target = TargetTensor(name, target.shape, BY_DTYPE[dense])
    sparse = two_of_four.BY_DTYPE.get(target.scheme.parts[0].dtype)
    if not recipe.drops_zeros or sparse is None or not is_inner_matrix(files.source, name):
        return target
    return target if target.shape[-1] % sparse.block else TargetTensor(name, target.shape, sparse)


def _source_target(files: ModelFiles, name: str) -> TargetTensor:
    return TargetTensor(name, files.source.shape(name), files.source.scheme(name))


def _wanted(recipe: QuantizeRecipe, target: TargetTensor) -> str | None:
    return recipe.scheme_for(target.name, target.shape[-1])


def scale_dtype_of(files: ModelFiles, recipe: QuantizeRecipe) -> torch.dtype:
    """Other engines hold scales in the dtype of the model, so that bfloat16 scales mean the same everywhere."""
    table = next((name for name in files.source.names() if is_table(name)), None)
    if recipe.form == "gguf" or table is None or files.source.scheme(table).name != "bf16":
        return torch.float32
    return DTYPES["bf16"]


def _bits(form: FileForm, targets: Sequence[TargetTensor]) -> float:
    stored = sum(_bytes(t.shape, form.scheme(t)) + outlier_bytes(t) for t in targets)
    return 8 * stored / max(1, sum(prod(t.shape) for t in targets))


def _bytes(shape: tuple[int, ...], scheme: Scheme) -> int:
    return prod(shape[:-1]) * scheme.row_bytes(shape[-1] if shape else 1)
