"""From a way of drafting (`speculation`) to what drafts: a strategy on the device, or a lookup on the host."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from bankfull.building import build_weights, plan_build
from bankfull.config import RunConfig
from bankfull.decode.adaptive import AdaptiveWidth
from bankfull.decode.draft import DraftModel, check_branching
from bankfull.decode.drafting import Drafting
from bankfull.decode.eagle import Eagle
from bankfull.decode.lookahead import Jacobi, Lookahead
from bankfull.decode.medusa import Medusa
from bankfull.decode.mtp import MultiTokenPrediction
from bankfull.decode.rules import RULES, TYPICAL, AcceptanceRule
from bankfull.decode.strategy import OwnModel, Strategy
from bankfull.decode.streaming import Streaming, TreeStreaming
from bankfull.errors import ConfigError
from bankfull.models.eagle import build_eagle
from bankfull.models.mtp import build_mtp
from bankfull.models.registry import family_of
from bankfull.ops import native
from bankfull.precision import choose_dtype
from bankfull.quantize.at_load import as_multiplied
from bankfull.ranks.group import RankGroup
from bankfull.runtime.device import Device, open_device
from bankfull.speculation import CHAIN, SpeculativeChoice
from bankfull.state.spec import Layout, Recurrent
from bankfull.text.load import load_tokenizer
from bankfull.text.tokenizer import Tokenizer
from bankfull.weights.bundled import bundled
from bankfull.weights.eagle import read_eagle
from bankfull.weights.locate import locate
from bankfull.weights.medusa import read_heads
from bankfull.weights.source import ModelFiles, open_model
from bankfull.weights.streams import read_streams

log = logging.getLogger("bankfull")

AUTO_GAIN = 1.05
"""Expected gain from which on `speculative=auto` verifies draft tokens."""


@dataclass(frozen=True, slots=True)
class DrafterRequest:
    """A way of drafting for a target model."""

    choice: SpeculativeChoice
    target: ModelFiles
    run: RunConfig
    device: Device
    pages: RankGroup | None = None
    """The ranks that the pages of a sequence go round, those of a draft model, too."""

    @property
    def rule(self) -> AcceptanceRule:
        return RULES[str(self.choice.options["rule"])]()


def _draft(asked: DrafterRequest) -> Strategy:
    choice = asked.choice
    run = replace(asked.run, quantize=str(choice.options["quantize"]) or None, speculative="off")
    branching = [choice.number("breadth")] * choice.number("depth")
    return load_draft(
        choice.model, asked.target, run, branching, device=asked.device, rule=asked.rule, pages=asked.pages
    )


def _medusa(asked: DrafterRequest) -> Strategy:
    choice = asked.choice
    return Medusa(read_heads(choice.model), choice.number("nodes"), str(choice.options["tree"]), asked.rule)


def _eagle(asked: DrafterRequest) -> Strategy:
    choice = asked.choice
    sizes = choice.number("depth"), str(choice.options["tree"]), choice.number("nodes"), choice.number("branch")
    return Eagle(partial(build_eagle, read_eagle(choice.model)), *sizes)


def _mtp(asked: DrafterRequest) -> Strategy:
    return MultiTokenPrediction(partial(build_mtp, asked.target.config), asked.choice.number("width"))


def _lookahead(asked: DrafterRequest) -> Strategy:
    return Lookahead(*(asked.choice.number(key) for key in ("window", "ngram", "guesses")))


def _jacobi(asked: DrafterRequest) -> Strategy:
    return Jacobi(asked.choice.number("width"))


def _streaming(asked: DrafterRequest) -> Strategy:
    choice = asked.choice
    return Streaming(read_streams(choice.model), choice.number("nodes"), str(choice.options["tree"]))


def _tree_streaming(asked: DrafterRequest) -> Strategy:
    return TreeStreaming(read_streams(asked.choice.model), asked.choice.number("nodes"))


OPENERS: Mapping[str, Callable[[DrafterRequest], Strategy]] = {
    "draft": _draft,
    "eagle": _eagle,
    "jacobi": _jacobi,
    "lookahead": _lookahead,
    "medusa": _medusa,
    "mtp": _mtp,
    "streaming": _streaming,
    "tree-streaming": _tree_streaming,
}
"""Ways whose strategy runs on the device."""


def device_strategy(
    choice: SpeculativeChoice, target: ModelFiles, run: RunConfig, device: Device, pages: RankGroup | None = None
) -> Strategy | None:
    """The strategy that a choice names for the model `target`, if it is one that runs on the device."""
    choice = choice.then or choice
    if (opened := OPENERS.get(choice.name)) is None:
        return None
    if choice.way.bundled and not choice.model:
        choice = replace(choice, model=str(bundled(choice.name, target.config, target.path.name)))
    if choice.options.get("rule") == TYPICAL:
        log.warning("rule=typical is lossy: sampled requests get tokens of another distribution than without drafts.")
    return opened(DrafterRequest(choice, target, run, device, pages))


def no_automatic_drafts(device: Device, layout: Layout) -> str:
    """Why `auto` verifies no drafts, as a clause; empty if it may."""
    if device.kind != "cpu":
        return "auto does not draft on a GPU"
    if layout.recurrent is not None:
        return "auto does not draft for models with recurrent state"
    return "" if native.status() is None else "auto needs the native kernels"


def host_drafting(choice: SpeculativeChoice, device: Device, layout: Layout, depth: int) -> Drafting | None:
    """Draft tokens found by lookup, if the choice is one that finds them so. `auto` leaves out a GPU, where its gain is
    not measured yet, and models with recurrent state, which would need memory for a state after each draft."""
    if choice.name == "auto":
        if no_automatic_drafts(device, layout):
            return None
        choice, least_gain = SpeculativeChoice.parse("suffix"), AUTO_GAIN
    elif choice.name == CHAIN:
        adaptive = str(choice.options["adaptive"]).lower()
        choice, least_gain = SpeculativeChoice.parse(f"suffix,adaptive={adaptive}"), 1.0
    elif choice.name in ("ngram", "suffix"):
        least_gain = 1.0
    else:
        return None
    if (missing := native.status()) is not None:
        raise ConfigError(f"speculative={choice.name!r} needs the native kernels: {missing}")
    from bankfull.ops.native.lookup import SuffixLookup

    lookup = SuffixLookup(choice.number("least"), int(choice.options.get("most", 0)))
    return Drafting(lookup, choice.number("width"), depth, least_gain if choice.options["adaptive"] else None)


def adaptive_width(choice: SpeculativeChoice, strategy: Strategy) -> AdaptiveWidth | None:
    """What chooses the number of the strategy's drafts, unless the choice has a fixed number."""
    if strategy.idle or not choice.options.get("adaptive", False):
        return None
    return AdaptiveWidth(strategy.widths(), strategy.share, strategy.late)


