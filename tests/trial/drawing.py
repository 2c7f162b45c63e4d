"""Draws cases: a model, options by their weights, and requests that share beginnings, end on page borders and off them,
and use each parameter now and then."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.trial import chat, models, vocabulary
from tests.trial.case import Ask, Case
from tests.trial.dimensions import ON_RANKS, OPTIONS, Option, refused_for_certain
from tests.trial.tools import TOOLS

MODELS = {"tiny": 5.0, "tf": 4.0, "blocks": 0.5, "composed": 1.0, "diffusion": 0.6}
"""Weights of the kinds of models."""
CALM = 0.5
"""Share of an option's draws that leave it as it is, beyond its weights: two or three rare values meet in a case, not
ten, so that what they cause can be told apart."""


CERTAIN = 0.05
"""Share of draws that may take what is refused for certain."""
NOT_DENOISED = ("tools", "structured", "logprobs", "prompt_logprobs", "repetition_penalty", "presence_penalty")
NOT_DENOISED += ("frequency_penalty", "bad_words", "min_tokens")
"""Parameters that diffusion models refuse."""


@dataclass
class Drawn:
    """What is known while a request is drawn."""

    rng: random.Random
    vocab: int
    page: int
    prompt: list[int]
    settings: dict[str, Any]
    http: bool = False

    @property
    def sampled(self) -> bool:
        return bool(self.settings.get("temperature"))

    @property
    def calls(self) -> bool:
        """Whether a tool call is forced, which leaves room for no other structure."""
        return chat.forced(Ask((), self.settings))

    def tokens(self, count: int) -> list[int]:
        return sorted(self.rng.sample(range(3, vocabulary.SMALLEST), count))


@dataclass(frozen=True)
class Parameter:
    """A dimension of requests: how often a request has it, and its value then; None for none after all."""

    chance: float
    draw: Callable[[Drawn], Any]


GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"regex": "[abc]{1,3}"},
    {"regex": "(yes|no)( ab)*"},
    {"regex": "1+2"},
    {"regex": "(a|b){2,5}n"},
    {"choice": ["yes", "no", "an ab"]},
    {"choice": ["a", "ab", "abc"]},
    {"choice": ["é", "x"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
    {"json": {"enum": ["ab", 12, True]}},
    {"json": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
    {"grammar": 'start: "a" b+\nb: "b" | "c"'},
    {"grammar": 'start: /[a-c]+/ "1"'},
)
CALL_AS_TEXT = ({"choice": ['<tool_call>\n{"name": "ab", "arguments": {}}\n</tool_call>']},)
"""Where no tool may be called, a call is text."""
LONGEST_QUESTION = 10
"""Tokens, where the smallest context has to hold a call, too."""
STOPS = ("a", "ab", " a", "e", "no", "st", "é", "12", "\n", "ta", '"', "1")


def _pairs(drawn: Drawn) -> list[str]:
    """Words of two tokens, and a request that may use few others, so that its answer comes upon them."""
    letters = drawn.rng.sample(vocabulary.LETTERS, 4)
    pairs = [a + b for a in letters for b in letters if (a + b).encode() not in vocabulary.words_of(drawn.vocab)]
    if not pairs or "allowed_token_ids" in drawn.settings or "structured" in drawn.settings:
        return []
    drawn.settings["allowed_token_ids"] = [vocabulary.END, *(vocabulary.encode(a, drawn.vocab)[0] for a in letters)]
    return drawn.rng.sample(pairs, min(4, len(pairs)))


def _bad_words(drawn: Drawn) -> list[str]:
    found = _pairs(drawn) if drawn.rng.random() < 0.7 else []
    return found or drawn.rng.sample(("a", "ab", "no", "true", "es", " a", "12", "stan"), 2)


def _stops(drawn: Drawn) -> list[str]:
    found = _pairs(drawn)[:2] if drawn.rng.random() < 0.4 else []
    return found or drawn.rng.sample(STOPS, drawn.rng.choice((1, 2, 3)))


def _tools(drawn: Drawn) -> dict[str, Any] | None:
    if not drawn.http or not vocabulary.ids_of_calls(drawn.vocab):  # the smallest vocabulary cannot spell a call
        return None
    offered = drawn.rng.sample(sorted(TOOLS), drawn.rng.choice((1, 2, 3)))
    choice = drawn.rng.choice(("required", "required", offered[0], "auto", "auto", "none"))
    del drawn.prompt[LONGEST_QUESTION:]
    if choice == "auto":  # a model at random writes the marks of a call only if it likes them
        marks = vocabulary.ids_of_calls(drawn.vocab)
        drawn.settings["logit_bias"] = {str(token): drawn.rng.choice((3.0, 6.0)) for token in marks}
    return {"offered": offered, "choice": choice, "parallel": drawn.rng.random() < 0.7}


def _structured(drawn: Drawn) -> Any:
    if drawn.settings.get("tools", {"choice": "none"})["choice"] != "none" and drawn.rng.random() > CERTAIN:
        return None  # a chat that may call tools refuses it
    return drawn.rng.choice(CALL_AS_TEXT if "tools" in drawn.settings else GRAMMARS)


def _most_tokens(drawn: Drawn) -> int:
    return drawn.rng.choice((4, 20, 30, 36) if drawn.calls else (1, 2, 4, 8, 8, 12, 12, 16))


PARAMETERS: dict[str, Parameter] = {
    "tools": Parameter(0.25, _tools),
    "temperature": Parameter(0.55, lambda d: d.rng.choice((0.3, 0.8, 1.0, 1.5))),
    "top_k": Parameter(0.15, lambda d: d.rng.choice((1, 2, 5, 20)) if d.sampled else None),
    "top_p": Parameter(0.15, lambda d: d.rng.choice((0.3, 0.8, 0.95)) if d.sampled else None),
    "min_p": Parameter(0.1, lambda d: d.rng.choice((0.02, 0.2)) if d.sampled else None),
    "typical_p": Parameter(0.05, lambda d: d.rng.choice((0.4, 0.9)) if d.sampled else None),
    "seed": Parameter(1.0, lambda d: d.rng.choice((0, d.rng.randrange(2**62), -5)) if d.sampled else None),
    "n": Parameter(0.2, lambda d: d.rng.choice((2, 3)) if d.sampled or d.rng.random() < 0.1 else None),
    "best_of": Parameter(0.1, lambda d: d.settings.get("n", 1) + d.rng.choice((0, 1, 2)) if d.sampled else None),
    "repetition_penalty": Parameter(0.1, lambda d: d.rng.choice((0.8, 1.3))),
    "presence_penalty": Parameter(0.1, lambda d: d.rng.choice((-1.0, 1.5))),
    "frequency_penalty": Parameter(0.1, lambda d: d.rng.choice((-0.5, 1.0))),
    "logit_bias": Parameter(
        0.1, lambda d: {str(t): d.rng.choice((-100.0, -3.0, 2.5, 8.0)) for t in d.tokens(d.rng.choice((1, 4)))}
    ),
    "allowed_token_ids": Parameter(0.06, lambda d: [2, *d.tokens(d.rng.choice((2, 12)))]),
    "banned_token_ids": Parameter(0.06, lambda d: d.tokens(3)),
    "bad_words": Parameter(0.12, _bad_words),
    "structured": Parameter(0.3, _structured),
    "ignore_eos": Parameter(0.45, lambda d: None if "structured" in d.settings or d.calls else True),
    "stop": Parameter(0.2, _stops),
    "include_stop_str_in_output": Parameter(0.08, lambda d: True),
    "stop_token_ids": Parameter(0.15, lambda d: d.tokens(d.rng.choice((1, 6, 20)))),
    "skip_special_tokens": Parameter(0.05, lambda d: False),
    "max_tokens": Parameter(1.0, _most_tokens),
    "min_tokens": Parameter(0.2, lambda d: d.rng.randint(0, d.settings["max_tokens"])),
    "logprobs": Parameter(0.2, lambda d: d.rng.choice((0, 1, 5))),
    "prompt_logprobs": Parameter(0.1, lambda d: d.rng.choice((0, 2))),
    "speculative": Parameter(0.08, lambda d: d.rng.choice((False, 1, 2))),
    "cuts": Parameter(0.1, lambda d: [d.rng.randrange(12) for _ in range(d.settings.get("n", 1))]),
    "arrive": Parameter(0.4, lambda d: d.rng.randrange(12)),
    "abort": Parameter(0.08, lambda d: d.rng.randrange(10)),
    "priority": Parameter(0.15, lambda d: d.rng.choice((-1, 1))),
    "salt": Parameter(0.1, lambda d: "other"),
    "tenant": Parameter(0.15, lambda d: d.rng.choice("ab")),
    "stream": Parameter(0.4, lambda d: True),
}


def draw(seed: int) -> Case:
    """The case of this number."""
    rng = random.Random(f"trial {seed}")
    kind = rng.choices(list(MODELS), list(MODELS.values()))[0]
    names = [name for name in models.names() if name.startswith(f"{kind}:")]
    weights = [3.0 if name in ("tiny:llama", "tiny:gemma") else 1.0 for name in names]
    model = rng.choices(names, weights)[0]
    options: dict[str, Any] = {}
    for option in OPTIONS.values():
        own = random.Random(f"written {seed}") if option.name == "written" else rng  # else all others would be redrawn
        value = _value(own, option, model, options)
        if value != option.usual:
            options[option.name] = value
    if "layout" in options:
        options.pop("driver", None)
        if options.get("strategy") not in ON_RANKS:
            options.pop("strategy", None)
    asks = _asks(rng, model, options.get("page", 4), options.get("driver") == "http")
    if kind == "diffusion":  # another engine's blocks end elsewhere
        without = {"cuts", *(NOT_DENOISED if rng.random() > CERTAIN else ())}
        asks = [Ask(ask.prompt, {k: v for k, v in ask.settings.items() if k not in without}) for ask in asks]
    if options.get("driver") != "http":
        options.pop("service", None)  # several engines are behind a server
        asks = [ask.without("best_of") for ask in asks]
    else:
        asks = [_for_clients(ask) for ask in asks]
        if options.get("batching") == "static":  # a server waits for a whole batch, as long as it takes
            del options["batching"]
    if {"driver", "layout", "format"} & options.keys():
        options.pop("written", None)
    if "written" in options:  # the same prompts before and after
        asks = [ask.without("cuts") for ask in asks]
        asks += [Ask(ask.prompt, {**ask.settings, "later": True}) for ask in asks]
    return Case(rng.randrange(1 << 20), model, options, tuple(asks))


def _for_clients(ask: Ask) -> Ask:
    """Without what the API does not have."""
    without = {"cuts", "banned_token_ids", "tenant", *(() if ask.get("stream") else ("abort",))}
    without |= {"best_of"} if "tools" in ask.settings else set()
    return Ask(ask.prompt, {name: value for name, value in ask.settings.items() if name not in without})


def _value(rng: random.Random, option: Option, model: str, options: Mapping[str, Any]) -> Any:
    if option.name != "strategy" and rng.random() < CALM:
        return option.usual
    values = [value for value in option.values if option.where(model, value)]
    if rng.random() >= CERTAIN:  # the options drawn before may be refused, whatever this one is
        values = [v for v in values if not refused_for_certain(model, option.name, v, options)] or values
    return rng.choices(values, [option.values[value] for value in values])[0]


def _asks(rng: random.Random, model: str, page: int, http: bool) -> list[Ask]:
    trunk = [rng.randrange(3, vocabulary.SMALLEST) for _ in range(40)]
    vocab = models.model_of(model).vocab
    return [_ask(rng, model, vocab, page, trunk, http) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]


def _ask(rng: random.Random, model: str, vocab: int, page: int, trunk: list[int], http: bool) -> Ask:
    prompt = _prompt(rng, page, trunk, models.SHORTEST.get(model, 1))
    drawn = Drawn(rng, vocab, page, prompt, {}, http)
    for name, parameter in PARAMETERS.items():
        if rng.random() < parameter.chance and (value := parameter.draw(drawn)) is not None:
            drawn.settings[name] = value
    return Ask(tuple(prompt), drawn.settings)


def _prompt(rng: random.Random, page: int, trunk: list[int], shortest: int) -> list[int]:
    length = rng.choice((1, page * rng.randint(1, 40 // page) + rng.choice((-1, 0, 0, 1)), rng.randint(1, 40)))
    length = max(shortest, 1, min(length, 41))
    shape = rng.random()
    if shape < 0.55:
        kept = rng.randint(0, length)
        prompt = trunk[:kept] + [rng.randrange(3, vocabulary.SMALLEST) for _ in range(length - kept)]
    elif shape < 0.75:
        motif = [rng.randrange(3, vocabulary.SMALLEST) for _ in range(rng.randint(2, 5))]
        prompt = (motif * 41)[:length]
    else:
        words = vocabulary.encode('{"a": true, "ab": [1, 2]} yes no an ab é 12\n', vocabulary.SMALLEST)
        prompt = (words * 4)[:length]
    return (prompt + trunk)[:length] if prompt else trunk[:length]
