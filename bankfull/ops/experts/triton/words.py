"""Launches of the kernels over quantized experts in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bankfull.ops.experts.triton.integer import IntegerTile, integer_down_kernel, integer_gate_kernel
from bankfull.ops.experts.triton.operands import Operands, Order
from bankfull.ops.experts.triton.weights import ExpertWords
from bankfull.ops.experts.triton.word_tiles import WordTile, word_experts_kernel
from bankfull.ops.products.triton.quantized.layout import Words, WordWeight
from bankfull.ops.products.triton.quantized.persistent import REGISTERS, supports
from bankfull.ops.products.triton.quantized.tiles import COLUMNS, DOWNSCALE
from bankfull.ops.triton.launch import INTERPRETED, multiprocessors, overlapped, power_of_two

WORDS_PER_WARP = 128
"""Words of a row that a warp loads at once: 16 bytes per thread."""
LONGEST = 3072
"""Columns whose activations, and those words of two rows, fit into the registers of a warp; longer rows are shared by
several."""
MOST_SHARING = 8
MOST_SLOTS = 8
"""Experts of a token whose outputs one program adds."""
MOST_WARPS = 16
AT_ONCE = 128 if INTERPRETED else 1
"""Factor of a warp's outputs: the interpreter takes as long for many numbers as for few."""


@dataclass(frozen=True, slots=True)
class FewPlan:
    """Launch parameters of the kernels for very few tokens."""

    outputs: int
    """Outputs of a warp at a time."""
    warps: int
    """Warps of a program, times those that share a row."""
    programs: int
    """Programs per multiprocessor."""


