"""The tape: what is captured gives the bits of what is not, for every batch, family and arithmetic."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from random import Random

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bankfull.layers.attention import Attention
from bankfull.layers.batch import Batch
from bankfull.layers.build import Build
from bankfull.layers.decoder import Decoder
from bankfull.layers.linear import Linear
from bankfull.layers.shared import SharedAttention
from bankfull.models.registry import build_model
from bankfull.ops import Kit, activate, activate_mul, kit_for, native
from bankfull.ops.products.activations import RULES
from bankfull.progress import PROGRESS
from bankfull.runtime.batch import placed_batch
from bankfull.runtime.forward import Eager
from bankfull.state.mask import Mask
from bankfull.state.spec import layout_of
from bankfull.state.storage import Storage
from bankfull.weights.qtensor import QTensor
from bankfull.weights.requantized import Requantized
from bankfull.weights.source import TensorSource, open_model

if native.status() is not None:
    pytest.skip("the kernels are not built", allow_module_level=True)

from bankfull.ops.native.tape import replay
from bankfull.ops.native.tape.instruction import Instruction, Node, Value, ValueColumns
from bankfull.ops.native.tape.layout import ALIGN, lay_out
from bankfull.ops.native.tape.record import CannotRecord, Recorder
from bankfull.runtime.taped import Taped

CPU = torch.device("cpu")
PAGE = 4
_COMMON = {"vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 128}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 96}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, **_HEADS, tie_word_embeddings=True),
    "small heads": lambda: transformers.LlamaConfig(
        **_COMMON, num_attention_heads=8, num_key_value_heads=2, head_dim=8, intermediate_size=96
    ),
    "biased": lambda: transformers.Qwen2Config(**_COMMON, **{k: v for k, v in _HEADS.items() if k != "head_dim"}),
    "normed": lambda: transformers.Qwen3Config(**_COMMON, **_HEADS),
    "capped": lambda: transformers.Gemma2Config(
        **_COMMON,
        **_HEADS,
        sliding_window=6,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "fused": lambda: transformers.Phi3Config(
        **_COMMON, **{k: v for k, v in _HEADS.items() if k != "head_dim"}, pad_token_id=0, partial_rotary_factor=0.5
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=70,
        hidden_size=64,
        num_hidden_layers=2,
        max_position_embeddings=128,
        num_attention_heads=2,
        ffn_dim=96,
        word_embed_proj_dim=32,
    ),
    "parallel": lambda: transformers.GPTNeoXConfig(**_COMMON, num_attention_heads=2, intermediate_size=96),
    "normed after": lambda: transformers.Olmo2Config(**_COMMON, **{k: v for k, v in _HEADS.items() if k != "head_dim"}),
    "experts": lambda: transformers.Qwen2MoeConfig(
        **_COMMON,
        **{k: v for k, v in _HEADS.items() if k != "head_dim"},
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=70, hidden_size=64, num_hidden_layers=2, state_size=4, time_step_rank=16
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=70, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, n_groups=2, state_size=20
    ),
    "hybrid": lambda: transformers.FalconH1Config(
        **_COMMON,
        **{k: v for k, v in _HEADS.items() if k != "head_dim"},
        mamba_d_ssm=96,
        mamba_n_heads=3,
        mamba_d_state=20,
        mamba_rms_norm=True,
        ssm_multipliers=[0.5, 0.8, 1.2, 0.9, 1.4],
        mlp_multipliers=[0.7, 1.3],
        ssm_out_multiplier=0.8,
    ),
}
LATENT = {
    "latent": lambda: transformers.DeepseekV3Config(
        **_COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=96,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=24,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
    ),
}
"""Latent attention has no int8 pages."""
ARITHMETIC = {
    "exact": (None, "float", torch.float32),
    "bf16": (None, "bf16", torch.bfloat16),
    "bf16 over blocks": ("q8_0", "bf16", torch.bfloat16),
    "int8": ("q8_0", "int8", torch.bfloat16),
    "int8 pages": ("q8_0", "int8", torch.int8),
    "int8 pages alone": (None, "float", torch.int8),
}


@lru_cache
def folder_of(family: str) -> Path:
    import atexit
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="bankfull-tape-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config((CONFIGS | LATENT)[family](), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def built(family: str, arithmetic: str = "exact") -> tuple[Decoder, Kit]:
    stored, activations, pages = ARITHMETIC[arithmetic]
    files = open_model(folder_of(family))
    source = files.source if stored is None else Requantized(files.source, (stored, "keep"), tables=True)
    kit, rule = kit_for("cpu"), RULES[activations]
    return build_model(files.config, Build(source, kit, torch.float32, CPU, kv_dtype=pages, activations=rule)), kit


class Sides:
    """The same sequences, eager on one state and captured on another."""

    def __init__(self, model: Decoder, kit: Kit, sequences: int) -> None:
        self.layout = layout_of(model.states(), PAGE)
        self.states = [Storage(self.layout, 200, 2 * sequences + 2, CPU) for _ in range(2)]
        for storage in self.states:
            storage.frames.zero_()
        self.eager = Eager(model, self.layout, self.states[0].layers)
        self.taped = Taped(Eager(model, self.layout, self.states[1].layers), kit)
        self.length = [0] * sequences
        self.turn = [0] * sequences
        self.random = Random(5)

    def batch(self, counts: list[int]) -> Batch:
        """counts[i] new tokens of sequence i; 0 leaves it out."""
        live = [i for i, count in enumerate(counts) if count]
        longest = max(self.length[i] + counts[i] for i in live)
        tables = []
        for g, group in enumerate(self.layout.paged):
            width = -(-128 // group.page_tokens)
            table = 1 + torch.arange(len(counts) * width).view(-1, width) % 60 + 60 * g  # own pages, far fewer used
            tables.append(table[live][:, : -(-longest // group.page_tokens)].contiguous())
        slots = None
        if self.layout.recurrent is not None:
            read = torch.tensor([0 if not self.length[i] else 1 + 2 * i + self.turn[i] for i in live])
            slots = read, torch.tensor([1 + 2 * i + 1 - self.turn[i] for i in live])
        tokens = torch.tensor([self.random.randrange(70) for i in live for _ in range(counts[i])])
        past = [self.length[i] for i in live]
        batch = placed_batch(self.layout, [counts[i] for i in live], past, tokens, tables, slots)
        for i in live:
            self.length[i] += counts[i]
            self.turn[i] = 1 - self.turn[i]
        return batch

    def step(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.batch(counts)
        with torch.inference_mode():
            return self.eager(batch), self.taped(batch).clone()


TAPED = [(family, arithmetic) for family in CONFIGS for arithmetic in ARITHMETIC]
TAPED += [("latent", arithmetic) for arithmetic in ARITHMETIC if "pages" not in arithmetic]


@pytest.mark.few(40)
@pytest.mark.parametrize(("family", "arithmetic"), TAPED)
def test_captured_and_uncaptured_steps_give_the_same_bits(family: str, arithmetic: str) -> None:
    model, kit = built(family, arithmetic)
    sides = Sides(model, kit, 3)
    assert not sides.taped.tape.breaks
    # Prefill, chunks, mixed steps, decoding, a verify width; few rows and many: one tape serves them all.
    for counts in ([5, 0, 0], [1, 9, 0], [1, 1, 40], [1, 1, 1], [4, 1, 3], [1, 0, 0], [0, 20, 1]):
        eager, taped = sides.step(counts)
        assert eager.isfinite().all() and eager.abs().sum() > 0
        assert torch.equal(eager, taped), f"{counts}: {(eager - taped).abs().max()}"
    for layer in zip(*(storage.layers for storage in sides.states), strict=True):
        for ours, theirs in zip(*layer, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class ActOrder:
    """A source whose quantized matrices have their columns in another order, the same one for equally many columns."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.names, self.has, self.shape, self.scheme = source.names, source.has, source.shape, source.scheme
        self.unread, self.release = source.unread, source.release

    def get(self, name: str) -> QTensor:
        found = self.source.get(name)
        if found.is_dense or "_proj" not in name:
            return found
        order = torch.randperm(found.shape[1], generator=torch.Generator().manual_seed(1)).to(torch.int32)
        return replace(found, columns=order)


