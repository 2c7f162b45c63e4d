"""Fuses instructions whose results need not go through memory. Every rule keeps the same bits.

All values are written once when the rules run, so an instruction may move up to where its operands are written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from bankfull.ops.native.tape.instruction import Fixed, Instruction, Node, Operand, Value, ValueColumns, values_in
from bankfull.ops.pointwise.native import GATES

MOST_PARTS = 8
"""The most weights that one instruction multiplies, a limit of the C++ side."""
GROUP = 32
"""Columns of a quantization group of an encoded row."""


def fuse(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """`keep`: values that the tape returns."""
    nodes = _share_activations(nodes)
    for rule in (_gate, _encode_norm, _encode_attention, _take_in, _take_in_at_once):
        nodes = rule(nodes, keep)
    return nodes


def _readers(nodes: list[Node]) -> dict[Value, list[Node]]:
    readers: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in values_in(node.reads.values()):
            readers[value].append(node)
    return readers


def _writers(nodes: list[Node]) -> dict[Value, Node]:
    return {value: node for node in nodes for value in values_in(node.writes.values())}


def _instruction(node: Node | None, kind: str) -> Instruction | None:
    return node if isinstance(node, Instruction) and node.kind == kind else None


def _value(operand: object) -> Value | None:
    return operand.value if isinstance(operand, ValueColumns) else None


def _share_activations(nodes: list[Node]) -> list[Node]:
    """One instruction for weights that read the same encoded row: queries, keys and values; gate and up."""
    first: dict[object, Instruction] = {}
    kept: list[Node] = []
    for node in nodes:
        packed = _instruction(node, "packed")
        if packed is None:
            kept.append(node)
            continue
        leader = first.get(packed.reads["x"])
        if leader is None or len(leader.facts["parts"]) == MOST_PARTS:
            first[packed.reads["x"]] = packed
            kept.append(packed)
            continue
        number = len(leader.facts["parts"])
        leader.facts["parts"] += packed.facts["parts"]
        for name in ("weight", "hadamard", "bias"):
            leader.reads[f"{name}{number}"] = packed.reads[f"{name}0"]
        leader.writes[f"y{number}"] = packed.writes["y0"]
    return kept


def _gate(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """Fuse f(gate) * up where both come from one instruction and nothing else reads them."""
    readers, writers = _readers(nodes), _writers(nodes)
    gone: set[Node] = set()
    for node in nodes:
        product = _instruction(node, "pointwise")
        if product is None or product.facts["kind"] not in GATES:
            continue
        gate, up, y = _value(product.reads["x"]), _value(product.reads["factor"]), _value(product.writes["y"])
        if gate is None or up is None or y is None:
            continue
        packed = _instruction(writers.get(gate), "packed")
        if packed is None or writers.get(up) is not packed or len(packed.facts["parts"]) != 2:
            continue
        ordered = _value(packed.writes["y0"]) is gate and _value(packed.writes["y1"]) is up
        alone = readers[gate] == [product] and readers[up] == [product] and gate not in keep and up not in keep
        if not (ordered and alone) or packed.facts["parts"][0][0] % GROUP:
            continue
        packed.facts["gate"] = product.facts["kind"]
        packed.label = "packed, gated"
        packed.writes["y0"], packed.writes["y1"] = product.writes["y"], None
        gone.add(product)
        encode = _instruction(readers[y][0], "encode") if len(readers[y]) == 1 else None
        if encode is not None and y not in keep:
            packed.writes["encoded"], packed.writes["y0"] = encode.writes["encoded"], None
            gone.add(encode)
    return [node for node in nodes if node not in gone]


def _encode_norm(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """A norm encodes its result."""
    readers = _readers(nodes)
    gone: set[Node] = set()
    for node in nodes:
        norm = _instruction(node, "norm")
        y = None if norm is None else _value(norm.writes["y"])
        if norm is None or y is None or norm.facts["per_token"] != 1:
            continue
        encode = next((e for e in readers[y] if _instruction(e, "encode")), None)
        if encode is None:
            continue
        norm.writes["encoded"] = encode.writes["encoded"]
        gone.add(encode)
        if readers[y] == [encode] and y not in keep:
            norm.writes["y"] = None
    return [node for node in nodes if node not in gone]


def _encode_attention(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """Attention encodes its result, where heads are whole groups."""
    readers = _readers(nodes)
    gone: set[Node] = set()
    for node in nodes:
        attention = _instruction(node, "attention")
        y = None if attention is None else _value(attention.writes["y"])
        if attention is None or y is None or attention.facts["values"] % GROUP or y in keep or len(readers[y]) != 1:
            continue
        encode = _instruction(readers[y][0], "encode")
        if encode is not None:
            attention.writes["encoded"], attention.writes["y"] = encode.writes["encoded"], None
            gone.add(encode)
    return [node for node in nodes if node not in gone]


def _take_in(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """RoPE of queries and keys and the write of keys and values: one pass over the new tokens before attention."""
    readers, writers = _readers(nodes), _writers(nodes)
    stored: dict[tuple[int, int], Instruction] = {}
    gone: set[Node] = set()
    before: dict[Node, Instruction] = {}
    for node in nodes:
        write, attention = _instruction(node, "write"), _instruction(node, "attention")
        if write is not None:
            stored[_address(write.writes["pages"]), _address(write.writes["scales"])] = write
        if attention is None:
            continue
        keys, values = (
            stored.pop((_address(attention.reads[f"{name}_pages"]), _address(attention.reads[f"{name}_scales"])), None)
            for name in ("k", "v")
        )
        if keys is None or values is None or keys.reads["slots"] != values.reads["slots"]:
            continue  # the layer reads the pages of another layer
        rotations = _rotations(attention, keys, readers, writers)
        if rotations is not None:
            before[attention] = _intake(attention, keys, values, rotations, readers, keep)
            gone.update(rotations, (keys, values))
    out: list[Node] = []
    for node in nodes:
        if node in before:
            out.append(before[node])
        if node not in gone:
            out.append(node)
    return out


def _address(operand: object) -> int:
    if operand is None:
        return 0
    assert isinstance(operand, Fixed)
    return operand.tensor.data_ptr()


def _rotations(
    attention: Instruction, keys: Instruction, readers: dict[Value, list[Node]], writers: dict[Value, Node]
) -> tuple[Instruction, ...] | None:
    """The RoPE instructions of queries and keys: both, or none of them; None where they cannot be fused."""
    q, k = _value(attention.reads["q"]), _value(keys.reads["rows"])
    if q is None or k is None:
        return None
    rotate_q, rotate_k = _instruction(writers.get(q), "rotate"), _instruction(writers.get(k), "rotate")
    if rotate_q is None or rotate_k is None:
        return () if rotate_q is rotate_k else None
    same = all(rotate_q.reads[name] == rotate_k.reads[name] for name in ("cos", "sin"))
    alone = readers[q] == [attention] and readers[k] == [keys]
    return (rotate_q, rotate_k) if same and alone and rotate_q.facts["half"] == rotate_k.facts["half"] else None


def _intake(
    attention: Instruction,
    keys: Instruction,
    values: Instruction,
    rotations: tuple[Instruction, ...],
    readers: dict[Value, list[Node]],
    keep: Collection[Value],
) -> Instruction:
    facts = attention.facts
    q, k, v = attention.reads["q"], keys.reads["rows"], values.reads["rows"]
    cos = sin = turned = None
    half = 0
    if rotations:
        rotate_q, rotate_k = rotations
        cos, sin, half = rotate_q.reads["cos"], rotate_q.reads["sin"], rotate_q.facts["half"]
        turned, q, k = q, rotate_q.reads["x"], rotate_k.reads["x"]
        assert isinstance(q, ValueColumns)
        if readers[q.value] == [rotate_q] and q.value not in keep:
            turned = q  # in place
        attention.reads["q"], facts["q_token"] = turned, _floats_apart(turned)
    return Instruction(
        "intake",
        {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "slots": keys.reads["slots"]},
        {"turned": turned, **{name: attention.reads[name] for name in ("k_pages", "k_scales", "v_pages", "v_scales")}},
        {
            "q_token": _floats_apart(q),
            "k_token": _floats_apart(k),
            "v_token": _floats_apart(v),
            "turned_token": _floats_apart(turned),
            "half": half,
            "joined": False,
            **{
                name: facts[name]
                for name in (
                    "k_strides",
                    "v_strides",
                    "frames",
                    "page_tokens",
                    "heads",
                    "kv_heads",
                    "size",
                    "values",
                    "type",
                )
            },
        },
        "intake",
    )


def _take_in_at_once(nodes: list[Node], keep: Collection[Value]) -> list[Node]:
    """Fuse the intake into the product that makes the heads, where heads are whole groups of its outputs."""
    readers, products = _readers(nodes), _writers([node for node in nodes if _instruction(node, "packed")])
    gone: set[Node] = set()
    joined: dict[Node, Instruction] = {}
    for node in nodes:
        intake = _instruction(node, "intake")
        if intake is None or intake.facts["size"] % GROUP or intake.facts["values"] % GROUP:
            continue
        heads = [intake.reads[name] for name in ("q", "k", "v")]
        packed = next((_instruction(products.get(value), "packed") for value in values_in(heads)), None)
        if packed is None or len(packed.facts["parts"]) != len(heads) or packed.facts["gate"] >= 0:
            continue
        if heads != [packed.writes[f"y{i}"] for i in range(len(heads))] or not _goes_to(heads, intake, readers, keep):
            continue
        # The product moves down: its operands stay live, and no instruction between reads its results.
        both = Instruction("packed", packed.reads | intake.reads, packed.writes | intake.writes, dict(packed.facts))
        both.facts["intake"], both.label = intake, "packed, taken in"
        intake.facts["joined"] = True
        joined[intake] = both
        gone.add(packed)
    return [joined.get(node, node) for node in nodes if node not in gone]


def _goes_to(
    operands: list[Operand | None], reader: Instruction, readers: dict[Value, list[Node]], keep: Collection[Value]
) -> bool:
    """Whether only `reader` reads the operands, apart from attention, which reads `reader`'s result in their place."""
    left = _value(reader.writes["turned"])
    for value in values_in(operands):
        others = [node for node in readers[value] if node is not reader]
        if value in keep or any(value is not left or _instruction(node, "attention") is None for node in others):
            return False
    return True


def _floats_apart(operand: object) -> int:
    return operand.stride // 4 if isinstance(operand, ValueColumns) else 0
