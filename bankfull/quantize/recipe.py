"""What a user asked of `bankfull quantize`, checked: the method, the width of weights, and the form of the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bankfull.config import parse_memory
from bankfull.errors import ConfigError
from bankfull.quantize.allocation import Budget
from bankfull.quantize.sparse import parse_pattern
from bankfull.weights.formats import SCHEMES, kquants, legacy
from bankfull.weights.formats.groups import GROUPS, name_of, widest_group
from bankfull.weights.formats.rows import FP8, INT8_ROW
from bankfull.weights.requantized import KEEP
from bankfull.weights.source import TensorSource
from bankfull.weights.writing.compressed_tensors import Rounded

BITS = (8, 4, 3, 2)
ROW = "row"
PLAIN = "safetensors"
"""The format of pruned models that stores their zeros, so that every engine reads it."""
FORMATS = ("compressed-tensors", "gguf", PLAIN)
CLIPS = ("none", "mse")
GROUPED_ONLY = ("gptq", "awq")
"""Methods that have no form with one scale per row."""
MIXED, QAT, NEURONS, OUTLIERS = "mixed", "qat", "neurons", "int8"
PRUNING = ("wanda", "sparsegpt", NEURONS)
"""Methods that set weights to zero, or remove neurons, and store the matrices that are left as they were."""
MADE_BEFORE = (QAT, NEURONS, OUTLIERS)
"""Methods that change the whole model with a text, before it is written."""
STEPS = 200
BLOCKS = tuple(scheme.name for scheme in (*legacy.SCHEMES, *kquants.SCHEMES))
NARROWER = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Types of matrices whose columns blocks of 256 do not divide."""
DEFAULT_GROUP = {8: ROW, 4: "128", 3: "128", 2: "64"}
"""Groups of a width of weights, unless one is given."""


@dataclass(frozen=True, slots=True)
class QuantizeRecipe:
    method: str
    bits: int = 4
    group: int | None = 128
    """Columns that share a scale; None: the whole row."""
    symmetric: bool = True
    clip: str = "none"
    activations: Rounded = ""
    """How products round activations, as far as the files say it."""
    tables: bool = False
    """Whether embeddings and the head are quantized, too, to 8 bits."""
    form: str = "compressed-tensors"
    floats: bool = False
    """8-bit floats instead of integers."""
    calibration: str = "bundled"
    alpha: float = 0.5
    """Share of the outliers that moves from the activations to the weights."""
    ablate: str = ""
    """Share of channels that stay in bfloat16, and what chooses them, such as 0.01:weights: an experiment."""
    block: str = ""
    """A block format of GGUF files, in place of bits and group."""
    sparsity: str = ""
    """The pattern of zeros, for the methods that prune."""
    budget: Budget | None = None
    """What a mixture of bits must fit."""
    steps: int = 0
    """Steps of tuning, for the method that tunes."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Schemes by the names of matrices, once a mixture was chosen."""

    @property
    def drops_zeros(self) -> bool:
        """Whether zeros are not stored: in the pattern that a format has a form for."""
        return self.form == FORMATS[0] and bool(self.sparsity) and parse_pattern(self.sparsity).is_two_of_four

    def scheme_for(self, name: str, columns: int) -> str | None:
        """The scheme of a matrix; None if it stays as it is."""
        if self.sparsity:
            return None
        if self.budget is not None:
            chosen = self.types.get(name, KEEP)
            return None if chosen == KEEP else chosen
        return self.scheme_of(columns)

    def scheme_of(self, columns: int) -> str | None:
        """The scheme of a matrix with this number of columns: narrower groups where the wanted one does not divide it;
        None if none does."""
        if self.ablate:
            return "bf16"
        if self.block:
            fitting = (self.block, NARROWER.get(self.block, self.block))
            return next((name for name in fitting if columns % SCHEMES[name].block == 0), None)
        if self.floats:
            return FP8
        if self.group is None:
            return INT8_ROW
        kind = f"int{self.bits}" if self.symmetric else f"uint{self.bits}"
        widest = widest_group(columns, self.group)
        return None if widest is None else name_of(kind, widest)

    def table_scheme_of(self, columns: int) -> str | None:
        """The scheme of an embedding or the head."""
        return None if columns % min(GROUPS) else name_of("int8", min(GROUPS))

    def about(self) -> dict[str, Any]:
        """The settings; the types of a mixture are seen in the files."""
        return {name: value for name, value in asdict(self).items() if name != "types"}


