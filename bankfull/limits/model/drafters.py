"""Drafters to forecast, from the text of `--speculative` and `--acceptance`: sizes, trees and costs.

Nothing needs to be trained: heads are described by their number and size, a draft model by its configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from bankfull.decode.candidate_tree import USUAL_ACCEPTANCE, CandidateTree, best_tree, chain_tree
from bankfull.errors import ConfigError
from bankfull.layers.adapted import narrows_own, own_operands
from bankfull.limits.meter.metered import HEAD
from bankfull.limits.meter.step import StepShape
from bankfull.limits.model.memory import weight_bytes
from bankfull.limits.model.recipe import Recipe, open_model_or_config, recipe_of
from bankfull.limits.model.speculation import (
    DraftHeads,
    DraftPasses,
    DraftShape,
    DraftSource,
    GainForecast,
    LookupDrafts,
    Seconds,
)
from bankfull.ops.cost import Cost
from bankfull.speculation import MOST_DRAFTS, SPECULATIVE
from bankfull.weights.eagle import EagleFiles, read_eagle
from bankfull.weights.medusa import MOST_HEADS, MOST_LAYERS, MedusaHeads, read_heads

LARGEST_VOCABULARY = 1 << 24
FORECAST: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "ngram": {"width": (8, MOST_DRAFTS)},
    "suffix": {"width": (12, MOST_DRAFTS)},
    "draft": {"depth": (4, MOST_DRAFTS), "breadth": (1, MOST_DRAFTS)},
    "medusa": {
        "heads": (4, MOST_HEADS),
        "nodes": (8, MOST_DRAFTS),
        "layers": (1, MOST_LAYERS),
        "vocabulary": (8192, LARGEST_VOCABULARY),
    },
    "eagle": {"depth": (4, MOST_DRAFTS), "nodes": (12, MOST_DRAFTS), "vocabulary": (0, LARGEST_VOCABULARY)},
}
"""Names whose gain can be predicted, with their options: default and highest value. `vocabulary`: rows of the head that
the drafter multiplies by; 0 for all."""
DEPTH_OPTION = {"ngram": "width", "suffix": "width", "draft": "depth", "medusa": "heads", "eagle": "depth"}
"""The option that is the number of draft positions."""
TRAINED = ("medusa", "eagle")
"""Names whose trained heads may be given; without them the options describe heads that do not exist yet."""
ASSUMED = {"ngram": 0.6, "suffix": 0.7, "draft": 0.7, "eagle": 0.7}
"""Chance of the best draft at every position, where nothing was measured."""
RANKS = 10
"""Candidates of a position that an assumed tree may use."""
LAUNCH_SECONDS = 20e-3 / 280
"""The host's time for one kernel of a step that is not captured, the shortest that was measured: docs/results-gpu.md,
short prompts."""
INT8_BYTES = 34 / 32
"""Bytes of a weight in groups of 32 with an 8-bit code each and one 16-bit scale."""


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """The parsed text of `--speculative`, with the acceptance that was given."""

    name: str
    model: str
    numbers: Mapping[str, int]
    given: frozenset[str]
    """Options that were written."""
    quantize: str | None
    acceptance: tuple[float, ...] | None

    @property
    def positions(self) -> int:
        return self.numbers[DEPTH_OPTION[self.name]]


def parse_drafter(text: str, acceptance: str | None) -> DrafterChoice | None:
    """None for `off`. `acceptance`: "0.8,0.7": by position, each given that all before it were accepted."""
    chances = None if acceptance is None else parse_acceptance(acceptance)
    first, *options = (part.strip() for part in text.split(","))
    name, _, model = first.partition(":")
    if name == "off":
        if chances is not None:
            raise ConfigError("--acceptance needs a drafter: give --speculative, for example draft:MODEL.")
        return None
    name = "suffix" if name == "auto" else name
    shown = f"--speculative {text[:80]!r}"
    if name not in FORECAST:
        raise ConfigError(f"{shown} has no forecast; use {', '.join(FORECAST)}, or measure it: bench speculative.")
    if (name == "draft") != bool(model) and name not in TRAINED:
        raise ConfigError(f"{shown} {'needs a model: draft:MODEL' if name == 'draft' else 'takes no model'}.")
    numbers = {key: usual for key, (usual, _) in FORECAST[name].items()}
    given, quantize = set(), None
    for option in options:
        key, _, value = (side.strip() for side in option.partition("="))
        if key == "quantize" and name == "draft":
            quantize = value or None
        elif key in numbers:
            numbers[key] = _whole(shown, key, value, FORECAST[name][key][1], 0 if key == "vocabulary" else 1)
            given.add(key)
        elif key not in SPECULATIVE[name].options:  # the engine's other options change no cost
            raise ConfigError(f"{shown} has no option {key[:40]!r}; its options are {', '.join(numbers)}.")
    depth = DEPTH_OPTION[name]
    if chances is not None:
        if depth in given and numbers[depth] != len(chances):
            raise ConfigError(
                f"--acceptance has {len(chances)} positions, but {depth}={numbers[depth]}; give one value for each."
            )
        numbers[depth] = len(chances)
    if name == "medusa" and numbers[depth] > MOST_HEADS:
        raise ConfigError(f"--acceptance has {numbers[depth]} positions; at most {MOST_HEADS} heads are possible.")
    if "nodes" in numbers and (name == "eagle" or chances is not None):  # a tree of Medusa heads may omit some
        if "nodes" in given and numbers["nodes"] < numbers[depth]:
            raise ConfigError(f"{shown}: {numbers['nodes']} nodes are fewer than the {numbers[depth]} positions.")
        numbers["nodes"] = max(numbers["nodes"], numbers[depth])
    if name == "draft" and numbers["depth"] * numbers["breadth"] > MOST_DRAFTS:
        raise ConfigError(f"{shown} is a tree of more than {MOST_DRAFTS} drafts; lower depth or breadth.")
    return DrafterChoice(name, model, numbers, frozenset(given), quantize, chances)


def parse_acceptance(text: str) -> tuple[float, ...]:
    try:
        chances = tuple(float(part) for part in text.split(","))
    except ValueError:
        chances = ()
    if not chances or len(chances) > MOST_DRAFTS or not all(0 <= chance <= 1 for chance in chances):
        raise ConfigError(
            f"--acceptance {text[:60]!r} is no list of chances; give 1 to {MOST_DRAFTS} numbers from 0 to 1, one for "
            "each draft position, each given that all before it were accepted: 0.8,0.7,0.6."
        )
    return chances


def _whole(shown: str, key: str, value: str, highest: int, least: int) -> int:
    if not value.isascii() or not value.isdigit() or not least <= int(value[:12]) <= highest:
        raise ConfigError(f"{shown}: {key} must be a whole number from {least} to {highest}, not {value[:40]!r}.")
    return int(value)


# -- the shape of the drafts


def tree_shape(tree: CandidateTree, by_rank: Sequence[Sequence[float]]) -> DraftShape:
    """Drafts by depth of a tree, and the chance that each depth is accepted, if positions are independent."""
    reached = [0.0] * tree.depth
    chances: list[float] = []
    levels = [0] * tree.depth
    for parent, head, rank in zip(tree.parents.tolist(), tree.heads.tolist(), tree.ranks.tolist(), strict=True):
        chances.append((chances[parent] if parent >= 0 else 1.0) * by_rank[head][rank])
        reached[head] += chances[-1]
        levels[head] += 1
    before = [1.0, *reached]
    acceptance = tuple(now / earlier for earlier, now in zip(before, reached, strict=False))
    return DraftShape(tuple(levels), acceptance)


def assumed_ranks(chance: float, positions: int) -> list[list[float]]:
    """`chance` for the best candidate; each further one is right in half of the cases in which all before it fail."""
    return [[chance, *((1 - chance) * 0.5**rank for rank in range(1, RANKS))]] * positions


def _spread(nodes: int, depth: int) -> tuple[int, ...]:
    """Nodes by depth, as even as possible, the first depths first."""
    return tuple(nodes // depth + (level < nodes % depth) for level in range(depth))


def shape_of(choice: DrafterChoice, measured: Sequence[Sequence[float]] | None = None) -> tuple[DraftShape, list[str]]:
    """The drafts of a step, and what is assumed about their acceptance. `measured`: that of trained heads, by depth and
    rank."""
    depth, numbers = choice.positions, choice.numbers
    nodes = numbers.get("nodes", depth * numbers.get("breadth", 1))
    if choice.acceptance is not None:
        return DraftShape(_spread(nodes, depth), choice.acceptance), []
    if measured is not None:
        return tree_shape(best_tree(measured, nodes), measured), []
    if choice.name == "medusa":
        note = "acceptance is a usual table of Medusa heads, not measured"
        return tree_shape(best_tree(USUAL_ACCEPTANCE[:depth], nodes), USUAL_ACCEPTANCE), [note]
    chance = ASSUMED[choice.name]
    ranks = assumed_ranks(chance, depth)
    note = f"the best draft at every position is right with {chance:g}"
    if nodes == depth:
        return tree_shape(chain_tree(depth), ranks), [note]
    note += ", each further one in half of the other cases"
    if choice.name == "draft":  # leaves beside a chain: a path ends where it takes a leaf
        breadth = numbers["breadth"]
        sure = sum(ranks[0][: min(breadth, RANKS)])
        reached = [chance**level * sure for level in range(depth)]
        by_depth = tuple(now / before for before, now in zip([1.0, *reached], reached, strict=False))
        return DraftShape((breadth,) * depth, by_depth), [note]
    return tree_shape(best_tree(ranks, nodes), ranks), [note]


# -- costs


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Times of one machine, at its limits or as they are likely."""

    of_model: Callable[[Recipe], Seconds]
    """Seconds of the target's steps."""
    of_drafter: Callable[[Recipe], Seconds]
    """Seconds of a draft model's passes, inside a step of the engine."""
    of_product: Callable[[Cost], float]
    """Seconds of matrix products in the target's arithmetic."""


