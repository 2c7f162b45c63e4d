"""What speculative decoding gave to a request or a run, or why it was off."""

from __future__ import annotations

from dataclasses import dataclass, field

from bankfull.limits.explain.recorder import DECODE, Story, StoryPart

ENOUGH_STEPS = 4
"""Steps without drafts from which on their mean time is compared."""
SHOWN_POSITIONS = 4
"""Draft positions that the sentence names."""


@dataclass(frozen=True, slots=True)
class SpeculationAccount:
    sentence: str
    drafted: int = 0
    """Draft tokens verified."""
    accepted: int = 0
    verifications: int = 0
    """Times that a sequence verified drafts, once per step."""
    turns: int = 0
    """Decode steps of its sequences, with and without drafts."""
    acceptance: list[float] = field(default_factory=list)
    """Fraction of the drafts at each position that were accepted."""
    mean_accepted: float | None = None
    """Accepted drafts per verification."""
    tokens_per_step: float | None = None
    """Tokens of a sequence per decode step, the sampled one included."""
    drafting_share: float | None = None
    """Fraction of the decode time in which drafts were found."""
    gain: float | None = None
    """Decode tokens per second, relative to the request's own steps without drafts; None if those were too few."""
    expected_gain: float | None = None
    """The same relative to its steps as they would be without drafts, where too few had none: without the time of
    drafting, and with kernels that shrink as their limit does. None where the limit is not known."""


def speculation_of(story: Story) -> SpeculationAccount | None:
    """None if nothing was decoded."""
    part = story.parts.get(DECODE)
    if part is None or not part.turns:
        return None
    counts = part.drafts
    share = part.drafting / part.seconds if part.seconds else 0.0
    if not counts.verifications:
        reason = story.no_drafts or (
            f"no draft was worth verifying in {part.turns} steps: the text did not repeat, or the expected gain was low"
        )
        spent = f"; looking for drafts took {share:.1%} of the time" if share >= 0.001 else ""
        return SpeculationAccount(
            f"no speculation: {reason}{spent}", turns=part.turns, tokens_per_step=1.0, drafting_share=share
        )
    drafted, accepted = sum(counts.drafted), sum(counts.accepted)
    per_step, gain = part.tokens / part.turns, None
    shown = ", ".join(f"{chance:.0%}" for chance in counts.acceptance[:SHOWN_POSITIONS])
    said = (
        f"speculation verified {drafted} draft tokens in {counts.verifications} of {part.turns} steps and accepted "
        f"{accepted} (by position: {shown}): {per_step:.2f} tokens per step; drafting took {share:.1%} of the time"
    )
    if part.plain_steps >= ENOUGH_STEPS and part.seconds > 0:
        gain = per_step * (part.plain_seconds / part.plain_steps) / (part.seconds / part.steps)
        said += f"; {gain:.2f}x the speed of its steps without drafts"
    expected = None if gain is not None else _expected(part, per_step)
    if expected is not None:
        said += f"; about {expected:.2f}x the speed that steps without drafts would have"
    return SpeculationAccount(
        said,
        drafted,
        accepted,
        counts.verifications,
        part.turns,
        counts.acceptance,
        counts.mean_accepted,
        per_step,
        share,
        gain,
        expected,
    )


def _expected(part: StoryPart, per_step: float) -> float | None:
    if not part.limit or part.plain is None or part.seconds <= 0:
        return None
    verifying = max(0.0, part.seconds - part.drafting)
    saved = min(part.inside, verifying) * (1 - part.plain / part.limit)
    return per_step * (verifying - saved) / part.seconds