def parse_recipe(
    method: str,
    bits: str | None = None,
    group: str | None = None,
    *,
    methods: tuple[str, ...],
    symmetric: bool | None = None,
    clip: str | None = None,
    activations: str | None = None,
    tables: bool = False,
    form: str = "compressed-tensors",
    calibration: str = "bundled",
    alpha: float | None = None,
    ablate: str | None = None,
    block: str | None = None,
    sparsity: str | None = None,
    size: str | None = None,
    kl: float | None = None,
    steps: int | None = None,
) -> QuantizeRecipe:
    """The recipe for these options; refuses what cannot be made with one sentence."""
    if method not in methods:
        raise ConfigError(f"--method {method[:40]!r} is unknown; use one of {', '.join(methods)}.")
    if form not in FORMATS:
        raise ConfigError(f"--format {form[:40]!r} is unknown; use {', '.join(FORMATS[:-1])} or {PLAIN}.")
    if form == PLAIN and method not in PRUNING:
        raise ConfigError(
            f"--format {PLAIN} stores weights with their zeros, for --method wanda, sparsegpt and neurons; leave it "
            f"out with {method}."
        )
    if clip is not None and clip not in CLIPS:
        raise ConfigError(f"--clip {clip[:40]!r} is unknown; use {' or '.join(CLIPS)}.")
    if clip is not None and method == "gptq":
        raise ConfigError("--clip has no use with --method gptq, which searches its scales always; leave it out.")
    if (sparsity is not None) != (method in PRUNING):
        raise ConfigError(
            "--sparsity is the pattern of --method wanda and sparsegpt, such as 50% or 2:4, or the share of neurons "
            "that --method neurons removes; give both."
        )
    if steps is not None and (method != QAT or steps < 1):
        raise ConfigError(f"--steps {steps} is for --method qat, and at least 1; leave it out, or use that method.")
    if method != MIXED and (size is not None or kl is not None):
        raise ConfigError("--size and --kl are budgets of --method mixed; leave them out, or use that method.")
    if method in (MIXED, QAT, *PRUNING) and (form == "gguf" or symmetric is False or clip or activations or tables):
        raise ConfigError(
            f"--method {method} writes a model directory with symmetric weights and float activations; leave --format, "
            "--asymmetric, --clip, --activations and --tables out."
        )
    if method == OUTLIERS:
        if bits not in (None, "8") or group not in (None, ROW) or form != FORMATS[0]:
            raise ConfigError(
                "--method int8 writes a model directory of 8-bit rows; leave --bits, --group and --format out."
            )
        if symmetric is False or clip or activations or tables:
            raise ConfigError(
                "--method int8 rounds as --quantize llm.int8 does; leave --asymmetric, --clip, --activations and "
                "--tables out."
            )
        return QuantizeRecipe(OUTLIERS, 8, None, activations="int8", calibration=calibration)
    if sparsity is not None:
        if parse_pattern(sparsity).group is not None and method == NEURONS:
            raise ConfigError(f"--sparsity {sparsity} is no share of neurons; give for example 25%.")
        if bits is not None or group is not None:
            raise ConfigError(f"--method {method} keeps the width of weights; leave --bits and --group out.")
        return QuantizeRecipe(method, calibration=calibration, sparsity=sparsity, form=form)
    if method == MIXED:
        return _mixed(bits, size, kl, group, calibration)
    if method == QAT:
        width = _bits(bits or "3")
        if width == 8:
            raise ConfigError("--method qat is for 4, 3 and 2 bits; 8 bits lose nothing, use --method rtn.")
        return QuantizeRecipe(
            QAT, width, _group(group or DEFAULT_GROUP[width], width), calibration=calibration, steps=steps or STEPS
        )
    if block is not None:
        return _with_blocks(block.lower(), method, bits, group, form, tables)
    floats = method == "fp8"
    by_row = method in ("fp8", "smoothquant")
    width = _bits(bits or ("8" if by_row else "4"))
    if by_row and width != 8:
        raise ConfigError(f"--method {method} makes 8-bit weights; leave --bits {width} out, or use --method rtn.")
    usual = ROW if by_row else "128" if method in GROUPED_ONLY else DEFAULT_GROUP[width]
    columns = _group(group or usual, width)
    if columns is None and method in GROUPED_ONLY:
        raise ConfigError(f"--method {method} needs groups; use --group 32, 64 or 128.")
    if by_row and columns is not None:
        raise ConfigError(f"--method {method} has one scale per row; leave --group {columns} out.")
    even = True if symmetric is None else symmetric
    if not even and (width == 8 or by_row):
        raise ConfigError("--asymmetric is for 4, 3 and 2 bits; leave it out with 8 bits, which lose nothing without.")
    rounded = _activations(activations, method, columns)
    if alpha is not None and (method != "smoothquant" or not 0.0 <= alpha <= 1.0):
        raise ConfigError(f"--alpha {alpha:g} is for --method smoothquant, and a number from 0 to 1.")
    if ablate is not None:
        _check_ablation(ablate, method, form)
    recipe = QuantizeRecipe(
        method,
        width,
        columns,
        even,
        clip or ("mse" if method == "awq" else "none"),
        rounded,
        tables,
        form,
        floats,
        calibration,
        0.5 if alpha is None else alpha,
        ablate or "",
    )
    if form == "gguf":
        _refuse_in_gguf(recipe)
    elif tables:
        raise ConfigError("--tables is for --format gguf: other engines read no quantized embeddings of a directory.")
    return recipe


