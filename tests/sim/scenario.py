"""A scenario from a seed: a model's layout, its pools, a configuration, and the arrivals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from bankfull.config import SchedConfig, StateConfig
from bankfull.sched.policy import BATCH_PRIORITY
from bankfull.scheduling import POLICIES
from bankfull.state.mask import Mask
from bankfull.state.spec import Layout, Paged, Recurrent, Shared, StateSpec, TensorSpec, layout_of
from bankfull.types import Request, Tier
from tests.sim.oracle import expected


@dataclass(frozen=True, slots=True)
class Arrival:
    time: float
    request: Request


@dataclass(frozen=True, slots=True)
class TierScenario:
    lower: tuple[tuple[Tier, int, int, float], ...]
    """Tier, its pages and slots, and bytes per second of write-behind (0: no limit)."""
    fails: float
    late: float


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    layout: Layout
    frames: int
    slots: int
    sched: SchedConfig
    state: StateConfig
    depth: int
    drafts: int
    vocab: int
    abort_rate: float
    error_rate: float
    step_seconds: float
    token_seconds: float
    """Seconds of a step, and of each of its tokens."""
    arrivals: tuple[Arrival, ...]
    tiers: TierScenario | None = None


def scenario_of(seed: int, mixed: bool = False) -> Scenario:
    """`mixed`: with more kinds of layers."""
    random = Random(seed)
    speeds = Random(seed + 3)
    layers: list[tuple[StateSpec, ...]] = [(spec,) for spec in _specs(random)]
    if mixed:
        layers = _mixed(Random(seed + 5), layers)
    layout = layout_of(layers, random.choice((1, 2, 2, 3, 4)))
    vocab = random.choice((2, 3, 8, 40))
    rows = random.randint(1, 5)
    step_tokens, policy = random.choice((1, 2, 3, 4, 6, 8, 16, 40)), random.choice(tuple(POLICIES))
    batching = random.choice(("continuous", "continuous", "continuous", "static", "dynamic"))
    sched = SchedConfig(
        rows=rows,
        step_tokens=step_tokens,
        policy=policy if batching == "continuous" else "fcfs",
        batching=batching,
        batch_size=min(rows, random.randint(1, 4)),
        batch_timeout=random.choice((0.0, 0.5, 3.0, 20.0)),
        step_ms=speeds.choice((0.0, 5.0, 250.0)),
        **_budgets(Random(seed + 11)),
    )
    state = StateConfig(
        prefix_cache=random.random() < 0.75,
        snapshot_every=random.choice((1, 2, 3, 5)),
    )
    arrivals = _arrivals(random, vocab, rows)
    _resume_some(Random(seed + 4), arrivals, vocab)
    depth = random.randint(0, 1)
    drafts = random.choice((0, 0, 1, 2, 3))
    return Scenario(
        seed=seed,
        layout=layout,
        frames=_frames(random, layout, arrivals, sched.step_tokens),
        slots=random.choice((2, 3, rows + 1, rows * (1 + (1 + depth) * (1 + drafts)), 60)),
        sched=sched,
        state=state,
        depth=depth,
        drafts=drafts,
        vocab=vocab,
        abort_rate=random.choice((0.0, 0.0, 0.02, 0.1)),
        error_rate=random.choice((0.0, 0.0, 0.0, 0.02)),
        step_seconds=speeds.choice((0.0, 0.001, 0.1, 1.0)),
        token_seconds=speeds.choice((0.0, 1e-5, 3e-4, 0.003, 0.02)),
        arrivals=arrivals,
        tiers=_tiers(Random(seed + 7), ((), (), (), (), (Tier.HOST,), (Tier.HOST, Tier.DISK))),
    )


def _budgets(random: Random) -> dict[str, Any]:
    """Limits of a step by kind, and the times that queues go by."""
    return {
        "prefill_tokens": random.choice((0, 0, 1, 3, 16)),
        "prefill_rows": random.choice((0, 0, 1, 2)),
        "decode_rows": random.choice((0, 0, 0, 1, 2)),
        "quantum_ms": random.choice((0.5, 10.0, 400.0)),
        "starvation": random.choice((0.05, 3.0, 60.0)),
        "weights": random.choice(((), (("a", 4.0),), (("b", 0.1), ("a", 1.0)))),
    }


def tiered_of(seed: int) -> Scenario:
    """The scenario of `seed` with many conversations that come back, little memory and tiers below the device."""
    base, random = scenario_of(seed), Random(seed + 9)
    arrivals = _arrivals(random, base.vocab, base.sched.rows, fewest=6, most=14)
    need = max(_most_pages(base.layout, a.request.limit, base.sched.step_tokens) for a in arrivals)
    return replace(
        base,
        arrivals=arrivals,
        frames=need + random.choice((0, 0, 1, 4)),
        state=replace(base.state, prefix_cache=True),
        tiers=_tiers(random, ((Tier.HOST,), (Tier.DISK,), (Tier.HOST, Tier.DISK))),
    )


def _tiers(random: Random, choices: tuple[tuple[Tier, ...], ...]) -> TierScenario | None:
    kinds = random.choice(choices)
    if not kinds:
        return None
    lower = tuple(
        (kind, random.choice((1, 3, 10, 200)), random.choice((1, 4, 50)), random.choice((0.0, 0.0, 60.0, 1000.0)))
        for kind in kinds
    )
    return TierScenario(lower, random.choice((0.0, 0.0, 0.1, 0.5)), random.choice((0.0, 0.3, 0.9)))


def _specs(random: Random) -> list[StateSpec]:
    """A mixture of layers; unequal weights of the groups give pages of unequal lengths."""
    full = Paged((TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 4), "float32")))
    narrow = Paged((TensorSpec("k", (1, 2), "float32"),), window=random.randint(1, 9))
    wide = Paged(full.tensors, window=random.randint(1, 12))
    memory = Recurrent((TensorSpec("h", (4,), "float32"),))
    kinds: list[list[StateSpec]] = [
        [full],
        [full, wide],
        [full, narrow, wide],
        [wide],
        [memory],
        [memory, full],
        [memory, narrow, full],
        [memory, wide],
    ]
    specs: list[StateSpec] = []
    for kind in random.choice(kinds):
        specs.extend([kind] * random.randint(1, 3))
    random.shuffle(specs)
    if random.random() < 0.2:
        specs.append(Shared(random.randrange(len(specs))))
    return specs


def _mixed(random: Random, layers: list[tuple[StateSpec, ...]]) -> list[tuple[StateSpec, ...]]:
    """The layers and others between them: latents, sparse masks, and attention beside a recurrence in one layer."""
    latent = Paged((TensorSpec("latent", (1, 3), "float32"),))
    window, globals_ = random.randint(1, 6), random.choice((0, 0, 1, 5))
    masks = (
        Mask(window, random.randint(2, 4), global_tokens=globals_),
        Mask(window, stride=random.randint(2, 7)),
        Mask(window, stride=5, columns=random.randint(1, 3), global_tokens=globals_),
        Mask(window, global_tokens=globals_ + 1, aligned=random.random() < 0.5),
    )
    sparse = Paged((TensorSpec("k", (1, 4), "float32"), TensorSpec("v", (1, 2), "float32")), random.choice(masks))
    memory = Recurrent((TensorSpec("h", (4,), "float32"),))
    extra: list[tuple[StateSpec, ...]] = [(latent,), (sparse,), (sparse, memory), (latent, memory), (memory,)]
    return [*random.sample(extra, random.randint(1, 3)), *(one for one in layers if not isinstance(one[0], Shared))]


def _arrivals(random: Random, vocab: int, rows: int, fewest: int = 1, most: int = 7) -> tuple[Arrival, ...]:
    arrivals: list[Arrival] = []
    time = 0.0
    haste = random.choice((0.0, 1.0, 4.0, 15.0))
    salts = (b"", b"", b"", b"a", b"b")
    tenants = random.choice((("",), ("",), ("a", "b"), ("a", "a", "a", "b", "c")))
    for number in range(random.randint(fewest, most)):
        time += random.random() * haste
        prompt, salt = _prompt(random, arrivals, vocab), random.choice(salts)
        generates = random.random() < 0.9
        samples = 1
        if generates and random.random() < 0.25:
            samples = random.choice((2, 3, rows + 1))
        arrivals.append(
            Arrival(
                time,
                Request(
                    id=number,
                    prompt=prompt,
                    limit=len(prompt) + (random.randint(1, 14) if generates else 0),
                    stop_ids=frozenset(random.sample(range(vocab), random.randint(0, 1))),
                    samples=samples,
                    priority=(0, 1, BATCH_PRIORITY)[random.randint(0, 2)],
                    salt=salt,
                    tenant=random.choice(tenants),
                    reuse=random.random() < 0.9,
                    generates=generates,
                ),
            )
        )
    for arrival in arrivals:
        arrival.request.payload = arrival.request
    return tuple(arrivals)


def _resume_some(random: Random, arrivals: tuple[Arrival, ...], vocab: int) -> None:
    """Some requests continue what another engine has generated, each sample from a place of its own."""
    for request in (arrival.request for arrival in arrivals):
        if not request.generates or random.random() < 0.7:
            continue
        whole = [expected(request, child, vocab)[0] for child in range(request.samples)]
        ended = {child for child in range(request.samples) if random.random() < 0.2}
        ended.discard(random.randrange(request.samples))  # at least one goes on
        request.finished = frozenset(ended)
        request.generated = tuple(
            tuple(tokens if child in ended else tokens[: random.randrange(len(tokens))])
            for child, tokens in enumerate(whole)
        )


def _prompt(random: Random, arrivals: list[Arrival], vocab: int) -> tuple[int, ...]:
    """A new prompt, or a prefix of an earlier one, or the next turn of an earlier conversation, each with a new end."""
    head: tuple[int, ...] = ()
    if arrivals and random.random() < 0.6:
        earlier = random.choice(arrivals).request
        head = earlier.prompt
        if random.random() < 0.5:
            head = head[: random.randint(1, len(head))]
        else:
            head += tuple(expected(earlier, random.randrange(earlier.samples), vocab)[0])
    tail = random.randint(0 if head else 1, random.choice((1, 6, 14)))
    return (head + tuple(random.randrange(vocab) for _ in range(tail)))[:40]


def _frames(random: Random, layout: Layout, arrivals: tuple[Arrival, ...], step_tokens: int) -> int:
    """From barely enough for the longest request (or less: it is refused) to plenty."""
    need = max(_most_pages(layout, a.request.limit, step_tokens) for a in arrivals)
    return max(1, random.choice((need, need, need + 1, need + 3, need * 2, need * 8, need - 1)))


def _most_pages(layout: Layout, length: int, step_tokens: int) -> int:
    """By brute force, the most pages that one sequence can need in a step that gives it up to `step_tokens`."""
    total = 0
    for group in layout.paged:
        window = group.window if group.window is not None else length
        if isinstance(window, Mask):
            total += max(
                _live(window, group.page_tokens, start, min(length, start + step_tokens)) for start in range(length)
            )
            continue
        total += max(
            -(-min(length, start + step_tokens) // group.page_tokens) - max(0, start - window + 1) // group.page_tokens
            for start in range(length)
        )
    return total


@lru_cache(maxsize=4096)
def _live(mask: Mask, page: int, start: int, end: int) -> int:
    """Pages before `end` that a token from `start` on sees, however late it comes, or that hold a new one."""
    later = range(start, start + 40)  # every pattern has come round by then
    seen = {at // page for at in range(min(start, end)) if any(mask.visible(query, at) for query in later)}
    return len(seen.union(at // page for at in range(start, end)))