@pytest.mark.parametrize("arithmetic", ["exact", "bf16", "int8"])
def test_columns_in_another_order_are_gathered_on_the_tape_once_for_all_that_read_them(arithmetic: str) -> None:
    files = open_model(folder_of("llama"))
    kit, rule = kit_for("cpu"), RULES[ARITHMETIC[arithmetic][1]]
    source = ActOrder(Requantized(files.source, ("q8_0",)))
    model = build_model(files.config, Build(source, kit, torch.float32, CPU, activations=rule))
    sides = Sides(model, kit, 2)
    assert not sides.taped.tape.breaks
    found, layers = kinds(sides.taped), len(model.blocks)
    assert found["gather"] == 4 * layers, "for queries, keys and values; out; gate and up; down"
    if arithmetic != "exact":
        assert found["packed, taken in"] == found["packed, gated"] == layers
    for counts in ([20, 0], [1, 7], [1, 1]):
        eager, taped = sides.step(counts)
        assert eager.isfinite().all() and torch.equal(eager, taped)


@pytest.mark.parametrize("arithmetic", ["exact", "int8 pages"])
def test_layers_that_share_keys_and_values_are_part_of_the_tape(arithmetic: str) -> None:
    model, kit = built("normed", arithmetic)
    owner, mixer = model.mixers
    assert isinstance(owner, Attention) and isinstance(mixer, Attention) and isinstance(mixer.out, Linear)
    pages = ARITHMETIC[arithmetic][2]
    build = Build(open_model(folder_of("normed")).source, kit, torch.float32, CPU, kv_dtype=pages)
    model.blocks[1].mixer = SharedAttention(build, owner, 0, mixer.q, mixer.out, q_norm=mixer.q_norm)
    sides = Sides(model, kit, 2)
    assert not sides.taped.tape.breaks and sides.layout.paged[0].layers == (0,)
    for counts in ([20, 0], [1, 7], [1, 1]):
        eager, taped = sides.step(counts)
        assert eager.isfinite().all() and torch.equal(eager, taped)


