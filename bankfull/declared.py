"""What the value of an option declares: its meaning, what it needs, and what it cannot run beside.

Traits are facts of a model, its files, a device, a layout or another option; all are known before weights are read. A
combination is impossible where a declaration lacks a trait that it needs, or meets one that it refuses
(`combinations`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from bankfull.errors import ConfigError


class Trait(Enum):
    """In the words of the table of combinations."""

    PAGES = "a KV cache"
    FULL_ATTENTION = "a layer with full attention"
    FEED_FORWARD = "a feed-forward layer in each stage"
    LATENT = "latent attention (MLA)"
    ODD_HEADS = "heads whose size 8 does not divide"
    RECURRENT = "recurrent state"
    TOP_ATTENTION = "grouped-query attention and a feed-forward layer on top"
    DIFFUSION = "a diffusion model"
    PREDICTION_MODULE = "a multi-token-prediction module"
    BLOCKS = "weights in blocks"
    BY_ROW = "8-bit weights with a scale per row"
    OUTLIERS = "weights of LLM.int8(), on a CPU"
    QUANTIZED = "a quantized checkpoint"
    SPARSE_KERNELS = "kernels for 2:4 weights (a GPU)"
    HOST_MEMORY = "a CPU"
    GPU = "a GPU"
    RANKS = "several ranks"
    STAGES = "stages (pp)"
    TENSOR_RANKS = "tensor ranks (tp)"
    CONTEXT_RANKS = "context ranks (cp)"
    EXPERT_RANKS = "expert ranks (ep)"
    DIVIDED_TOKENS = "tokens divided over ranks (cp, sp)"
    DEALT_PAGES = "pages dealt out to ranks (cp without sp=ulysses)"
    PREFIX_CACHE = "the prefix cache"
    ARRIVAL_ORDER = "policy=fcfs"


Traits = Mapping[Trait, bool]
"""Those that are known, and whether they are there."""
Reasons = Mapping[Trait, str]
"""One sentence each, in which {asked} is the option as it was given; `refuse` is told what else is in braces."""


@dataclass(frozen=True, slots=True)
class Declared:
    about: str
    """Its meaning, as the end of "NAME: ..."."""
    needs: Reasons = field(default_factory=dict)
    refuses: Reasons = field(default_factory=dict)

    @property
    def traits(self) -> frozenset[Trait]:
        """What has to be known to judge it."""
        return frozenset((*self.needs, *self.refuses))

    def refuse(self, asked: str, traits: Traits, **told: object) -> None:
        """Raises ConfigError for a trait that is known to be in the way, or to be missing."""
        for here, reasons in ((True, self.refuses), (False, self.needs)):
            for trait, reason in reasons.items():
                if traits.get(trait) is here:
                    raise ConfigError(reason.format(asked=asked, **told))


def meanings(table: Mapping[str, Declared]) -> str:
    """All names of a table with their meanings in one text, for the help of an option."""
    return "; ".join(f"{name}: {declared.about.replace('`', '')}" for name, declared in table.items() if declared.about)


def check_name(option: str, name: object, table: Mapping[str, object]) -> None:
    """Raises ConfigError for a name that the table does not have."""
    if not isinstance(name, str) or name not in table:
        *most, last = table
        raise ConfigError(f"{option}={name!r} is unknown; use {', '.join(most)} or {last}.")


def judged(table: Mapping[str, Declared]) -> Iterator[tuple[str, Declared]]:
    """The names that need or refuse something."""
    return ((name, declared) for name, declared in table.items() if declared.traits)
