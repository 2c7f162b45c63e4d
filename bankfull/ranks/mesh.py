"""The mesh of one replica: over how many ranks a model is split, and along which of its dimensions.

Ranks are numbered with tensor ranks innermost, then context ranks, then stages: the groups that exchange most are the
ranks that lie next to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import ClassVar

from bankfull.declared import Declared, Trait, Traits
from bankfull.errors import ConfigError

SEQUENCE: Mapping[str, Declared] = {
    "off": Declared("each rank has all tokens"),
    "megatron": Declared(
        "tokens, between layers that tp splits",
        {
            Trait.TENSOR_RANKS: "The layout {layout} splits tokens over tensor ranks but has only one; raise tp.",
        },
    ),
    "ulysses": Declared(
        "cp ranks exchange tokens for heads around attention",
        {
            Trait.CONTEXT_RANKS: "The layout {layout} exchanges tokens for heads over context ranks but has one; raise "
            "cp.",
        },
    ),
}
"""Ways of sequence parallelism."""
LAYOUTS: Mapping[str, Declared] = {
    "tp": Declared("heads, widths and the vocabulary"),
    "pp": Declared("layers, in stages"),
    "cp": Declared("tokens and KV pages"),
    "ep": Declared("experts, over the tp and cp ranks"),
    "hot": Declared(
        "copies of the experts used most",
        {Trait.EXPERT_RANKS: "The layout {layout} copies experts to all expert ranks but has one; raise ep."},
    ),
    "ffn": Declared(
        "feed-forward layers, on ranks of their own",
        {
            Trait.FEED_FORWARD: "The layout {layout} gives feed-forward layers ranks of their own, but this model has "
            "none, or has none in one of the stages; leave out ffn."
        },
        {
            Trait.DIVIDED_TOKENS: "The layout {layout} runs feed-forward layers on ranks of their own, which get all "
            "tokens of a step; leave out cp and sp, which split tokens, or ffn."
        },
    ),
    "sp": Declared(f"on: {SEQUENCE['megatron'].about}; ulysses: {SEQUENCE['ulysses'].about}"),
}
"""Keys of a layout, and what each of them splits."""
FEED_WIDTH = "feed-forward width"
"""Name of the width of dense feed-forward layers in `MeshFacts.widths`."""


@dataclass(frozen=True, slots=True)
class MeshFacts:
    """What a mesh must divide in a model."""

    layers: int
    heads: int = 0
    """Query heads of a layer; 0 = no attention."""
    kv_heads: int = 0
    """Key/value heads of a layer; 0 = none: no attention, or one latent that all heads share."""
    experts: int = 0
    """Routed experts of a layer; 0 = none."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Further sizes that tensor ranks split evenly, by the name that a message shows: FEED_WIDTH."""
    expert_width: int = 0
    """Inner width of one expert."""


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """The ranks with which one rank runs a layer's experts, itself among them."""

    group: tuple[int, ...]
    """Ranks that hold different experts."""
    tokens: tuple[int, ...]
    """Ranks of `group` that have the same tokens."""
    width: tuple[int, ...]
    """Ranks that hold parts of the width of the same experts."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Ranks of one replica, by layout. All 1: one rank holds the whole model."""

    tp: int = 1
    """Tensor ranks: heads, widths and the vocabulary are split. K/V heads are copied where there are fewer."""
    pp: int = 1
    """Stages of a pipeline: layers are split."""
    cp: int = 1
    """Context ranks: tokens are split, weights are copied."""
    ep: int = 1
    """Expert ranks: experts are spread over the tensor and context ranks of a stage, which they add none to."""
    sp: str = "off"
    """Sequence parallelism: name in `SEQUENCE`. megatron: between the split layers, each tensor rank has its part of
    the tokens. ulysses: context ranks exchange tokens for heads around attention, instead of keys and values."""
    ffn: int = 0
    """Ranks of each stage that run only feed-forward layers: the tensor ranks then run only mixers. 0: together. Expert
    ranks are some of them; the others split widths."""
    hot: int = 0
    """Experts of each layer that every expert rank holds: those that are used most. 0: none."""

    AXES: ClassVar[tuple[str, ...]] = ("tp", "pp", "cp", "ep")
    MOST: ClassVar[int] = 4096

    def __post_init__(self) -> None:
        for name in self.AXES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= self.MOST:
                raise ConfigError(f"{name}={str(value)[:40]} of a layout must be a whole number from 1 to {self.MOST}.")
        for name in ("ffn", "hot"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= self.MOST:
                raise ConfigError(f"{name}={str(value)[:40]} of a layout must be a whole number from 0 to {self.MOST}.")
        if self.sp not in SEQUENCE:
            raise ConfigError(f"sp={str(self.sp)[:40]!r} of a layout is unknown; use off, megatron or ulysses.")
        if self.ranks > self.MOST:
            raise ConfigError(f"The layout {self} has {self.ranks} ranks; at most {self.MOST} are possible.")
        if self.feed_ranks % self.ep:
            raise ConfigError(
                f"The layout {self} spreads experts over {self.ep} of the {self.feed_ranks} ranks of a stage, "
                f"which {self.ep} does not divide; use one of {', '.join(map(str, _divisors(self.feed_ranks)))}."
            )
        for asked, declared in self.declarations():
            declared.refuse(asked, self.traits, layout=self)

    def declarations(self) -> Iterator[tuple[str, Declared]]:
        """What the layout splits, as it is asked for, and what that declares."""
        for axis in fields(self):
            if (value := getattr(self, axis.name)) != axis.default:
                yield f"{axis.name}={value}", SEQUENCE[value] if axis.name == "sp" else LAYOUTS[axis.name]

    @property
    def traits(self) -> Traits:
        """What the layout tells by itself."""
        return {
            Trait.RANKS: self.ranks > 1,
            Trait.TENSOR_RANKS: self.tp > 1,
            Trait.STAGES: self.pp > 1,
            Trait.CONTEXT_RANKS: self.cp > 1,
            Trait.EXPERT_RANKS: self.ep > 1,
            Trait.DIVIDED_TOKENS: self.cp > 1 or self.sp != "off",
            Trait.DEALT_PAGES: self.page_ranks > 1,
        }

    @property
    def ranks(self) -> int:
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks that compute the same layers."""
        return self.tp * self.cp + self.ffn

    @property
    def feed_ranks(self) -> int:
        """Ranks of a stage that run its feed-forward layers."""
        return self.ffn or self.tp * self.cp

    @property
    def feed_tp(self) -> int:
        """Ranks over which the width of a dense feed-forward layer is split."""
        return self.ffn or self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks over which the width of one expert is split: the tensor ranks that expert ranks do not use."""
        return self.feed_tp // math.gcd(self.feed_tp, self.ep)

    def expert_places(self, rank: int) -> ExpertPlaces:
        """The places of a rank that runs feed-forward layers. Ranks that exchange tokens lie next to each other; where
        a context has fewer tensor ranks than there are expert ranks, neighbouring contexts exchange tokens, too."""
        stage, inside = divmod(rank, self.stage_ranks)
        first = stage * self.stage_ranks + (self.tp * self.cp if self.ffn else 0)
        context, tensor_rank = divmod(rank - first, self.feed_tp)
        assert rank >= first, f"rank {inside} of a stage of {self} runs no feed-forward layers"
        near = math.gcd(self.feed_tp, self.ep)
        contexts = self.ep // near
        low, line = context // contexts * contexts, tensor_rank // near * near

        def at(context: int, tensor: int) -> int:
            return first + context * self.feed_tp + tensor

        return ExpertPlaces(
            tuple(at(c, t) for c in range(low, low + contexts) for t in range(line, line + near)),
            (rank,)
            if self.sp == "megatron" and near == self.feed_tp
            else tuple(at(context, t) for t in range(line, line + near)),
            tuple(at(context, t) for t in range(tensor_rank % near, self.feed_tp, near)),
        )

    @property
    def page_ranks(self) -> int:
        """Ranks that the pages of a sequence go round; each of the others has all of them."""
        return 1 if self.sp == "ulysses" else self.cp

    @property
    def head_ranks(self) -> int:
        """Ranks over which attention splits its heads."""
        return self.tp * self.cp if self.sp == "ulysses" else self.tp

    def stages(self, layers: int) -> list[tuple[int, int]]:
        """The first layer of each stage, and the first of the next one; earlier stages have one more where the number
        does not divide, because the last one also computes the head."""
        each, more = divmod(layers, self.pp)
        starts = [stage * each + min(stage, more) for stage in range(self.pp + 1)]
        return list(pairwise(starts))

    def __str__(self) -> str:
        """The layout as `parse` reads it; axes of 1 are left out."""
        parts = [f"{name}={getattr(self, name)}" for name in self.AXES if getattr(self, name) != 1]
        if self.sp != "off":
            parts.append(f"sp={self.sp}")
        parts += [f"{name}={value}" for name in ("ffn", "hot") if (value := getattr(self, name))]
        return ",".join(parts) or "tp=1"

    @staticmethod
    def parse(text: str) -> MeshSpec:
        """The layout from `tp=2,pp=2,cp=2,ep=4,sp=on`, in any order."""
        if not isinstance(text, str) or not text.strip():
            raise ConfigError("The layout is empty; name what is split, as in tp=2,pp=2.")
        shown, values = f"The layout {text[:80]!r}", dict[str, str]()
        for part in text.split(","):
            key, equals, value = (side.strip() for side in part.partition("="))
            if key not in LAYOUTS:
                raise ConfigError(f"{shown} has no axis {key[:40]!r}; its axes are {', '.join(LAYOUTS)}.")
            if not equals:
                raise ConfigError(f"{shown} gives no value for {key}; write {key}={'on' if key == 'sp' else 2}.")
            if key in values:
                raise ConfigError(f"{shown} has {key} twice; give it once.")
            values[key] = value
        given = values.pop("sp", "off")
        sequence = "megatron" if given == "on" else given
        if sequence not in SEQUENCE:
            raise ConfigError(f"{shown}: sp must be one of on, {', '.join(SEQUENCE)}, not {given[:40]!r}.")
        numbers = {key: _number(shown, key, value) for key, value in values.items()}
        return MeshSpec(**numbers, sp=sequence)

    def check(self, facts: MeshFacts) -> None:
        """Refuse a mesh that does not divide the model."""
        if self.pp > facts.layers:
            raise ConfigError(
                f"The layout {self} has {self.pp} stages, but the model has only {facts.layers} layers; lower pp."
            )
        self._check_heads(facts)
        for name, width in facts.widths.items():
            axis, ranks = ("ffn", self.ffn) if self.ffn and name == FEED_WIDTH else ("tp", self.tp)
            if width % ranks:
                raise ConfigError(
                    f"The layout {self} splits the model's {name} of {width} over {ranks} ranks, which does not "
                    f"divide; {_use(axis, width, ranks)}."
                )
        self._check_experts(facts)

    def _check_heads(self, facts: MeshFacts) -> None:
        """Query heads are split evenly; K/V heads are split or copied evenly."""
        ranks, axis = self.head_ranks, "tp x cp" if self.sp == "ulysses" else "tp"
        if facts.heads % ranks:
            raise ConfigError(
                f"The layout {self} splits the model's {facts.heads} heads over {ranks} ranks, which does not divide; "
                f"{_use(axis, facts.heads, ranks)}."
            )
        if facts.kv_heads and facts.kv_heads % ranks and ranks % facts.kv_heads:
            raise ConfigError(
                f"The layout {self} neither splits nor copies the model's {facts.kv_heads} key/value heads evenly over "
                f"{ranks} ranks; {_use(axis, facts.kv_heads, ranks)}, or a multiple of {facts.kv_heads}."
            )

    def _check_experts(self, facts: MeshFacts) -> None:
        if self.ep > 1 and not facts.experts:
            raise ConfigError(f"The layout {self} spreads experts, but the model has none; leave out ep.")
        if self.hot and self.hot >= facts.experts:
            raise ConfigError(
                f"The layout {self} copies {self.hot} experts of each layer to every rank, but a layer has only "
                f"{facts.experts}; use hot = {facts.experts - 1} or less."
            )
        if facts.experts % self.ep:
            raise ConfigError(
                f"The layout {self} spreads the model's {facts.experts} experts over {self.ep} ranks, which does not "
                f"divide; {_use('ep', facts.experts, self.ep)}."
            )
        if facts.experts and facts.expert_width % self.expert_tp:
            raise ConfigError(
                f"The layout {self} splits the expert width of {facts.expert_width} over {self.expert_tp} ranks, which "
                f"does not divide; {_use('ffn / ep' if self.ffn else 'tp / ep', facts.expert_width, self.expert_tp)}."
            )

    def kv_heads_per_rank(self, facts: MeshFacts) -> int:
        """Key/value heads that a rank holds: at least one, copied where ranks outnumber them."""
        return max(1, facts.kv_heads // self.head_ranks) if facts.kv_heads else 0


ALONE = MeshSpec()
"""One rank."""


def _number(shown: str, key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= MeshSpec.MOST:
        raise ConfigError(f"{shown}: {key} must be a whole number from 1 to {MeshSpec.MOST}, not {value[:40]!r}.")
    return int(value)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _use(axis: str, size: int, wanted: int) -> str:
    """The nearest numbers that divide."""
    below = max((n for n in _divisors(size) if n < wanted), default=1)
    above = min((n for n in _divisors(size) if n > wanted), default=None)
    return f"use {axis} = {below}" + (f" or {above}" if above is not None else "")
