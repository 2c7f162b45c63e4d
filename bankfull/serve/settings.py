"""Settings of the HTTP side of the service: one frozen record, made by the command line or a test."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bankfull.errors import ConfigError
from bankfull.serve.api.prices import TokenPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    names: tuple[str, ...]
    """Names of the model that clients may use; answers use the first one."""
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 4 << 20
    """Bytes a body may have: parsing a larger one in one go could block the event loop."""
    max_prompts: int = 2048
    """Prompts a call of completions or embeddings may have."""
    prompts_at_once: int = 64
    """Prompts of one call that are submitted to the engine at the same time."""
    keep_alive_seconds: float = 15.0
    """Seconds of silence after which a stream gets a comment, so that no proxy closes it as dead."""
    use_generation_config: bool = True
    """Whether the model's recommended sampling parameters are the defaults (`bankfull.sample.recommended`)."""
    prices: TokenPrices | None = None
    """Prices of tokens, for the cost in `usage`."""
    pin_minimum: int = 1024
    """Tokens that a prefix needs to be pinned (`cache_control`); shorter ones are not worth their time."""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.names or not all(self.names):
            raise ConfigError("The served model needs a name that is not empty.")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port={self.port} is not a port; give a number from 0 to 65535.")
        for name in ("max_body_bytes", "max_prompts", "prompts_at_once", "pin_minimum", "keep_alive_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0.")