@pytest.mark.parametrize("arithmetic", ["exact", "int8 pages"])
def test_sparse_masks_are_part_of_the_tape(arithmetic: str) -> None:
    model, kit = built("llama", arithmetic)
    for mixer, mask in zip(model.mixers, (Mask(4, 3, global_tokens=2), Mask(8, stride=8, columns=2)), strict=True):
        assert isinstance(mixer, Attention)
        mixer.heads = replace(mixer.heads, mask=mask)
    sides = Sides(model, kit, 2)
    assert not sides.taped.tape.breaks
    for counts in ([40, 0], [1, 7], [1, 1]):
        eager, taped = sides.step(counts)
        assert eager.isfinite().all() and torch.equal(eager, taped)


@pytest.mark.parametrize("arithmetic", ["exact", "int8 pages"])
def test_sinks_are_part_of_the_tape(arithmetic: str) -> None:
    model, kit = built("llama", arithmetic)
    plain = Sides(model, kit, 1).step([20])[0]
    for mixer in model.mixers:
        assert isinstance(mixer, Attention)
        mixer.sinks = torch.tensor([0.5, 2.0])
    sides = Sides(model, kit, 1)
    assert not sides.taped.tape.breaks
    for counts in ([20], [1]):
        eager, taped = sides.step(counts)
        assert torch.equal(eager, taped) and not torch.equal(eager, plain)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("arithmetic", ["exact", "int8"])
def test_a_long_step_moves_the_count_on_its_way_and_keeps_its_bits(
    family: str, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "LONG", 10)
    monkeypatch.setattr(replay, "STRETCH", 1)  # wherever it is cut
    model, kit = built(family, arithmetic)
    sides = Sides(model, kit, 1)
    for count, ticks in ((9, 1), (40, len(sides.taped.tape) - (sides.taped.tape._chosen is not None))):
        batch = sides.batch([count])
        with torch.inference_mode():
            eager, before = sides.eager(batch), PROGRESS.count
            assert torch.equal(eager, sides.taped(batch)) and PROGRESS.count == before + ticks


def kinds(taped: Taped) -> Counter[str]:
    return Counter(name for name, _, _ in taped.tape._tape.times())