def load_draft(
    name: str,
    target: ModelFiles,
    run: RunConfig,
    branching: Sequence[int] = (1, 1, 1, 1),
    *,
    device: Device | None = None,
    tokenizer: Tokenizer | None = None,
    rule: AcceptanceRule | None = None,
    pages: RankGroup | None = None,
) -> DraftModel:
    """The strategy that drafts with the model `name` for the model `target`. `run`: the draft model's own options
    (dtype, quantize, activations, kv_dtype, ...). `branching`, `rule`: as for `DraftModel`. `tokenizer`: the target's,
    if it is read already. `pages`: as for `DrafterRequest`."""
    check_branching(branching)
    files = open_model(locate(name))
    family_of(files.config)
    wanted = tokenizer or load_tokenizer(target)[0]
    draft_tokenizer, _ = load_tokenizer(files)
    if (other := wanted.first_other_token(draft_tokenizer)) is not None:
        raise ConfigError(
            f"{name!r} cannot draft for {target.path.name!r}: their vocabularies differ, first in token {other}; "
            "choose a draft model with the target's tokenizer."
        )
    device = device or open_device(run.device)
    files = as_multiplied(files, run, device, choose_dtype(run.dtype, files, device.kind))
    build = replace(plan_build(files, run, device), context=pages)
    model = build_weights(files, build, device)
    if any(isinstance(spec, Recurrent) for states in model.states() for spec in states):
        raise ConfigError(
            f"{name!r} cannot draft: it has recurrent state, from which rejected drafts cannot be taken back; choose a "
            "draft model of attention layers only."
        )
    return DraftModel(OwnModel(model, build.kit), branching, rule)
