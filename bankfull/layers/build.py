"""Weights and operations for layers, resolved once when the model is built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bankfull.axes import Axes, as_axis, sizes
from bankfull.errors import ModelError
from bankfull.layers.placement import Home, Mode, PlacedWeight, Placement, Role, Whole
from bankfull.ops import Operation, all_reduce, expert_mlp_bf16, linear, linear_bf16, linear_int8
from bankfull.ops.products.activations import BF16, EXACT, FLOAT, INT8, TOKEN, ActivationRule
from bankfull.ops.registry import Function, Kit
from bankfull.ranks.expert_ranks import ExpertRanks
from bankfull.ranks.group import RankGroup
from bankfull.ranks.shard import RowShare, Shard
from bankfull.ranks.stage import Stage
from bankfull.state.mask import Mask
from bankfull.weights.blank_source import META
from bankfull.weights.cut import cut
from bankfull.weights.formats.dense import BY_DTYPE
from bankfull.weights.formats.groups import as_blocks
from bankfull.weights.formats.importance import NAMES as IMPORTANCE
from bankfull.weights.formats.importance import as_known
from bankfull.weights.formats.rows import INT8_ROW
from bankfull.weights.qtensor import LateParts, QTensor
from bankfull.weights.source import ExpertSource, TensorSource
from bankfull.weights.widened_source import in_bfloat16

log = logging.getLogger("bankfull")

PRODUCTS = {FLOAT: linear, BF16: linear_bf16, INT8: linear_int8}
"""What multiplies a matrix, by the format of its activations, where a CPU has kernels."""
MOST_EXPERTS = 1 << 16
"""The most experts that a file may hold tensor by tensor: far above any real model."""


@dataclass(frozen=True, slots=True)
class Build:
    """The source of the model's tensors, their device and dtype. `at` descends into a module's names."""

    source: TensorSource
    kit: Kit
    dtype: torch.dtype
    device: torch.device
    expand: bool = False
    """Whether block formats are dequantized at load."""
    max_len: int = 0
    """Tokens of the longest sequence that will be run; 0 = the model's context."""
    kv_dtype: torch.dtype | None = None
    """Dtype of the KV cache: None = that of the computation. int8, fp8 and int4 (in pairs, as uint8) are rounded
    (lossy)."""
    activations: ActivationRule = EXACT
    """Which activations a weight wants."""
    kv_evict: Mask | None = None
    """What layers with full attention see instead (lossy); None: all tokens."""
    shard: Shard | None = None
    """The part of the weights that this rank holds; None: all of them."""
    stage: Stage | None = None
    """The layers whose weights this rank holds; None: all."""
    experts: ExpertRanks | None = None
    """The ranks over which the experts of a layer are spread; None: each rank has all of them."""
    context: RankGroup | None = None
    """The ranks that divide the tokens of a step; None: this one has all of them."""
    sequence: str = "off"
    """`MeshSpec.sp`: how tokens are divided around the layers that mix them."""
    prefix: str = ""
    placement: Placement = field(default_factory=Whole)
    """Where the weights of each module lie."""
    role: Role = Role.MIXER
    """What the module here belongs to."""
    mode: Mode = Mode.RESIDENT
    """How the weights of the module here reach its operations."""
    here: Home | None = None
    """The home of what is read on this rank, where it is not that of the module here."""
    elsewhere: set[str] = field(default_factory=set, repr=False, compare=False)
    """Modules whose tensors are not read here."""
    weights: dict[str, PlacedWeight] = field(default_factory=dict, repr=False, compare=False)
    """What the model has asked for, by name, also what is not read here."""
    _told: set[str] = field(default_factory=set, repr=False, compare=False)
    """Notices that were logged."""

    @property
    def pages(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def tensor_ranks(self) -> int:
        return 1 if self.shard is None else self.shard.group.size

    @property
    def split(self) -> tuple[int, int]:
        """Ranks over which the mixers, and the feed-forward layers, of this rank's model are split."""
        runs = self.placement.roles
        return self.tensor_ranks if Role.MIXER in runs else 1, self.tensor_ranks if Role.FEED in runs else 1

    @property
    def together(self) -> Build:
        """Builds layers whole on this rank, where feed-forward layers of the model have ranks of their own."""
        return self.placed(Whole())

    @property
    def matrices(self) -> torch.dtype:
        """Dtype of matrices that are not in blocks."""
        return self.activations.matrices(self.dtype)

    @property
    def at_least_float32(self) -> torch.dtype:
        """Dtype of values that are never rounded to 16 bits."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def home(self) -> Home:
        """Where the weights of the module here lie, and what computes with them."""
        return Home(self.device, self.kit, self.dtype, self.mode)

    @property
    def reads(self) -> bool:
        """Whether the weights of the module here are read here."""
        return self.mode is not Mode.ELSEWHERE

    def at(self, name: str | int) -> Build:
        return self._homed(self._full(str(name)), self.role)

    def of(self, role: Role) -> Build:
        """The same module as a part of what has this role."""
        return self if role is self.role else self._homed(self.prefix, role)

    def placed(self, placement: Placement) -> Build:
        """The same module where this placement puts it."""
        return replace(self, placement=placement)._homed(self.prefix, self.role)

    def _homed(self, prefix: str, role: Role) -> Build:
        here = self.here or self.home
        of_stage = self.stage is None or self.stage.holds(prefix)
        home = self.placement.home(prefix, role, here) if of_stage else here.elsewhere
        return replace(self, prefix=prefix, role=role, **_fields(home), here=None if home is here else here)

    @property
    def blank(self) -> Build:
        """Builds layers without data, here and below."""
        home = (self.here or self.home).elsewhere
        return replace(self, **_fields(home), here=home)

    def at_stage(self, first: bool, last: bool) -> Build:
        """Builds layers that only the first or the last stage needs: with data there, without elsewhere."""
        stage = self.stage
        needed = stage is None or (first and stage.before is None) or (last and stage.after is None)
        return self if needed else self.blank

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name

    def bind(self, operation: Operation, **facts: Any) -> Function:
        return self.kit.bind(operation, **{"dtype": self.dtype, **facts})

    def bind_if_offered(self, operation: Operation, **facts: Any) -> Function | None:
        """Bind a fused operation if a kernel offers it; else None, and the layer calls its parts."""
        facts = {"dtype": self.dtype, **facts}
        return self.kit.bind(operation, **facts) if self.kit.offers(operation, **facts) else None

    def prepare(self, operation: Operation, weight: QTensor, **facts: Any) -> Any:
        return self.kit.prepare(operation, weight, dtype=self.dtype, weight=weight, **facts)

    def has(self, name: str) -> bool:
        return self.source.has(self._full(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._full(name))

    def weight(self, name: str, axes: Axes, for_linear: bool = False) -> QTensor:
        """A matrix as stored in the file; a dense one in the dtype that it is multiplied in. `for_linear`: it is
        multiplied by a `Linear`, which regards the order of its columns and its outliers; elsewhere a matrix that has
        these is expanded."""
        if not self._asked(name, axes):
            return self._left(name, axes)
        return self._as_multiplied(self._find(name, axes), for_linear)

    def rows_of(self, name: str, axes: Axes, rows: Tensor, for_linear: bool = False) -> QTensor:
        """These rows of a matrix of these axes, in the form of `weight`. No others are read."""
        if not self._asked(name, axes):
            return self._left(name, (len(rows), *axes[1:]))
        matrix = self._find(name, axes)
        return self._as_multiplied(matrix.rows(rows.to(matrix.device)), for_linear)

    def _as_multiplied(self, found: QTensor, for_linear: bool = False) -> QTensor:
        if found.scheme.name in IMPORTANCE:  # no kernel reads these blocks
            found = as_known(found) or self.expanded(found, f"no kernel reads {found.scheme.name.upper()}")
        if not found.is_plain and not for_linear:
            found = self.expanded(found, "not every layer reads columns in another order (act-order) or kept apart")
        if found.is_dense or self.expand:
            return self._dense(found)
        return (found if self._packed(found) else self._with_kernel(self._in_blocks(found), for_linear)).to(self.device)

    def _dense(self, found: QTensor) -> QTensor:
        """The values of a weight, in the dtype that they are multiplied in."""
        scheme, values = BY_DTYPE[self.matrices], partial(found.dequantize, self.matrices)
        if found.scheme == scheme or self.device.type != "cpu":
            return replace(QTensor.dense(values().to(self.device)), name=found.name)
        return QTensor(scheme, LateParts(("data",), lambda: {"data": values()}), found.shape, name=found.name)

    def table(self, name: str, axes: Axes, rows: Tensor | None = None) -> QTensor:
        """A matrix whose rows are looked up. `rows`: the only ones that are wanted."""
        return self._in_blocks(self.weight(name, axes) if rows is None else self.rows_of(name, axes, rows))

    def _in_blocks(self, found: QTensor) -> QTensor:
        """A matrix whose quantization groups are as the native kernels that do not pack weights read them."""
        return as_blocks(found) if self._has_native else found

    def _packed(self, found: QTensor) -> bool:
        """Whether a kernel packs a matrix, or the matrices of experts, as it is."""
        wanted = self.activations.of(found.scheme, found.shape[-1])
        if wanted in (FLOAT, TOKEN):
            return wanted is TOKEN
        operation = linear_bf16 if len(found.shape) == 2 else expert_mlp_bf16
        return self.kit.offers(operation, dtype=self.dtype, weight=found, weights=(found,))

    def _with_kernel(self, found: QTensor, for_linear: bool) -> QTensor:
        """A matrix in a form that a kernel multiplies, on a CPU and where there is such a kernel. A torch body would
        dequantize it at each use."""
        if not for_linear or found.is_dense or not self._has_native or self._multiplies(found):
            return found
        wide = in_bfloat16(found) if found.scheme.name == INT8_ROW else None
        if wide is not None and self._multiplies(wide):
            self._tell(
                f"{found.scheme.name} weights are held as bfloat16 with the same values, because float16 cannot "
                "hold their scales; they take twice the file's bytes."
            )
            return wide
        dense = QTensor.dense(found.dequantize(self.matrices))
        if not self._multiplies(dense):
            return found
        return self.expanded(found, f"no kernel here reads their {found.scheme.name}")

    def _multiplies(self, found: QTensor) -> bool:
        wanted = self.activations.of_weight(found)
        return wanted not in PRODUCTS or self.kit.offers(PRODUCTS[wanted], dtype=self.dtype, weight=found)

    @property
    def _has_native(self) -> bool:
        return self.kit.device == "cpu" and "native" in self.kit.prefer

    def expanded(self, found: QTensor, reason: str) -> QTensor:
        """The values of a weight that no kernel can read; one sentence says so for each reason."""
        self._tell(f"some weights are expanded at load, because {reason}.")
        return QTensor.dense(found.dequantize(self.matrices))

    def _tell(self, notice: str) -> None:
        if notice not in self._told:
            self._told.add(notice)
            log.warning(notice)

    def stacked(self, name: str, count: int, axes: Axes, held: Sequence[int] | None = None) -> QTensor:
        """Matrices of `count` experts as one tensor (count, *axes). `name` has a place for the expert's number,
        "experts.{}.up_proj.weight"; a file may hold the whole tensor instead, named "experts.up_proj.weight".
        `held`: the only experts that are wanted; nothing else is read."""
        whole, experts = name.replace("{}.", ""), range(count) if held is None else held
        if not self.reads:
            self._asked(whole, (count, *axes))
            return self._left(name, (len(experts), *axes))
        if name == whole or self.has(whole) or count > MOST_EXPERTS:
            if held is None:
                return self.weight(whole, (count, *axes))
            self._asked(whole, (count, *axes))
            return self._as_multiplied(self._find_experts(whole, count, axes, held))
        if held is not None:
            others = (name.format(expert) for expert in range(count) if expert not in held)
            self.elsewhere.update(self._full(other).removesuffix(".weight") for other in others)
        parts = [self.weight(name.format(expert), axes) for expert in experts]
        if self.shard is not None:
            self.shard.note_stack(self._full(whole), self._full(name.format(experts[0])))
        if len({part.scheme for part in parts}) > 1:
            # Kernels need one scheme for all experts of a matrix.
            schemes = ", ".join(sorted({part.scheme.name for part in parts}))
            log.warning(
                f"the experts' tensors {self._full(name.format('*'))} are stored as {schemes} and are dequantized."
            )
            parts = [QTensor.dense(part.dequantize(self.matrices)) for part in parts]
        return QTensor.stacked(parts).reshape_leading(len(parts), parts[0].shape[0])

    def bias_of_experts(self, name: str, count: int, size: int, held: Sequence[int] | None = None) -> Tensor:
        """The biases (count, size) of experts, which one tensor holds. `held`: as for `stacked`."""
        if held is None:
            return self.tensor(name, (count, size))
        if not self._asked(name, (count, size)):
            return self._left(name, (len(held), size)).dequantize(self.dtype)
        return self._find_experts(name, count, (size,), held).dequantize(self.dtype).to(self.device)

    def tensor(self, name: str, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
        """A vector or another small tensor, dequantized."""
        if not self._asked(name, axes):
            return self._left(name, axes).dequantize(dtype or self.dtype)
        tensor = self._find(name, axes).dequantize(dtype or self.dtype).to(self.device)
        if self.shard is None or not name.endswith("bias") or self.shard.holds_bias(self._full(name)):
            return tensor
        return torch.zeros_like(tensor)

    def sum_of_ranks(self, weight: str) -> Callable[[Tensor], Tensor] | None:
        """Adds up the ranks' products with their parts of a weight's columns; None if each rank has all columns."""
        if self.shard is None or not self.shard.has_cut_inputs(self._full(weight)):
            return None
        run, group = self.bind(all_reduce), self.shard.group
        return lambda x: run(x, group)

    def row_share(self, count: int) -> RowShare | None:
        """The share of a matrix's rows that this rank holds where outputs or results are gathered; None: all."""
        return None if self.shard is None else RowShare(count, self.shard.group)

    def _find_experts(self, name: str, count: int, axes: Axes, experts: Sequence[int]) -> QTensor:
        """These experts of a tensor that holds all of them."""
        full = self._full(name)
        stored = self.source.shape(full)
        if stored[:1] != (count,):
            raise ModelError(
                f"Tensor {full} has shape {stored}, but the model's configuration has {count} experts; use the "
                "configuration that belongs to the file."
            )
        if isinstance(self.source, ExpertSource):
            stacked = self.source.get_experts(full, experts)
        else:
            stacked = self.source.get(full).rows(torch.tensor(experts))
        return self._own(name, stacked, (len(experts), *axes))

    def _asked(self, name: str, axes: Axes) -> bool:
        """Note that the model needs a weight; whether it is read here."""
        full = self._full(name)
        self.weights[full] = PlacedWeight(full, tuple(map(as_axis, axes)), self.role, self.home)
        return self.reads

    def _left(self, name: str, axes: Axes) -> QTensor:
        """Takes the place of a tensor that is not read here. Of experts, a file may name all of them, or fuse some."""
        module = name.partition(".{}.")[0] if "{}" in name else name.rpartition(".")[0]
        self.elsewhere.add(self._full(module) if module else self.prefix)
        return QTensor.dense(torch.empty(sizes(axes), dtype=self.dtype, device=META))

    def _find(self, name: str, axes: Axes) -> QTensor:
        full = self._full(name)
        return self._own(name, replace(self.source.get(full), name=full), axes)

    def _own(self, name: str, found: QTensor, axes: Axes) -> QTensor:
        """This rank's part of a tensor."""
        if tuple(found.shape) != axes and self.shard is not None:
            own = self.shard.own(self._full(name), found.shape, axes)
            found = found if own is None else cut(found, *own)
        if tuple(found.shape) != axes:
            raise ModelError(
                f"Tensor {self._full(name)} has shape {tuple(found.shape)}, but the model's configuration needs "
                f"{sizes(axes)}; use the configuration that belongs to the file."
            )
        return found


def _fields(home: Home) -> dict[str, Any]:
    return {"device": home.device, "kit": home.kit, "dtype": home.dtype, "mode": home.mode}
