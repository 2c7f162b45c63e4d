"""A model as data: `model_type: "bankfull"`. Its configuration lists the layers, each with a mixer and a feed-forward.

Tensor names: `model.layers.N.mixer_norm`, `.mixer` (below it, those of the mixer's own family; `.mixer.0`, `.mixer.1`
for parallel ones), `.feed_norm` and `.feed`; embedding, last norm and head as in a Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bankfull.axes import HEAD
from bankfull.layers.attention import Attention
from bankfull.layers.based import BasedMixer, BasedShape, ShortConvMixer, ShortConvShape
from bankfull.layers.build import Build
from bankfull.layers.decoder import Block, Decoder, Feed
from bankfull.layers.delta import DeltaMixer, DeltaShape
from bankfull.layers.experts import ExpertsShape
from bankfull.layers.latent import LatentAttention, LatentShape
from bankfull.layers.lightning import LightningMixer, LightningShape, lightning_slopes
from bankfull.layers.linear import Linear
from bankfull.layers.mixer import Mixer
from bankfull.layers.mlp import MLP, GatedMLP
from bankfull.layers.norm import RMSNorm
from bankfull.layers.parallel_mixer import ParallelMixer
from bankfull.layers.rope import Rope
from bankfull.layers.s4 import S4Mixer, S4Shape
from bankfull.layers.shared import SharedAttention
from bankfull.layers.ssd import GatedNorm, Mamba2Mixer, Mamba2Shape
from bankfull.layers.ssm import MambaMixer, MambaShape
from bankfull.models.blocks import LayerPlan, MixerPlan, plans_of
from bankfull.models.common import decoder, tied_head
from bankfull.models.composed_split import split_composed, split_plan
from bankfull.models.fields import ConfigFields
from bankfull.models.kinds import DEFAULTS, ROPE, AttentionShape, FeedShape, RopeShape
from bankfull.models.registry import Config, Family
from bankfull.spread.experts import mixture


class _Composer:
    """Builds the layers of one configuration."""

    def __init__(self, config: Config, build: Build) -> None:
        self.fields, self.build = ConfigFields(config, DEFAULTS), build
        self.hidden, self.eps = self.fields.size("hidden_size"), self.fields.number("rms_norm_eps")
        self.ranks = build.tensor_ranks
        self.plans = [split_plan(plan, *build.split, build.experts is not None) for plan in plans_of(config)]
        self._ropes: dict[RopeShape, str] = {}
        self._owners: dict[int, Attention] = {}
        """Attention whose keys and values later layers may share, by layer."""

    def model(self) -> Decoder:
        blocks = [self._block(number, plan) for number, plan in enumerate(self.plans)]
        # RoPE comes last: by then the file's tensors have confirmed the sizes that it allocates.
        return decoder(self.fields, self.build, blocks, self._made_ropes())

    def _block(self, number: int, plan: LayerPlan) -> Block:
        at = self.build.at("model").at("layers").at(number)
        feed = self._feed(at.at("feed"), plan.feed)
        return Block(
            self._mixer(at.at("mixer"), plan, number),
            before_mixer=RMSNorm(at.at("mixer_norm"), self.hidden, self.eps),
            feed=feed,
            before_feed=None if feed is None else RMSNorm(at.at("feed_norm"), self.hidden, self.eps),
        )

    def _mixer(self, at: Build, plan: LayerPlan, number: int) -> Mixer:
        if len(plan.mixers) == 1:
            return self._one(at, plan.mixers[0], number)
        return ParallelMixer(at, [self._one(at.at(i), mixer, number) for i, mixer in enumerate(plan.mixers)])

    def _one(self, at: Build, plan: MixerPlan, number: int) -> Mixer:
        return MIXERS[plan.kind](self, at, plan.shape, number)

    def attention(self, at: Build, shape: AttentionShape, number: int) -> Attention | SharedAttention:
        heads, bias = shape.heads, shape.bias
        query, kv = heads.queries, heads.keys
        rope = None if shape.rope is None else self._rope(shape.rope)
        q = Linear(at.at("q_proj"), self.hidden, query, bias, int8_when_batched=True)
        out = Linear(at.at("o_proj"), query, self.hidden, int8_when_batched=True)
        q_norm = RMSNorm(at.at("q_norm"), HEAD(heads.size), self.eps) if shape.qk_norm else None
        if shape.owner is not None:
            return SharedAttention(at, self._owners[shape.owner], shape.owner, q, out, rope=rope, q_norm=q_norm)
        mixer = self._owners[number] = Attention(
            at,
            heads,
            q,
            Linear(at.at("k_proj"), self.hidden, kv, bias, int8_when_batched=True),
            Linear(at.at("v_proj"), self.hidden, kv, bias),
            out,
            rope=rope,
            q_norm=q_norm,
            k_norm=RMSNorm(at.at("k_norm"), HEAD(heads.size), self.eps) if shape.qk_norm else None,
        )
        return mixer

    def mla(self, at: Build, shape: LatentShape, number: int) -> LatentAttention:
        rope = self._rope(RopeShape(shape.rope, self.fields.number("rope_theta")))
        return LatentAttention(at, shape, interleaved=False, rope=rope, eps=self.eps)

    def mamba(self, at: Build, shape: MambaShape, number: int) -> MambaMixer:
        return MambaMixer(at, shape, bias=False, conv_bias=True)

    def mamba2(self, at: Build, shape: Mamba2Shape, number: int) -> Mamba2Mixer:
        return Mamba2Mixer(at, shape, norm=GatedNorm(self.eps, across_ranks=self.ranks > 1))

    def s4(self, at: Build, shape: S4Shape, number: int) -> S4Mixer:
        return S4Mixer(at, shape)

    def conv(self, at: Build, shape: ShortConvShape, number: int) -> ShortConvMixer:
        return ShortConvMixer(at, shape)

    def based(self, at: Build, shape: BasedShape, number: int) -> BasedMixer:
        return BasedMixer(at, shape)

    def lightning(self, at: Build, shape: LightningShape, number: int) -> LightningMixer:
        return LightningMixer(at, shape, lightning_slopes(shape.heads * self.ranks, number, len(self.plans)))

    def delta(self, at: Build, shape: DeltaShape, number: int) -> DeltaMixer:
        return DeltaMixer(at, shape)

    def _feed(self, at: Build, shape: FeedShape) -> Feed | None:
        if shape.kind == "none":
            return None
        if shape.rule is not None:
            sizes = ExpertsShape(self.hidden, shape.inner, shape.rule, shape.activation)
            shared = self._gated(at.at("shared_expert"), shape.shared, shape.activation) if shape.shared else None
            return mixture(at, sizes, shared=shared)
        if shape.kind == "gated":
            return self._gated(at, shape.inner, shape.activation)
        return MLP.read(at, self.hidden, shape.inner, shape.activation, ("up_proj", "down_proj"))

    def _gated(self, at: Build, inner: int, kind: str) -> GatedMLP:
        return GatedMLP.read(at, self.hidden, inner, kind)

    # -- RoPE

    def _rope(self, shape: RopeShape) -> str:
        """The name of a RoPE; ROPE for the first with the configuration's base."""
        usual = shape.theta == self.fields.number("rope_theta") and ROPE not in self._ropes.values()
        return self._ropes.setdefault(shape, ROPE if usual else f"{shape.theta:g}-{shape.size}")

    def _made_ropes(self) -> dict[str, Rope]:
        scaling, made_for = self.fields.object_or_none("rope_scaling"), self.fields.size("max_position_embeddings")
        return {
            name: Rope(self.build, shape.size, shape.theta, self._scaling(shape, scaling), made_for)
            for shape, name in self._ropes.items()
        }

    def _scaling(self, shape: RopeShape, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
        """`rope_scaling` applies to layers that rotate with the configuration's own base."""
        return scaling if shape.theta == self.fields.number("rope_theta") else None


MIXERS: dict[str, Callable[[_Composer, Build, Any, int], Mixer]] = {
    "attention": _Composer.attention,
    "based": _Composer.based,
    "conv": _Composer.conv,
    "delta": _Composer.delta,
    "lightning": _Composer.lightning,
    "mamba": _Composer.mamba,
    "mamba2": _Composer.mamba2,
    "mla": _Composer.mla,
    "s4": _Composer.s4,
}


def build_composed(config: Config, build: Build) -> Decoder:
    return _Composer(config, build).model()


FAMILY = Family(build_composed, tied_head, split=split_composed)