def forecast_of(choice: DrafterChoice, target: Recipe, device: str, times: DraftTimes, context: int) -> GainForecast:
    """`device`: the kind of machine, cpu or cuda, which chooses a draft model's arithmetic."""
    metered = target.metered()
    heads: MedusaHeads | EagleFiles | None = None
    if choice.name == "medusa" and choice.model:
        heads = read_heads(choice.model)
        heads.suit(metered.model.hidden, metered.model.vocab)
        if "heads" not in choice.given and choice.acceptance is None:
            choice = replace(choice, numbers={**choice.numbers, "heads": len(heads.blocks)})
    elif choice.name == "eagle" and choice.model:
        heads = read_eagle(choice.model)
        heads.suit(metered.model.hidden, metered.model.vocab, len(metered.model.mixers))
    measured = None if heads is None or choice.acceptance is not None else heads.acceptance
    shape, notes = shape_of(choice, measured and measured[: choice.positions])
    recurrent = metered.layout.recurrent is not None
    if recurrent and not shape.is_chain:
        raise ConfigError(
            f"--speculative {choice.name} with a tree of {shape.nodes} drafts is not possible for a model with "
            "recurrent state, which verifies chains only; give as many drafts as positions."
        )
    source = _source(choice, target, device, times, heads)
    if device == "cuda" and not isinstance(source, LookupDrafts):
        source, note = _launched(source, choice, target, heads)
        notes.append(note)
    if choice.acceptance is not None and not shape.is_chain:
        notes.append("the given acceptance is that of some draft at each depth of the tree")
    text = _described(choice)
    return GainForecast(text, shape, source, times.of_model(target), context, tuple(notes), recurrent)