@pytest.mark.parametrize("family", ["llama", "biased"])
@pytest.mark.parametrize("arithmetic", ["bf16", "bf16 over blocks", "int8", "int8 pages"])
def test_a_layer_with_packed_weights_is_seven_kernels(family: str, arithmetic: str) -> None:
    """Queries, keys and values with their biases, turned and stored, are one of them."""
    model, kit = built(family, arithmetic)
    found = kinds(Sides(model, kit, 1).taped)
    layers = len(model.blocks)
    assert found == {
        "embedding": 1,
        "angles": 1,
        "norm": 2 * layers + 1,
        "packed, taken in": layers,
        "packed": 2 * layers,
        "packed, gated": layers,
        "attention": layers,
        "head": 1,
    }


@pytest.mark.parametrize("family", ["small heads", "normed"])
def test_heads_that_are_no_whole_groups_of_outputs_or_not_done_yet_are_taken_in_apart(family: str) -> None:
    model, kit = built(family, "int8")
    found = kinds(Sides(model, kit, 1).taped)
    assert found["intake"] == len(model.blocks) and "packed, taken in" not in found


def test_a_model_in_bf16_has_no_operation_without_a_kernel() -> None:
    """The head's best output included, which is no part of the tape; and a step's bits do not tell its rows."""
    model, kit = built("llama", "bf16")
    assert {name: set(found) for name, found in kit.chosen.items()} == {name: {"native"} for name in kit.chosen}
    assert {"linear_bf16", "best_linear_bf16"} <= set(kit.chosen) and "linear" not in kit.chosen
    hidden = torch.randn(40, 64)
    best = model.head.project.best(hidden)
    assert torch.equal(best, model.head.project(hidden).argmax(-1))
    assert torch.equal(torch.cat([model.head.project.best(row) for row in hidden.split(1)]), best)


def test_an_operation_with_only_a_torch_body_is_a_counted_break() -> None:
    files = open_model(folder_of("llama"))
    kit = Kit("cpu", ("native",))
    taken = activate_mul.providers.pop("native")
    try:
        model = build_model(files.config, Build(files.source, kit, torch.float32, CPU))
    finally:
        activate_mul.providers["native"] = taken
    sides = Sides(model, kit, 2)
    assert sides.taped.tape.breaks == {"activate_mul": len(model.blocks)}
    for counts in ([3, 0], [1, 17], [1, 1]):
        eager, taped = sides.step(counts)
        assert torch.equal(eager, taped)


def test_what_a_tape_cannot_repeat_is_refused() -> None:
    """A tensor made between two operations would be forgotten at the next replay."""
    kit = kit_for("cpu")
    run = kit.bind(activate, dtype=torch.float32)
    recorder = Recorder()
    with kit.recording(recorder), pytest.raises(CannotRecord, match="outside of the model's operations"):
        run(torch.empty(13, 8, device="meta"), "silu")


def test_a_tapes_memory_follows_the_largest_step_only() -> None:
    model, kit = built("llama", "int8")
    sides = Sides(model, kit, 2)
    sides.step([40, 0])
    held = sides.taped.tape._arena.data_ptr()
    for _ in range(20):
        sides.step([1, 2])
    assert sides.taped.tape._arena.data_ptr() == held


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=25))
def test_values_that_live_at_the_same_time_never_overlap(lives: list[tuple[int, int, int]]) -> None:
    values = [Value(size, torch.uint8) for size, _, _ in lives]
    nodes: list[Node] = [Instruction("none", {}, {}) for _ in range(13)]
    for number, (value, (_, a, b)) in enumerate(zip(values, lives, strict=True)):
        nodes[min(a, b)].writes[str(number)] = ValueColumns(value)
        nodes[max(a, b)].reads[str(number)] = ValueColumns(value)
    size = lay_out(nodes, [values[0]])
    spans = [(min(a, b), max(a, b)) for _, a, b in lives]
    spans[0] = (spans[0][0], len(nodes))
    for i, (value, span) in enumerate(zip(values, spans, strict=True)):
        assert value.place % ALIGN == 0 and value.place + value.row_bytes <= size
        for other, span2 in list(zip(values, spans, strict=True))[:i]:
            if span[0] <= span2[1] and span2[0] <= span[1]:
                apart = value.place + value.row_bytes <= other.place or other.place + other.row_bytes <= value.place
                assert apart, f"{value} and {other} are both needed at {span} and {span2}"
