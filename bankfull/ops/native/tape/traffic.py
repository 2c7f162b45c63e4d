"""What the instructions of a tape move and multiply, each operand counted once per instruction: for profiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bankfull.ops.native.tape.instruction import Break, Fixed, Instruction, Node, values_in

METERED = {"attention": "paged_attention", "conv": "causal_conv", "scan": "selective_scan"}
"""Kinds of instructions whose cost follows from more than the tokens of a step -> the operation that knows it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one replay, all instructions of a label together."""

    count: int = 0
    fixed: int = 0
    """Bytes, whatever the step: weights."""
    per_token: int = 0
    """Bytes for each token."""
    flops: int = 0
    """Multiplications and additions for each token."""
    operation: str = ""
    """Not empty: whose cost stands for all of this, see METERED."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.count + other.count, self.fixed + other.fixed, self.per_token + other.per_token,
            self.flops + other.flops, self.operation or other.operation,
        )  # fmt: skip


def label_of(node: Node) -> str:
    """How a profile calls it: matrices of different shapes are told apart."""
    if isinstance(node, Break):
        return f"{node.operation.name} (torch)"
    if node.kind == "packed":
        return f"{node.label} {node.facts['inner']} -> {_outputs(node)}"
    return f"{node.label} {node.facts['inner']} -> {node.facts['outputs']}" if node.kind == "linear" else node.label


def traffic_of(nodes: Iterable[Node]) -> dict[str, Traffic]:
    """Label -> what one replay moves and multiplies."""
    found: dict[str, Traffic] = {}
    for node in nodes:
        label = label_of(node)
        found[label] = found.get(label, Traffic()) + _traffic(node)
    return found


def _traffic(node: Node) -> Traffic:
    if isinstance(node, Break):
        return Traffic(1, operation=node.operation.name)
    if node.kind in METERED:
        return Traffic(1, operation=METERED[node.kind])
    facts = node.facts
    weights = {name: operand.tensor.nbytes for name, operand in node.reads.items() if isinstance(operand, Fixed)}
    per_token = sum(value.row_bytes for side in (node.reads, node.writes) for value in set(values_in(side.values())))
    flops = 0
    if node.kind == "embedding":
        weights.pop("table")  # of which a token reads one row
        per_token += facts["row_bytes"]
    elif node.kind in ("write", "intake"):
        both = node.kind == "intake"  # keys and values
        numbers = facts["kv_heads"] * (facts["size"] + facts["values"]) if both else facts["heads"] * facts["size"]
        stored = node.writes["pages" if node.kind == "write" else "k_pages"]
        assert isinstance(stored, Fixed)
        per_token += numbers * stored.tensor.element_size()
    elif node.kind == "packed":
        for number in range(len(facts["parts"])):
            weights.pop(f"mixed{number}", None)  # instead of the weight itself, where rows are many
        flops = 2 * facts["inner"] * _outputs(node)
    elif node.kind in ("linear", "head", "packed_head"):
        flops = 2 * facts["inner"] * facts["outputs"]
    return Traffic(1, sum(weights.values()), per_token, flops)


def _outputs(node: Instruction) -> int:
    return sum(outputs for outputs, _ in node.facts["parts"])