def _check_ablation(text: str, method: str, form: str) -> None:
    share, _, by = text.partition(":")
    try:
        fits = 0.0 < float(share) < 1.0
    except ValueError:
        fits = False
    if not fits or by not in ("", "activations", "weights", "random"):
        raise ConfigError(f"--ablate {text[:40]!r} is not a share of channels; give 0.01, 0.01:weights or 0.01:random.")
    if method != "awq" or form == "gguf":
        raise ConfigError(
            "--ablate is an experiment for --method awq, stored unquantized as a directory; leave it out."
        )


def _mixed(bits: str | None, size: str | None, kl: float | None, group: str | None, calibration: str) -> QuantizeRecipe:
    try:
        mean = None if bits is None else float(bits)
    except ValueError:
        raise ConfigError(f"--bits {bits!r} is not a number; give the mean of all layers, such as 3.5.") from None
    columns = _group(group or "64", 4)
    return QuantizeRecipe(MIXED, group=columns, calibration=calibration, budget=Budget(mean, _size(size), kl))


def _size(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        size = parse_memory(text, 0)
    except ConfigError:
        size = 0
    if not size:
        raise ConfigError(f"--size {text[:20]!r} is not a size of a model; give for example 4GiB.")
    return size


def _with_blocks(
    block: str, method: str, bits: str | None, group: str | None, form: str, tables: bool
) -> QuantizeRecipe:
    if block not in BLOCKS:
        raise ConfigError(f"--type {block[:20]!r} is unknown; use one of {', '.join(BLOCKS)}.")
    if form != "gguf" or method != "rtn" or bits is not None or group is not None:
        raise ConfigError("--type is for --format gguf with --method rtn, and replaces --bits and --group.")
    return QuantizeRecipe(method, int(block[1]), SCHEMES[block].block, tables=tables, form=form, block=block)


def _bits(text: str) -> int:
    if text not in map(str, BITS):
        raise ConfigError(f"--bits {text[:20]!r} is not offered; use 8, 4, 3 or 2.")
    return int(text)


def _group(text: str, bits: int) -> int | None:
    if text == ROW:
        if bits != 8:
            raise ConfigError(f"--group row is for 8 bits; with --bits {bits} use 32, 64 or 128.")
        return None
    if text not in map(str, GROUPS):
        raise ConfigError(f"--group {text[:20]!r} is not offered; use 32, 64, 128 or row.")
    return int(text)


def _activations(wanted: str | None, method: str, group: int | None) -> Rounded:
    known: dict[str, Rounded] = {"float": "", "int8": "int8", "token": "fp8", "static": "fp8-static"}
    if wanted is None:
        return "fp8" if method == "fp8" else "" if group is not None else "int8"
    if wanted not in known:
        raise ConfigError(f"--activations {wanted[:20]!r} is unknown; use float, int8, token or static.")
    if (wanted in ("token", "static")) != (method == "fp8") and wanted != "float":
        offered = "token or static" if method == "fp8" else "float or int8"
        raise ConfigError(f"--activations {wanted} does not go with --method {method}; use {offered}.")
    if wanted == "int8" and group is not None:
        raise ConfigError("--activations int8 needs one scale per row; use --bits 8 --group row.")
    return known[wanted]


def _refuse_in_gguf(recipe: QuantizeRecipe) -> None:
    if recipe.bits < 4:
        raise ConfigError(
            f"A GGUF file has no {recipe.bits}-bit groups; use --type q{recipe.bits}_k instead of --bits, or "
            "--format compressed-tensors."
        )
    if recipe.floats or recipe.group is None:
        raise ConfigError(
            f"A GGUF file has no {'fp8' if recipe.floats else 'scale per row'}; use --group 32, or --format "
            "compressed-tensors."
        )


def refuse_without_use(recipe: QuantizeRecipe, source: TensorSource, names: list[str]) -> None:
    """Refuses a recipe that quantizes none of the matrices `names`."""
    if not names:
        raise ConfigError("The model has no matrices that could be quantized; choose another model.")
    if not recipe.sparsity and not any(recipe.scheme_for(name, source.shape(name)[-1]) for name in names):
        widths = sorted({source.shape(name)[-1] for name in names})[:4]
        raise ConfigError(
            f"--group {recipe.group} divides the columns of no matrix ({', '.join(map(str, widths))}); use --bits 8 "
            "--group row."
        )
