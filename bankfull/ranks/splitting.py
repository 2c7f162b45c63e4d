"""The configuration of one tensor rank: its share of the heads and widths of a model.

Each family declares what it divides (`registry.Family.split`). What no field divides is held whole by every rank.
`ranks.shard` says which part of each tensor that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bankfull.errors import ConfigError

NORM_ACROSS = "norm_across_ranks"
"""Field that is true where a group of the gated norm is spread over the ranks."""
EXPERT_WIDTH = "expert_width"
"""Field for the width of an expert where it is not that of a dense layer."""
WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")


class Splitting:
    """Divides the fields of one configuration."""

    def __init__(self, config: Mapping[str, Any], ranks: int, feed_ranks: int, spread: bool) -> None:
        """`ranks` divide the mixers, `feed_ranks` the feed-forward layers. `spread`: experts are spread over ranks,
        which split their width themselves."""
        self.whole, self.own, self.ranks, self.feed_ranks = config, dict(config), ranks, feed_ranks
        self.spread = spread

    def size(self, name: str, default: int | None = None) -> int:
        value = self.whole.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"The model's configuration has {name} = {repr(value)[:80]}, which cannot be split.")
        return value

    def divided(self, size: int, what: str, of_feed: bool = False) -> int:
        ranks = self.feed_ranks if of_feed else self.ranks
        if size % ranks:
            kind, axis = ("", "ffn") if of_feed and ranks != self.ranks else ("tensor ", "tp")
            raise ConfigError(
                f"The model's {what} of {size} cannot be split evenly over {ranks} {kind}ranks; choose another {axis}."
            )
        return size // ranks

    def shared(self, size: int, what: str) -> int:
        """A number of which several ranks may hold the same: heads of keys and values, groups."""
        if size % self.ranks and self.ranks % size:
            raise ConfigError(
                f"The model's {what} of {size} can be neither split nor copied evenly over {self.ranks} tensor ranks; "
                "choose another tp."
            )
        return max(1, size // self.ranks)

    def width(self, name: str, default: int | None = None) -> None:
        """Divide a field of a mixer."""
        self.own[name] = self.divided(self.size(name, default), name)

    def feed_width(self, name: str, default: int | None = None) -> None:
        """Divide a field of a feed-forward layer."""
        self.own[name] = self.divided(self.size(name, default), name, of_feed=True)

    def heads(
        self, count: str = "num_attention_heads", kv: str = "num_key_value_heads", hidden: str = "hidden_size"
    ) -> None:
        """Query heads, and heads of keys and values."""
        queries = self.size(count)
        keys = self.size(kv, queries)
        each = self.size("head_dim", self.size(hidden) // queries)
        self.own |= {count: self.divided(queries, count), kv: self.shared(keys, kv), "head_dim": each}

    def widths(self, of_experts: Sequence[str] = WIDTHS[1:]) -> None:
        """`of_experts`: the widths of experts and of those beside them, which stay whole where experts are spread."""
        for name in WIDTHS:
            if self.whole.get(name) and not (self.spread and name in of_experts):
                self.feed_width(name)

    def mamba2(self, heads: str, groups: str, normed: str) -> None:
        """Heads and groups of Mamba-2."""
        self.width(heads)
        shared = self.size(groups, 1)
        self.own[groups] = self.shared(shared, groups)
        norms = self.size(normed, shared)
        if 1 < norms < self.ranks:
            raise ConfigError(
                f"The {norms} groups of the model's gated norm are fewer than {self.ranks} tensor ranks; lower tp."
            )
        self.own |= {normed: self.shared(norms, normed), NORM_ACROSS: norms < self.ranks}


def split_transformer(s: Splitting) -> None:
    """All fields have Llama's names."""
    s.heads()
    s.widths()


def split_experts(s: Splitting) -> None:
    """The same without a dense feed-forward layer."""
    s.heads()
    s.widths(of_experts=WIDTHS)


def split_hybrid_mamba2(s: Splitting) -> None:
    """Layers of attention and of Mamba-2."""
    hidden = s.size("hidden_size")
    inner = s.size("mamba_d_ssm", s.size("mamba_expand", 2) * hidden)
    heads = s.size("mamba_n_heads", 128)
    size = inner // heads
    s.mamba2("mamba_n_heads", "mamba_n_groups", "mamba_norm_groups")
    s.own |= {"mamba_d_ssm": s.own["mamba_n_heads"] * size, "mamba_d_head": size}
    s.heads()
    s.widths(of_experts=WIDTHS if s.whole.get("num_local_experts") else ())
