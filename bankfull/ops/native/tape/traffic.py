"""Bytes and operations of a tape's instructions, for profiles. Each operand counts once per instruction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bankfull.ops.cost import Operands
from bankfull.ops.native.tape.instruction import Break, Fixed, Instruction, Node, values_in
from bankfull.ops.pages.rounded import INT4

METERED = {
    "attention": "paged_attention",
    "latent": "latent_attention",
    "conv": "causal_conv",
    "diagonal": "diagonal_scan",
    "scan": "selective_scan",
    "ssd": "ssd_scan",
    "linear_attention": "linear_attention",
    "delta_rule": "delta_rule",
}
"""Kinds of instructions whose cost depends on more than a step's tokens -> the operation with their cost. A label
stands for a kind that runs several operations."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over all instructions of a label in one replay."""

    count: int = 0
    fixed: int = 0
    """Bytes that do not depend on the step: weights."""
    per_token: int = 0
    """Bytes for each token."""
    flops: int = 0
    """Multiplications and additions for each token."""
    operands: Operands = "own"
    """What is multiplied."""
    operation: str = ""
    """If not empty, the operation whose cost replaces these sums; see METERED."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count,
            self.fixed + other.fixed,
            self.per_token + other.per_token,
            self.flops + other.flops,
            other.operands,
            self.operation or other.operation,
        )


def label_of(node: Node) -> str:
    """The label in profiles. Matrices of different shapes have different labels."""
    if isinstance(node, Break):
        return f"{node.operation.label} (torch)"
    if node.kind == "packed":
        return f"{node.label} {node.facts['inner']} -> {_outputs(node)}"
    return f"{node.label} {node.facts['inner']} -> {node.facts['outputs']}" if node.kind == "linear" else node.label


def traffic_of(nodes: Iterable[Node]) -> dict[str, Traffic]:
    """Label -> bytes and operations of one replay."""
    traffic: dict[str, Traffic] = {}
    for node in nodes:
        label = label_of(node)
        traffic[label] = traffic.get(label, Traffic()) + _traffic(node)
    return traffic


def _traffic(node: Node) -> Traffic:
    if isinstance(node, Break):
        return Traffic(1, operation=node.operation.label)
    if node.kind in METERED:
        return Traffic(
            1, operation=METERED.get(node.label, METERED[node.kind]) + ("_silu" if node.facts.get("silu") else "")
        )
    facts = node.facts
    if node.kind == "experts":  # only some of the experts are read
        rounded = "_int8" if facts["int8"] else "_bf16"
        return Traffic(1, operation="expert_mlp" if node.reads["encoded"] is None else f"expert_mlp{rounded}")
    weights = {name: operand.tensor.nbytes for name, operand in node.reads.items() if isinstance(operand, Fixed)}
    read, written = (set(values_in(side.values())) for side in (node.reads, node.writes))
    if "intake" in facts:
        read -= written  # they pass from the product into attention inside of the kernel
    per_token = sum(value.row_bytes for values in (read, written) for value in values)
    flops = 0
    if node.kind == "embedding":
        weights.pop("table")  # a token reads one row of it
        per_token += facts["row_bytes"]
    elif node.kind in ("write", "intake"):
        per_token += _stored(node)
    elif node.kind == "packed":
        for number in range(len(facts["parts"])):
            weights.pop(f"hadamard{number}", None)  # read instead of the weight itself when many rows are batched
        if (intake := facts.get("intake")) is not None:
            per_token += _stored(intake)
        flops = 2 * facts["inner"] * _outputs(node)
    elif node.kind == "latents":
        pages = node.writes["pages"]
        assert isinstance(pages, Fixed)
        per_token += (facts["rank"] + 2 * facts["half"]) * pages.tensor.element_size()
    elif node.kind == "head_products":
        flops = 2 * facts["heads"] * facts["columns"] * facts["outputs"]
    elif node.kind in ("linear", "head", "packed_head"):
        flops = 2 * facts["inner"] * facts["outputs"]
    operands: Operands = "own"
    if node.kind in ("packed", "packed_head"):
        operands = "int8" if facts["int8"] else "bf16"
    return Traffic(1, sum(weights.values()), per_token, flops, operands)


def _stored(node: Instruction) -> int:
    """Bytes of a token's keys and values, or of one of the two."""
    facts, both = node.facts, node.kind == "intake"
    numbers = facts["kv_heads"] * (facts["size"] + facts["values"]) if both else facts["heads"] * facts["size"]
    pages = node.writes["k_pages" if both else "pages"]
    assert isinstance(pages, Fixed)
    return int(numbers * pages.tensor.element_size()) // (2 if pages.tensor.dtype is INT4 else 1)


def _outputs(node: Instruction) -> int:
    return sum(outputs for outputs, _ in node.facts["parts"])
