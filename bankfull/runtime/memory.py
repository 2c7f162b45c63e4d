"""Sizes of the pools: pages, slots and rows are fixed before serving, so that no step runs out of memory later."""

from __future__ import annotations

from dataclasses import dataclass

from bankfull.config import SchedConfig, StateConfig, parse_memory
from bankfull.errors import ConfigError
from bankfull.state.spec import Layout

UNLIMITED = 1 << 62
"""Places that take no bytes."""


@dataclass(frozen=True, slots=True)
class Sizes:
    frames: int
    slots: int
    rows: int
    max_len: int
    notices: tuple[str, ...] = ()

    def nbytes(self, layout: Layout) -> int:
        slot = layout.recurrent.slot_bytes if layout.recurrent else 0
        return (self.frames + 1) * layout.frame_bytes + (self.slots + 1) * slot


def shown(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def plan_memory(
    layout: Layout,
    sched: SchedConfig,
    state: StateConfig,
    *,
    free: int,
    depth: int,
    made_for: int,
    max_len: int | None,
    drafts: int = 0,
    share: float = 0.4,
    page_ranks: int = 1,
) -> Sizes:
    """`made_for`: the model's context. `max_len`: the user's limit, if any. `share`: fraction of the `free` bytes that
    the pools take by default; they never take more than they can use. `page_ranks`: ranks that the pages go round; each
    has so many `free` bytes, and `Sizes.frames` are those of all of them."""
    if max_len is not None and not 1 <= max_len <= made_for:
        raise ConfigError(
            f"max_model_len={max_len} is outside 1 to {made_for}, the model's context; choose a length within it."
        )
    length = max_len or made_for
    asked = parse_memory(state.memory, free)
    budget = int(share * free) if asked is None else asked
    if asked is not None and asked > free:
        raise ConfigError(
            f"memory={state.memory!r} asks for {shown(asked)}, but only {shown(free)} are free; ask for less."
        )
    notices = []
    rows, slots = sched.rows, 0
    if layout.recurrent is not None:
        per_row = (2 + depth) * (1 + drafts)
        slot = layout.recurrent.slot_bytes
        affordable = budget // slot - 1 if slot else UNLIMITED  # a stage may keep none of the recurrent state
        if affordable < per_row:
            raise ConfigError(
                f"One sequence needs {per_row} slots of {shown(slot)}, but the memory budget is {shown(budget)}; "
                f"give at least memory='{(per_row + 1) * slot}'."
            )
        if rows * per_row > affordable:
            rows = affordable // per_row
            notices.append(f"{shown(budget)} hold the state of {rows} sequences at once, not {sched.rows}.")
        slots = min(affordable, rows * per_row + state.snapshot_slots)
        budget -= (slots + 1) * slot
    frames = 0
    if layout.paged:
        held = budget // layout.frame_bytes - 1 if layout.frame_bytes else UNLIMITED
        frames = min(page_ranks * held, rows * layout.frames_for(length, sched.step_tokens))
        fits = longest(layout, frames, length, sched.step_tokens)
        if fits < min(length, 2) or (max_len is not None and fits < max_len):
            need = -(-layout.frames_for(length, sched.step_tokens) // page_ranks) + 1
            way_out = f", or lower max_model_len to {fits}" if fits > 1 else f" to {shown(2 * layout.frame_bytes)}"
            raise ConfigError(
                f"A sequence of {length} tokens needs {shown(need * layout.frame_bytes)} of state, but the memory "
                f"budget is {shown(budget)}; raise memory{way_out}."
            )
        if fits < length:
            notices.append(
                f"{shown(page_ranks * budget)} of state hold {fits} tokens: the context is {fits}, not {length}."
            )
            length = fits
    return Sizes(frames, slots, rows, length, tuple(notices))


def longest(layout: Layout, frames: int, length: int, new: int) -> int:
    """The longest sequence, at most `length`, that `frames` pages hold."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if layout.frames_for(middle, new) <= frames:
            low = middle
        else:
            high = middle - 1
    return low
