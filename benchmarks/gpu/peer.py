"""`transformers` on the same shape, in the same run: compiled with a static cache where that works, otherwise eager."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from bankfull.errors import ConfigError
from bankfull.limits.statistics import Spread, spread

COMPILE_SECONDS = 60.0
"""Time for compiling; after it the peer runs eagerly."""
DECODED = 33
"""Tokens of each timed run; the first comes with the prompt."""
REPS = 3
WHY_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Sequences that start together."""

    batch: int
    prompt: int
    decodes: bool
    """Whether decoding is timed, without the prompt; otherwise the prompt is."""


@dataclass(frozen=True, slots=True)
class PeerFigure:
    mode: str
    values: Spread
    """Tokens per second over the repetitions."""


class TransformersPeer:
    """A model of a configuration on a device, with the library's own random weights."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError("The peer needs the package transformers: pip install transformers") from None
        kind = str(config["model_type"])
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(f"transformers has no architecture {kind!r}; leave --peer out for this work.")
        fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
        made = transformers.AutoConfig.for_model(kind, **fields)
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._vocab, self._device = int(config["vocab_size"]), device
        self.name = f"transformers {transformers.__version__}"

    def measure(self, load: PeerLoad) -> PeerFigure:
        """The compiled figure if the model can be compiled in time, else the eager one and the reason."""
        why = "no static cache"
        if load.decodes and self._device.type == "cuda" and getattr(self._model, "_can_compile_fullgraph", False):
            try:
                with _time_limit(COMPILE_SECONDS):
                    self._run(load, DECODED, static=True)
                return PeerFigure("compiled", self._rates(load, static=True))
            except Exception as error:  # whatever a compiler raises
                why = " ".join(str(error).split())[:WHY_CHARACTERS] or type(error).__name__
        elif not load.decodes:
            why = "prompt"
        self._run(load, DECODED if load.decodes else 1, static=False)
        return PeerFigure(f"eager ({why})", self._rates(load, static=False))

    def _rates(self, load: PeerLoad, static: bool) -> Spread:
        rates = []
        for _ in range(REPS):
            first = self._run(load, 1, static)
            if load.decodes:
                rates.append(load.batch * (DECODED - 1) / (self._run(load, DECODED, static) - first))
            else:
                rates.append(load.batch * load.prompt / first)
        return spread(rates)

    def _run(self, load: PeerLoad, new: int, static: bool) -> float:
        """Seconds of a whole call."""
        prompts = torch.randint(self._vocab, (load.batch, load.prompt), device=self._device)
        options = {"cache_implementation": "static"} if static else {"disable_compile": True}
        begun = self._clock()
        with torch.inference_mode():
            self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return self._clock() - begun

    def _clock(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread."""

    def expired(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"compiling took over {seconds:.0f} s")

    before: Any = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
