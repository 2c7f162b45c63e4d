"""Ways of speculative decoding as data: what each is called, takes, needs and cannot be combined with.

The configuration, the command line's help, the refusals of layouts and docs/speculation.md read this table;
`drafters.OPENERS` makes the strategies that run on the device. A new way is an entry in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from bankfull.declared import Declared, Trait, meanings
from bankfull.errors import ConfigError

Value = int | bool | str
MOST_DRAFTS = 63
"""Draft tokens of one sequence that a step can verify."""
CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class Option:
    usual: Value
    help: str
    values: tuple[str, ...] = ()
    """What a text may be; empty = anything."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Values of other ways -> why this one cannot have them."""

    def parse(self, shown: str, name: str, text: str) -> Value:
        """The value, which has the type of the usual one. `shown`: the whole choice, for messages."""
        if isinstance(self.usual, bool):
            if text not in ("true", "false"):
                raise ConfigError(f"{shown}: {name} must be true or false, not {text[:40]!r}.")
            return text == "true"
        if isinstance(self.usual, str):
            if self.values and text not in self.values:
                known, why = " or ".join(self.values), self.why_not.get(text, "")
                raise ConfigError(f"{shown}: {name} must be {known}, not {text[:40]!r}{why}.")
            return text
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MOST_DRAFTS:
            raise ConfigError(f"{shown}: {name} must be a whole number from 1 to {MOST_DRAFTS}, not {text[:40]!r}.")
        return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWay(Declared):
    """`about` is where its draft tokens come from."""

    options: Mapping[str, Option] = field(default_factory=dict)
    named: str = ""
    """What is named behind a colon; empty: nothing."""
    bundled: bool = False
    """Whether the package has it for the default model, if nothing is named."""
    chained_by: str = ""
    """The option with which it proposes chains; otherwise trees. Empty: it always proposes what it declares."""

    def spelled(self, name: str) -> str:
        """The way as the command line takes it."""
        if not self.named:
            return name
        what = "MODEL" if self.named == MODEL else "DIR"
        return f"{name}[:{what}]" if self.bundled else f"{name}:{what}"


MODEL, HEADS, STREAMS = "a model", "heads", "streams"

_ADAPTIVE = Option(True, "choose the drafts of each step by their expected gain, down to none")
_WIDTH = "draft tokens of a sequence in a step, at most"
_LEAST = Option(2, "tokens of a match, at least")
_NODES = "draft tokens of a tree"
_SAME, _TYPICAL = "same", "typical"
_RULE = "which drafts are accepted: `same` keeps the tokens of plain decoding"
_LOSSY = "`typical` is lossy"


_BY_CHAIN = f"tree={CHAIN}"
_DENOISED = {
    Trait.DIFFUSION: "{asked} is not for a diffusion model, which predicts several tokens in each step already; leave "
    "it out."
}
_FROM_HIDDEN = _DENOISED | {
    Trait.STAGES: "{asked} proposes drafts from hidden states, which the first of the {stages} stages does not have; "
    "use suffix or ngram."
}
_CHAINS_ONLY = "A model with recurrent state verifies chains of draft tokens only, and "
TREE = _CHAINS_ONLY + "{{asked}} proposes a tree; {out}."
STREAMED = Declared(
    "streams in a model's top layers",
    {
        Trait.TOP_ATTENTION: "Speculative Streaming needs layers of grouped-query attention and a feed-forward layer "
        "with norms before each; this model's top layers are others."
    },
    {
        Trait.RECURRENT: f"{_CHAINS_ONLY}keeps no keys and values that streams could read; choose another way of "
        "speculative decoding."
    },
)
_FROM_LAYERS = _FROM_HIDDEN | {
    Trait.RANKS: "{asked} runs streams through the model's top layers, which the layout {layout} spreads over ranks; "
    "use suffix, ngram, lookahead, medusa, eagle or a draft model.",
    **STREAMED.refuses,
}
OWN = Declared(
    "a strategy object of the program's own",
    refuses={
        Trait.DIFFUSION: "The strategy {asked} is not for a diffusion model, which is denoised instead; leave the "
        "strategy out, and give the options of denoising as diffusion=....",
        Trait.RANKS: "The strategy {asked} is an object of this process, and each rank of the layout {layout} makes "
        "its strategy by itself; name one with speculative=..., or leave out parallel.",
    },
)
OWN_TREES = replace(OWN, refuses={**OWN.refuses, Trait.RECURRENT: TREE.format(out="choose a strategy without trees")})