def _described(choice: DrafterChoice) -> str:
    shown = [f"{key}={value}" for key, value in choice.numbers.items()]
    return ",".join([f"{choice.name}:{choice.model}" if choice.model else choice.name, *shown])


def _source(
    choice: DrafterChoice,
    target: Recipe,
    device: str,
    times: DraftTimes,
    heads: MedusaHeads | EagleFiles | None,
) -> DraftSource:
    if choice.name == "draft":
        drafter = _draft_model(choice, target, device)
        vocabs = drafter.metered().model.vocab, target.metered().model.vocab
        if vocabs[0] != vocabs[1]:
            raise ConfigError(
                f"{choice.model} has a vocabulary of {vocabs[0]} tokens and the model one of {vocabs[1]}; give a draft "
                "model of the same family."
            )
        return DraftPasses(weight_bytes(drafter), times.of_drafter(drafter))
    if isinstance(heads, EagleFiles):
        return _trained_eagle(heads, target, times)
    if choice.name == "medusa":
        return _medusa(choice, target, times, heads)
    if choice.name == "eagle":
        return _eagle(choice, target, times)
    return LookupDrafts()


def _launched(
    source: DraftSource, choice: DrafterChoice, target: Recipe, heads: MedusaHeads | EagleFiles | None
) -> tuple[DraftSource, str]:
    """The same drafts as the engine computes them on a GPU: a drafter's passes are not captured, so that the host
    launches each kernel while the device waits for the next one."""
    if isinstance(source, DraftPasses):
        drafter = _draft_model(choice, target, "cuda") if choice.name == "draft" else _one_layer(target, 0)
        launches = sum(drafter.metered().cost(StepShape.decode()).calls.values())
        one_pass = source.one_pass
        source = replace(source, one_pass=lambda step: max(one_pass(step), launches * LAUNCH_SECONDS))
    else:
        assert isinstance(source, DraftHeads)
        layers = len(heads.blocks[0]) if isinstance(heads, MedusaHeads) else choice.numbers["layers"]
        launches = choice.numbers["heads"] * (layers + 1)
        at_once = source.for_batch
        source = replace(source, for_batch=lambda batch: max(at_once(batch), launches * LAUNCH_SECONDS))
    note = (
        f"draft passes are not captured on a GPU: the host launches the {launches} kernels of each, at least "
        f"{1e6 * LAUNCH_SECONDS:.0f} us each"
    )
    return source, note


