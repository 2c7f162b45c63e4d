"""python -m benchmarks.gpu.quantized_experts --types mxfp4,int4_g128 --tokens 1,4,16,64,1024 [--sweep]

Time of quantized experts beside the bytes of those that the tokens chose, in a chain of layers that no cache holds,
captured and replayed as in a decode step. --sweep tries other launch parameters of each of the two kernels and prints
the best ones: it gives the constants of `bankfull/ops/experts/triton/words.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from bankfull.ops.experts.body import CLAMPED_SWIGLU
from bankfull.ops.experts.triton import words as experts_words
from bankfull.ops.experts.triton.experts import FEW_TOKENS, SOME_TOKENS, run_expert_mlp
from bankfull.ops.experts.triton.operands import Operands, sorted_pairs
from bankfull.ops.experts.triton.weights import ExpertWords, Stacked, form_of, prepare
from bankfull.ops.experts.triton.words import ExpertTilePlan, FewPlan
from bankfull.weights.formats import READ_ONLY, SCHEMES
from benchmarks.gpu.quantized import chain_seconds, random_codes


@dataclass(frozen=True, slots=True)
class Sizes:
    hidden: int
    inner: int
    experts: int
    per_token: int
    biased: bool = False


SHAPES = {"gpt-oss-20b": Sizes(2880, 2880, 32, 4, True), "qwen3-30b-a3b": Sizes(2048, 768, 128, 8)}
TRAFFIC = 1.2e9
"""Bytes of chosen experts in a chain, at least, as far as memory allows."""
MOST_LAYERS = 24
MOST_BYTES = 20e9
Call = Callable[[], object]


class Layer:
    """The experts of one layer, and what a step asks of them."""

    def __init__(self, name: str, sizes: Sizes, tokens: int) -> None:
        self.sizes = sizes
        shapes = [(sizes.experts, sizes.inner, sizes.hidden)] * 2 + [(sizes.experts, sizes.hidden, sizes.inner)]
        self.gate, self.up, self.down = (prepare(random_codes(name, shape)) for shape in shapes)
        self.x = torch.randn(tokens, sizes.hidden, device="cuda", dtype=torch.bfloat16)
        chosen = torch.rand(tokens, sizes.experts, device="cuda").argsort(-1)[:, : sizes.per_token]
        self.chosen = chosen.to(torch.int32).contiguous()
        self.weights = torch.rand(tokens, sizes.per_token, device="cuda")
        outputs = (sizes.inner, sizes.inner, sizes.hidden)
        drawn = [torch.randn(sizes.experts, size, device="cuda", dtype=torch.bfloat16) for size in outputs]
        self.biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if sizes.biased:
            self.biases = (drawn[0], drawn[1], drawn[2])

    @property
    def matrices(self) -> tuple[Stacked, Stacked, Stacked]:
        return self.gate, self.up, self.down

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def touched(self) -> float:
        """Bytes of the experts that the tokens chose."""
        return self.nbytes * len(self.chosen.unique()) / self.sizes.experts

    def run(self) -> Tensor:
        kind = CLAMPED_SWIGLU if self.sizes.biased else "silu"
        return run_expert_mlp(self.x, self.chosen, self.weights, *self.matrices, *self.biases, kind)

    def operands(self) -> Operands:
        kind = CLAMPED_SWIGLU if self.sizes.biased else "silu"
        return Operands(self.x, self.chosen, self.weights, *self.matrices, self.biases, kind)


def few_plans() -> Iterator[FewPlan]:
    for outputs, warps, programs in product((1, 2), (2, 4, 8), (1, 2, 3, 4, 6)):
        yield FewPlan(outputs, warps, programs)


def tile_plans() -> Iterator[ExpertTilePlan]:
    for outputs, warps, stages in product((64, 128), (4, 8), (2, 3, 4)):
        yield ExpertTilePlan(outputs, warps, stages)


def stages(layers: list[Layer], tokens: int) -> Iterator[tuple[str, Callable[[int], Iterator[tuple[str, Call]]]]]:
    """The two kernels, and each one's calls with every plan for a layer."""
    owns = [layer.operands() for layer in layers]
    order = None if tokens <= SOME_TOKENS else sorted_pairs(owns[0])
    if tokens <= FEW_TOKENS and experts_words.opens_few(owns[0]):
        middles = [experts_words.few_gate(own) for own in owns]

        def gate(i: int) -> Iterator[tuple[str, Call]]:
            return ((str(plan), partial(experts_words.few_gate, owns[i], plan)) for plan in few_plans())

        def down(i: int) -> Iterator[tuple[str, Call]]:
            plans = (plan for plan in few_plans() if plan.warps == 4)  # it has as many as a token has experts
            return ((str(plan), partial(experts_words.few_down, owns[i], middles[i], plan)) for plan in plans)

    else:
        middles = [experts_words.tile_gate(own, order) for own in owns]

        def gate(i: int) -> Iterator[tuple[str, Call]]:
            return ((str(plan), partial(experts_words.tile_gate, owns[i], order, plan)) for plan in tile_plans())

        def down(i: int) -> Iterator[tuple[str, Call]]:
            return (
                (str(plan), partial(experts_words.tile_down, owns[i], order, middles[i], plan)) for plan in tile_plans()
            )

    yield "gate and up", gate
    yield "down", down