def _tree(usual: str) -> Option:
    return Option(usual, "the shape of the drafts", (usual, CHAIN))


SPECULATIVE: dict[str, DraftWay] = {
    "off": DraftWay(about="nothing"),
    "auto": DraftWay(about="`suffix` on a CPU, where its expected gain exceeds 5%, without recurrent state"),
    "ngram": DraftWay(
        about="the last occurrence of the newest tokens",
        options={
            "width": Option(8, _WIDTH),
            "least": _LEAST,
            "most": Option(4, "tokens of a match, at most"),
            "adaptive": _ADAPTIVE,
        },
        refuses=_DENOISED,
    ),
    "suffix": DraftWay(
        about="the longest suffix of the sequence that occurred before",
        options={"width": Option(12, _WIDTH), "least": _LEAST, "adaptive": _ADAPTIVE},
        refuses=_DENOISED,
    ),
    "jacobi": DraftWay(
        about="the model's own guesses for the next places",
        options={"width": Option(4, _WIDTH), "adaptive": _ADAPTIVE},
        refuses=_FROM_HIDDEN,
    ),
    "lookahead": DraftWay(
        about="n-grams that the model generates in a window beside the text",
        options={
            "window": Option(4, "columns of the window"),
            "ngram": Option(3, "tokens of an n-gram"),
            "guesses": Option(4, "n-grams of the pool in a step"),
            "adaptive": _ADAPTIVE,
        },
        refuses=_FROM_HIDDEN | {Trait.RECURRENT: TREE.format(out="choose speculative=jacobi")},
    ),
    "draft": DraftWay(
        about="a smaller model with the same vocabulary",
        named=MODEL,
        refuses=_FROM_HIDDEN,
        chained_by="breadth=1",
        options={
            "depth": Option(4, "draft tokens along the best path"),
            "breadth": Option(1, "draft tokens at each of its places"),
            "quantize": Option("", "type of the draft model's weights, at load"),
            "rule": Option(
                _SAME,
                f"{_RULE}, `rejection` their distribution, {_LOSSY}",
                (_SAME, "rejection", _TYPICAL),
            ),
            "adaptive": _ADAPTIVE,
        },
    ),
    "medusa": DraftWay(
        about="trained heads on the last hidden state",
        named=HEADS,
        refuses=_FROM_HIDDEN,
        chained_by=_BY_CHAIN,
        bundled=True,
        options={
            "nodes": Option(8, _NODES),
            "tree": _tree("sparse"),
            "rule": Option(
                _SAME, f"{_RULE}, {_LOSSY}", (_SAME, _TYPICAL), {"rejection": "; heads do not sample their drafts"}
            ),
            "adaptive": _ADAPTIVE,
        },
    ),
    "eagle": DraftWay(
        about="a trained layer that continues the hidden states",
        named=HEADS,
        refuses=_FROM_HIDDEN,
        chained_by=_BY_CHAIN,
        bundled=True,
        options={
            "depth": Option(4, "draft tokens along the best path"),
            "nodes": Option(12, _NODES),
            "branch": Option(4, "candidates of a node, and nodes of a depth that are continued"),
            "tree": _tree("dynamic"),
            "adaptive": _ADAPTIVE,
        },
    ),
    "mtp": DraftWay(
        about="the checkpoint's own module for multi-token prediction",
        options={"width": Option(2, _WIDTH), "adaptive": _ADAPTIVE},
        needs={
            Trait.PREDICTION_MODULE: "{asked} needs a checkpoint with a multi-token-prediction module (deepseek_v3), "
            "and these files do not contain one; use the original checkpoint, or choose another way."
        },
        refuses=_FROM_HIDDEN,
    ),
    "streaming": DraftWay(
        about="trained streams in the top layers, a tree of one shape",
        named=STREAMS,
        needs=STREAMED.needs,
        refuses=_FROM_LAYERS,
        options={"nodes": Option(8, _NODES), "tree": _tree("sparse"), "adaptive": _ADAPTIVE},
    ),
    "tree-streaming": DraftWay(
        about="the same streams, a tree of each row's own shape",
        named=STREAMS,
        needs=STREAMED.needs,
        refuses=_FROM_LAYERS,
        options={"nodes": Option(8, _NODES), "adaptive": _ADAPTIVE},
    ),
    CHAIN: DraftWay(
        about="`suffix` where it finds something, else the way that is named: chain:NAME:DIR", refuses=_FROM_HIDDEN
    ),
}