def _draft_model(choice: DrafterChoice, target: Recipe, device: str) -> Recipe:
    return recipe_of(
        open_model_or_config(choice.model), device, replace(target.run, quantize=choice.quantize, speculative="off")
    )


def _one_layer(target: Recipe, vocab: int) -> Recipe:
    return replace(target, config=_with_layers(target.config, 1, vocab), windows=None)


def _medusa(choice: DrafterChoice, target: Recipe, times: DraftTimes, heads: MedusaHeads | None) -> DraftHeads:
    metered = target.metered()
    hidden, vocab = metered.model.hidden, metered.model.vocab
    count, layers, rows = choice.numbers["heads"], choice.numbers["layers"], choice.numbers["vocabulary"]
    own_projections = rows == 0
    if heads is not None:
        layers, own_projections = len(heads.blocks[0]), heads.projections is not None
        rows = 0 if heads.vocabulary is None else len(heads.vocabulary)
    rows = min(rows, vocab) or vocab
    each = INT8_BYTES if narrows_own(target.activations, hidden) else float(target.matrices.itemsize)
    blocks = count * layers * hidden * hidden * each
    projections = count * rows * hidden * each if own_projections else rows / vocab * _head_bytes(target)
    flops = 2.0 * hidden * (count * layers * hidden + count * rows)

    def seconds(batch: int) -> float:
        cost = Cost(batch * flops, blocks + projections, 4.0 * batch * count * rows)
        return times.of_product(cost.on(own_operands(target.activations)))

    # Rows of the model's own head are in memory already.
    return DraftHeads(round(blocks + (projections if own_projections else 0.0)), seconds)


def _eagle(choice: DrafterChoice, target: Recipe, times: DraftTimes) -> DraftPasses:
    """One layer of the target's kind with its head, after a matrix that joins embedding and hidden state."""
    vocab = choice.numbers["vocabulary"]
    layer = _one_layer(target, vocab)
    hidden = layer.metered().model.hidden
    joined = 2 * hidden * hidden
    one_pass = times.of_drafter(layer)

    def seconds(step: StepShape) -> float:
        cost = Cost(2.0 * joined * step.tokens, joined * target.matrices.itemsize)
        return one_pass(step) + times.of_product(cost.on(own_operands(target.activations)))

    # Embedding and head are the target's own, except the head of a reduced vocabulary.
    one, two = (weight_bytes(replace(layer, config=_with_layers(target.config, count))) for count in (1, 2))
    nbytes = two - one + (joined + vocab * hidden) * target.matrices.itemsize
    return DraftPasses(nbytes, seconds, whole_levels=True)


def _trained_eagle(head: EagleFiles, target: Recipe, times: DraftTimes) -> DraftPasses:
    """A pass reads all tensors of the head once, and its rows of the target's head, if it has no own. The keys and
    values of one layer are not counted."""
    own = sum(tensor.nbytes for tensor in head.tensors.values())
    weights = sum(prod(tensor.shape) for tensor in head.tensors.values())
    shared = 0.0
    if "lm_head.weight" not in head.tensors:
        rows = head.vocab if head.vocabulary is None else len(head.vocabulary)
        shared = rows / head.vocab * _head_bytes(target)
        weights += rows * head.hidden

    def seconds(step: StepShape) -> float:
        cost = Cost(2.0 * weights * step.tokens, own + shared)
        return times.of_product(cost.on(own_operands(target.activations)))

    return DraftPasses(own, seconds, whole_levels=True)


def _head_bytes(target: Recipe) -> float:
    costs = target.metered().cost(StepShape.decode()).total
    return sum(cost.read for name, cost in costs.items() if name.startswith(HEAD))


def _with_layers(config: Mapping[str, Any], layers: int, vocab: int = 0) -> dict[str, Any]:
    nested = config.get("text_config")
    inner = dict(nested) if isinstance(nested, Mapping) else dict(config)
    for key, value in inner.items():
        if isinstance(value, list) and key in ("layer_types", "no_rope_layers"):
            inner[key] = value[:layers]
    inner["num_hidden_layers"] = layers
    if vocab:
        inner["vocab_size"] = vocab
    return {**config, "text_config": inner} if isinstance(nested, Mapping) else inner
