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
            self.count + other.count,
            self.fixed + other.fixed,
            self.per_token + other.per_token,
            self.flops + other.flops,
            self.operation or other.operation,
        )


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
    read, written = (set(values_in(side.values())) for side in (node.reads, node.writes))
    if "intake" in facts:
        read -= written  # on the way from a product into attention
    per_token = sum(value.row_bytes for values in (read, written) for value in values)
    flops = 0
    if node.kind == "embedding":
        weights.pop("table")  # of which a token reads one row
        per_token += facts["row_bytes"]
    elif node.kind in ("write", "intake"):
        per_token += _stored(node)
    elif node.kind == "packed":
        for number in range(len(facts["parts"])):
            weights.pop(f"mixed{number}", None)  # instead of the weight itself, where rows are many
        if (intake := facts.get("intake")) is not None:
            per_token += _stored(intake)
        flops = 2 * facts["inner"] * _outputs(node)
    elif node.kind in ("linear", "head", "packed_head"):
        flops = 2 * facts["inner"] * facts["outputs"]
    return Traffic(1, sum(weights.values()), per_token, flops)


def _stored(node: Instruction) -> int:
    """Bytes of a token's keys and values, or of either."""
    facts, both = node.facts, node.kind == "intake"
    numbers = facts["kv_heads"] * (facts["size"] + facts["values"]) if both else facts["heads"] * facts["size"]
    pages = node.writes["k_pages" if both else "pages"]
    assert isinstance(pages, Fixed)
    return int(numbers * pages.tensor.element_size())


def _outputs(node: Instruction) -> int:
    return sum(outputs for outputs, _ in node.facts["parts"])
