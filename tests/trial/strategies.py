"""Ways of drafting, by name. Widths follow from the case's seed.

Most give the tokens of plain decoding. The rules of acceptance `rejection` (the same distribution) and `typical`
(lossy) do so for greedy requests only. Of sampled ones it is compared that every token could be drawn at its place
(after penalties, masks, grammars and filters), its log-probabilities, and how a sample of these tokens ends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bankfull.decode.eagle import Eagle
from bankfull.decode.medusa import Medusa
from bankfull.decode.rules import RULES
from bankfull.decode.streaming import Streaming, TreeStreaming
from bankfull.models.eagle import build_eagle
from tests.decode.test_eagle import random_eagle
from tests.decode.test_medusa import random_heads
from tests.decode.test_streaming import random_streams
from tests.kit import Guess, GuessLookup, GuessTree
from tests.trial.models import model_of
from tests.trial.setup import Setup

TINY_HIDDEN = 32
"""Drafters that are trained for a model's hidden states suit the sizes of tests/tiny.py."""


def named(text: Callable[[int], str]) -> Callable[[Setup], None]:
    """A way that the option `speculative` names."""

    def use(setup: Setup) -> None:
        setup.run["speculative"] = text(setup.case.seed)

    return use


def _guesses(setup: Setup) -> None:
    seed = setup.case.seed
    setup.strategy = lambda truths: Guess(truths, 1 + seed % 5, seed)


def _lookups(setup: Setup) -> None:
    seed = setup.case.seed
    setup.lookup = lambda truths: GuessLookup(truths, 1 + seed % 6, seed)


def _trees(setup: Setup) -> None:
    seed = setup.case.seed
    setup.strategy = lambda truths: GuessTree(truths, 3 + seed % 11, seed)


def _draft_model(setup: Setup, rule: str = "same") -> None:
    drafter = {97: ("tiny:llama", "tiny:gemma"), 53: ("tf:llama", "tf:mistral"), 61: ("composed:attention",) * 2}
    seed = setup.case.seed
    folder = model_of(drafter[setup.model.vocab][seed % 2]).folder
    breadth = 2 if seed % 3 == 0 else 1
    setup.run["speculative"] = f"draft:{folder},depth={1 + seed % 4},breadth={breadth},rule={rule},adaptive=false"
    setup.other_tokens = rule != "same"


def _medusa(setup: Setup, rule: str = "same") -> None:
    seed, vocab = setup.case.seed, setup.model.vocab
    setup.strategy = lambda _: Medusa(
        random_heads(seed, heads=3, own=bool(seed % 2), vocab=vocab),
        nodes=2 + seed % 15,
        tree=("sparse", "chain")[seed % 2],
        rule=RULES[rule](),
    )
    setup.other_tokens = rule != "same"


def _eagle(setup: Setup, tree: bool) -> None:
    seed, vocab = setup.case.seed, setup.model.vocab
    how = {"depth": 1 + seed % 4} | ({"tree": "dynamic", "branch": 3, "nodes": 3 + seed % 14} if tree else {})
    setup.strategy = lambda _: Eagle(partial(build_eagle, random_eagle(seed, fused=bool(seed % 2), vocab=vocab)), **how)  # type: ignore[arg-type]


def _streaming(setup: Setup, tree: bool) -> None:
    seed = setup.case.seed
    if tree:
        setup.strategy = lambda _: TreeStreaming(random_streams(seed, count=3), nodes=4 + seed % 12)
    else:
        setup.strategy = lambda _: Streaming(random_streams(seed), nodes=4 + seed % 12)


STRATEGIES: dict[str, Callable[[Setup], None]] = {
    "off": lambda setup: None,
    "auto": named(lambda seed: "auto"),
    "guess": _guesses,
    "lookup": _lookups,
    "tree": _trees,
    "ngram": named(
        lambda seed: f"ngram,width={1 + seed % 6},least={1 + seed % 2},adaptive={str(seed % 4 == 0).lower()}"
    ),
    "suffix": named(
        lambda seed: f"suffix,width={1 + seed % 9},least={1 + seed % 2},adaptive={str(seed % 4 == 0).lower()}"
    ),
    "lookahead": named(
        lambda seed: f"lookahead,window={1 + seed % 5},ngram={2 + seed % 3},guesses={1 + seed % 4},adaptive=false"
    ),
    "jacobi": named(lambda seed: f"jacobi,width={1 + seed % 5},adaptive={str(seed % 2 == 0).lower()}"),
    "draft": _draft_model,
    "draft-rejection": partial(_draft_model, rule="rejection"),
    "draft-typical": partial(_draft_model, rule="typical"),
    "medusa": _medusa,
    "medusa-typical": partial(_medusa, rule="typical"),
    "eagle": partial(_eagle, tree=False),
    "eagle-tree": partial(_eagle, tree=True),
    "mtp": named(lambda seed: f"mtp,width={1 + seed % 3},adaptive=false"),
    "streaming": partial(_streaming, tree=False),
    "tree-streaming": partial(_streaming, tree=True),
}
FOR_TINY = {"medusa", "medusa-typical", "eagle", "eagle-tree", "streaming", "tree-streaming"}
"""Their weights have the sizes of tests/tiny.py."""
