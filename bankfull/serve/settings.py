"""How the HTTP side of the service behaves: one frozen record, made by the command line or a test."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bankfull.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    names: tuple[str, ...]
    """What clients may call the model; the first is how answers name it."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 << 20
    """Parsing a larger body in one go could hold up the event loop."""
    max_prompts: int = 2048
    """Texts in one call of completions or embeddings."""
    prompts_at_once: int = 64
    """How many of them the engine hears of at a time."""
    keep_alive_seconds: float = 15.0
    """A stream that is silent for so long gets a comment, so that nobody between takes it for dead."""
    use_generation_config: bool = True
    """Start from the sampling that is recommended for the model (`bankfull.sample.recommended`)."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ConfigError("The served model needs a name that is not empty.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} is no port; give a number from 0 to 65535.")
        for name in ("max_body_bytes", "max_prompts", "prompts_at_once", "keep_alive_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