@dataclass(frozen=True, slots=True)
class SpeculativeChoice:
    """A way of speculative decoding and its options."""

    name: str
    options: Mapping[str, Value]
    model: str = ""
    then: SpeculativeChoice | None = None
    """The way of a chain that drafts where lookup finds nothing."""

    @property
    def way(self) -> DraftWay:
        return SPECULATIVE[self.name]

    def declarations(self) -> Iterator[tuple[str, Declared]]:
        """What this choice declares, and what the way of a chain does, as they were asked for."""
        key, _, value = self.way.chained_by.partition("=")
        asked, way = f"speculative={self.name}", self.way
        if key and str(self.options[key]) != value:
            way = replace(way, refuses={**way.refuses, Trait.RECURRENT: TREE.format(out=f"add {way.chained_by}")})
        yield asked, way
        if self.then is not None:
            yield from self.then.declarations()

    def number(self, key: str) -> int:
        return int(self.options[key])

    def ways(self, lookup: bool) -> dict[str, bool | None]:
        """The names that a request may choose: those that run, with whether its drafts then come from lookup alone
        (True), never from there (False), or from what there is (None). `lookup`: whether the host looks up."""
        if self.name == "auto":
            return {"suffix": None} if lookup else {}
        if self.then is not None:
            return {CHAIN: None, "suffix": True, self.then.name: False}
        return {} if self.name == "off" else {self.name: None}

    @staticmethod
    def parse(text: str) -> SpeculativeChoice:
        """The choice that `NAME[:MODEL][,key=value...]` names."""
        first, *given = (part.strip() for part in text.split(","))
        name, _, model = first.partition(":")
        shown = f"speculative={text[:80]!r}"
        if name == CHAIN:
            then = SpeculativeChoice.parse(",".join((model or "off", *given)))
            if not then.way.named:
                raise ConfigError(f"{shown} must name what drafts where lookup finds nothing: chain:medusa:PATH.")
            if then.options.get("rule") == "rejection":
                raise ConfigError(
                    f"{shown}: rule=rejection needs sampled drafts, and those of a lookup are not; drop it."
                )
            return SpeculativeChoice(name, then.options, model, then)
        if (way := SPECULATIVE.get(name)) is None:
            raise ConfigError(f"{shown} is unknown; use {', '.join(SPECULATIVE)}.")
        if bool(model) != bool(way.named) and (model or not way.bundled):
            needed = f"needs {way.named}: {name}:PATH"
            reason = f"takes no model; leave out {model[:40]!r}" if model else needed
            raise ConfigError(f"{shown} {reason}.")
        options = {key: option.usual for key, option in way.options.items()}
        for part in given:
            key, _, value = (side.strip() for side in part.partition("="))
            if (option := way.options.get(key)) is None:
                known = f"its options are {', '.join(options)}" if options else "it has none"
                raise ConfigError(f"{shown} has no option {key[:40]!r}; {known}.")
            options[key] = option.parse(shown, key, value)
        if int(options.get("most", MOST_DRAFTS)) < int(options.get("least", 1)):
            raise ConfigError(f"{shown} is contradictory: most must not be less than least.")
        return SpeculativeChoice(name, options, model)


def summary() -> str:
    """All ways in one text, for the help of an option."""
    told = {}
    for name, way in SPECULATIVE.items():
        options = f" ({', '.join(way.options)})" if way.options else ""
        told[way.spelled(name)] = replace(way, about=way.about + options)
    return meanings(told)


def option_rows() -> Iterator[tuple[str, str]]:
    """Each way that has options, as the command line takes it, and its options with their usual values and meanings."""
    for name, way in SPECULATIVE.items():
        told = []
        for key, option in way.options.items():
            usual = str(option.usual).lower() if isinstance(option.usual, bool) else str(option.usual)
            values = f" ({' or '.join(option.values)})" if option.values else ""
            told.append(f"`{key}={usual}` {option.help}{values}")
        if told:
            yield way.spelled(name), "; ".join(told)