def _sharing(columns: int) -> int:
    """Warps that share a row."""
    return power_of_two(-(-columns // LONGEST))


def few_gate_plan(matrix: WordWeight) -> FewPlan:
    sharing = _sharing(matrix.shape[1])
    few_columns = matrix.shape[1] <= 2048 * sharing
    return FewPlan(AT_ONCE, max(1, 4 // sharing), max(1, (4 if few_columns else 2) * 4 // max(4, sharing)))


def few_down_plan(matrix: WordWeight, slots: int) -> FewPlan:
    sharing = _sharing(matrix.shape[1])
    outputs = 2 if matrix.shape[1] <= 1024 * sharing else 1
    return FewPlan(AT_ONCE * outputs, slots, max(1, 16 // (slots * sharing)))


def opens_few(own: Operands) -> bool:
    """Whether gate and up have a kernel for very few tokens."""
    assert isinstance(own.gate, ExpertWords)
    return _is_supported(own.gate.matrix, own.x.dtype)


def closes_few(own: Operands) -> bool:
    assert isinstance(own.down, ExpertWords)
    slots, sharing = power_of_two(own.per_token), _sharing(own.down.shape[2])
    return slots <= MOST_SLOTS and slots * sharing <= MOST_WARPS and _is_supported(own.down.matrix, own.x.dtype)


def _is_supported(matrix: WordWeight, dtype: torch.dtype) -> bool:
    columns = matrix.shape[1]
    return _sharing(columns) <= MOST_SHARING and supports(matrix.form, columns, dtype)


def _integer_tile(own: Operands, matrix: WordWeight, outputs: int, together: int, kind: str = "") -> IntegerTile:
    form, row_words = matrix.form, matrix.row_words
    width = max(form.length, min(WORDS_PER_WARP * _sharing(matrix.shape[1]), power_of_two(row_words)))
    return IntegerTile(own.per_token, outputs, together, width, -(-row_words // width), form, kind)


def _turns(tiles: int, programs: int) -> int:
    """The number of programs, at most `programs`, at which all of them process as many tiles, up to one."""
    return -(-tiles // -(-tiles // max(1, min(tiles, programs))))


def few_gate(own: Operands, plan: FewPlan | None = None) -> Tensor:
    """f(gate(x)) * up(x) of each pair."""
    assert isinstance(own.gate, ExpertWords) and isinstance(own.up, ExpertWords)
    matrix, inner, pairs = own.gate.matrix, own.gate.shape[1], own.chosen.numel()
    plan = plan or few_gate_plan(matrix)
    together = plan.outputs * plan.warps
    programs = _turns(-(-inner // together), plan.programs * multiprocessors(own.x.device) // pairs)
    middle = own.for_pairs(inner)
    warps = plan.warps * _sharing(matrix.shape[1])
    # The plan's programs must fit side by side; how many registers the compiler takes depends on details.
    share = REGISTERS // (32 * warps * plan.programs)
    bounded = {} if share >= 256 or INTERPRETED else {"maxnreg": share}
    integer_gate_kernel[(pairs, programs)](
        own.x,
        own.x.stride(0),
        own.chosen,
        matrix.words,
        own.up.matrix.words,
        own.biases[:2],
        middle,
        inner,
        _integer_tile(own, matrix, together, plan.warps, own.kind),
        num_warps=warps,
        num_stages=1,
        **bounded,
        **overlapped(own.x),
    )
    return middle


def few_down(own: Operands, middle: Tensor, plan: FewPlan | None = None) -> Tensor:
    """The weighted sum of down(middle) over each token's pairs."""
    assert isinstance(own.down, ExpertWords)
    matrix, (_, hidden, inner) = own.down.matrix, own.down.shape
    slots = power_of_two(own.per_token)
    plan = plan or few_down_plan(matrix, slots)
    programs = _turns(-(-hidden // plan.outputs), plan.programs * multiprocessors(own.x.device) // own.tokens)
    y = own.x.new_empty(own.tokens, hidden)
    integer_down_kernel[(own.tokens, programs)](
        middle,
        own.chosen,
        own.weights,
        matrix.words,
        own.biases[2],
        y,
        hidden,
        inner,
        _integer_tile(own, matrix, plan.outputs, slots),
        num_warps=slots * _sharing(inner),
        num_stages=1,
        **overlapped(own.x),
    )
    return y


@dataclass(frozen=True, slots=True)
class ExpertTilePlan:
    outputs: int
    warps: int
    stages: int


def tile_gate(own: Operands, order: Order | None, plan: ExpertTilePlan | None = None) -> Tensor:
    """f(gate(x)) * up(x) of each pair, or of each place in the order."""
    gate, up = own.gate, own.up
    assert isinstance(gate, ExpertWords) and isinstance(up, ExpertWords)
    plan = plan or ExpertTilePlan(64, 4, 2 if own.wide else 3)
    return _tiles(own, own.x, gate, up.matrix.words, own.biases[:2], order, plan, own.kind)


def tile_down(own: Operands, order: Order | None, middle: Tensor, plan: ExpertTilePlan | None = None) -> Tensor:
    """down(middle) of each pair."""
    assert isinstance(own.down, ExpertWords)
    plan = plan or ExpertTilePlan(64 if own.wide or own.down.shape[1] < 1024 else 128, 4, 2 if own.wide else 3)
    return _tiles(own, middle, own.down, None, own.biases[2:], order, plan, "")


def _tiles(
    own: Operands,
    x: Tensor,
    weight: ExpertWords,
    up: Words | None,
    biases: tuple[Tensor | None, ...],
    order: Order | None,
    plan: ExpertTilePlan,
    kind: str,
) -> Tensor:
    (experts, outputs, _), words, form = weight.shape, weight.matrix.words, weight.matrix.form
    rows = max(16, power_of_two(own.tokens)) if order is None else own.block_rows
    # Two groups at once: the scale of a single one would send weights through shared memory. More rows need its space.
    together = max(2 if rows <= 32 else 1, COLUMNS // form.group)
    down = 0 if x.dtype == torch.float16 else DOWNSCALE
    tile = WordTile(own.per_token, rows, plan.outputs, together, words.groups % together == 0, down, form, kind)
    y = own.for_pairs(outputs)
    word_experts_kernel[(-(-outputs // plan.outputs), experts if order is None else len(order.experts))](
        x,
        x.stride(0),
        own.chosen,
        order,
        words,
        up,
        biases,
        y,
        own.tokens,
        outputs,
        tile,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlapped(x),
    )
    return y
