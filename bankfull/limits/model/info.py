"""Description of a model and its cost per token, from its files, without reading a weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bankfull.errors import ModelError
from bankfull.limits.meter.metered import MeteredModel, RequestedShapes
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.kv_saving import KvSaving, kv_savings
from bankfull.state.mask import Sight
from bankfull.state.spec import Layout
from bankfull.text.load import load_tokenizer
from bankfull.weights.source import ModelFiles

PREFILL_TOKENS = 512
DECODE_CONTEXTS = (1, 1024)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions; None where the architecture does not have one."""

    hidden: int
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    ffn: int | None
    vocab: int


@dataclass(frozen=True, slots=True)
class PagedState:
    """State that grows by `token_bytes` per token, up to the attention window if there is one."""

    layers: int
    window: Sight
    token_bytes: int


@dataclass(frozen=True, slots=True)
class StateInfo:
    token_bytes: int
    """Bytes per token over all layers, while the context is shorter than every window."""
    paged: tuple[PagedState, ...]
    recurrent_layers: int
    slot_bytes: int
    """Bytes of recurrent state, constant per sequence."""


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    kind: str
    vocab: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The minimum cost of a step divided by its tokens."""

    phase: str
    tokens: int
    context: int
    """Tokens visible to the last token, including itself."""
    flops: float
    bytes: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    path: str
    kind: str
    architecture: str
    layers: int
    shape: ModelShape
    parameters: int
    bytes_by_scheme: dict[str, int]
    total_bytes: int
    """Stored bytes of the tensors that the model uses."""
    dtype: str
    """Dtype of computation and state that the figures below assume."""
    state: StateInfo
    context_length: int
    tokenizer: TokenizerInfo | None
    tokenizer_problem: str | None
    """Why the tokenizer could not be loaded."""
    chat_template: bool
    costs: tuple[TokenCost, ...]
    savings: tuple[KvSaving, ...] = ()
    """KV savings of a model as data: its KV cache beside that of the same model without them."""
    quantization: str | None = None
    """Method and bits of a checkpoint that was published quantized."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def describe(files: ModelFiles, *, dtype: str | None = None) -> ModelInfo:
    metered = MeteredModel(files, dtype=dtype)
    tokenizer, problem, template = _tokenizer(files)
    model = metered.model
    stored = metered.bytes_by_scheme
    return ModelInfo(
        path=str(files.path),
        kind=files.kind,
        architecture=str(files.config["model_type"]),
        layers=len(model.blocks),
        shape=_shape(metered, files.config),
        parameters=metered.parameters,
        bytes_by_scheme=stored,
        total_bytes=sum(stored.values()),
        dtype=str(metered.dtype).removeprefix("torch."),
        state=_state(metered.layout),
        context_length=model.max_positions,
        tokenizer=tokenizer,
        tokenizer_problem=problem,
        chat_template=template,
        costs=_costs(metered),
        savings=kv_savings(files.config, metered),
        quantization=files.quantization,
    )


def _shape(metered: MeteredModel, config: Mapping[str, Any]) -> ModelShape:
    level = {**config, **(config.get("text_config") or {})}
    # Layers know their head counts; configurations may leave out values that follow from others.
    heads = next((heads for mixer in metered.model.mixers if (heads := getattr(mixer, "heads", None))), None)
    ffn = level.get("intermediate_size") or level.get("ffn_dim")
    return ModelShape(
        metered.model.hidden,
        heads and heads.count,
        heads and heads.kv,
        heads and heads.size,
        ffn if isinstance(ffn, int) else None,
        metered.model.vocab,
    )


def _state(layout: Layout) -> StateInfo:
    paged = tuple(PagedState(len(group.layers), group.window, group.token_bytes) for group in layout.paged)
    recurrent = layout.recurrent
    if recurrent is None:
        return StateInfo(layout.token_bytes, paged, 0, 0)
    return StateInfo(layout.token_bytes, paged, len(recurrent.layers), recurrent.slot_bytes)


def _tokenizer(files: ModelFiles) -> tuple[TokenizerInfo | None, str | None, bool]:
    """A model without a usable tokenizer is still described, with the reason."""
    if isinstance(files.source, RequestedShapes):
        return None, "only the configuration is known", False
    try:
        tokenizer, template = load_tokenizer(files)
    except ModelError as error:
        return None, str(error), False
    kind = type(tokenizer.backend.model).__name__
    return TokenizerInfo(kind, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_ids))), None, template is not None


def _costs(metered: MeteredModel) -> tuple[TokenCost, ...]:
    longest = metered.model.max_positions
    tokens = min(PREFILL_TOKENS, longest)
    steps = [("prefill", StepShape.prefill(tokens))]
    contexts = sorted({min(context, longest) for context in DECODE_CONTEXTS})
    steps += [("decode", StepShape.decode(1, context)) for context in contexts]
    costs = []
    for phase, step in steps:
        cost = metered.cost(step).sum() * (1 / step.tokens)
        costs.append(TokenCost(phase, step.tokens, step.lengths[0], cost.flops, cost.bytes))
    return tuple(costs)