def swept(layers: list[Layer], tokens: int) -> None:
    if not isinstance(layers[0].gate, ExpertWords):
        return
    for label, calls in stages(layers, tokens):
        found: list[tuple[float, str]] = []
        for plans in zip(*(calls(i) for i in range(len(layers))), strict=True):
            try:
                found.append((chain_seconds([call for _, call in plans]), plans[0][0]))
            except RuntimeError as error:  # a plan that does not fit the device is skipped
                print("    ", plans[0][0], str(error).splitlines()[0][:80])
        for taken, plan in sorted(found)[:5]:
            print(f"     {label}: {taken * 1e6:9.1f} us  {plan}", flush=True)


def measured(name: str, shape: str, tokens: int, sweep: bool) -> None:
    sizes = SHAPES[shape]
    first = Layer(name, sizes, tokens)
    most = max(2, int(min(MOST_LAYERS, MOST_BYTES / first.nbytes)))
    count = max(2, min(most, int(TRAFFIC / first.touched) + 1))
    layers = [first] + [Layer(name, sizes, tokens) for _ in range(count - 1)]
    taken = chain_seconds([layer.run for layer in layers])
    active = sum(layer.touched for layer in layers) / len(layers)
    work = 6 * tokens * sizes.per_token * sizes.hidden * sizes.inner / taken / 1e12
    print(
        f"{name} {shape}, {tokens} tokens: {taken * 1e6:9.1f} us  {active / taken / 1e12:6.3f} TB/s of "
        f"{active / 1e6:.1f} MB  {work:7.1f} TFLOP/s",
        flush=True,
    )
    if sweep:
        swept(layers, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="mxfp4,int4_g32,int3_g32,bf16")
    parser.add_argument("--tokens", default="1,4,16,64,1024")
    parser.add_argument("--shapes", default="gpt-oss-20b")
    parser.add_argument("--sweep", action="store_true")
    asked = parser.parse_args()
    known = {**SCHEMES, **READ_ONLY}
    for name in asked.types.split(","):
        if name not in known:
            print(f"{name!r} is not a type of weights; use {', '.join(known)}.", file=sys.stderr)
            return 2
    for shape in asked.shapes.split(","):
        if shape not in SHAPES:
            print(f"{shape!r} is no known shape; use {', '.join(SHAPES)}.", file=sys.stderr)
            return 2
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA GPU, and this machine has none.", file=sys.stderr)
        return 2
    with torch.inference_mode():
        for name, shape in product(asked.types.split(","), asked.shapes.split(",")):
            if form_of(random_codes(name, (1, 1, 256))) is None:
                print(f"No kernel reads experts in {name!r}.", file=sys.stderr)
                return 2
            if any(size % known[name].block for size in (SHAPES[shape].hidden, SHAPES[shape].inner)):
                print(f"The experts of {shape} have no whole number of blocks of {name}.", file=sys.stderr)
                return 2
            for tokens in asked.tokens.split(","):
                measured(name, shape, int(tokens), asked.sweep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
