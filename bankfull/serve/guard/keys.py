"""API keys and their rate limits.

A key file has one line per key, which contains the hash of the key but never the key: `NAME sha256:HEX [requests=N]
[tokens=N] [pins=N] [admin]`. Requests and tokens are per minute; pins are the tokens of all prefixes that the key has
pinned. Generated keys have 256 random bits, so one round of SHA-256 is enough: they cannot be guessed, and a slow hash
would let clients without a key load the server.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bankfull.errors import ConfigError
from bankfull.serve.guard.pin_quota import PinLedger

log = logging.getLogger("bankfull.serve")

ENVIRONMENT = "BANKFULL_API_KEY"
ENVIRONMENT_PREFIX = "environment-"
DIGEST_DIGITS = 16
"""Hexadecimal digits of the hash in the name of a key; enough to make collisions impossible in practice."""
SALT_DIGITS = 32
KEY_PREFIX = "bf-"
SHORTEST_KEY = 16
LONGEST_KEY = 512
MAX_KEYS = 1000
MAX_PER_MINUTE = 10**12
RELOAD_SECONDS = 2.0

KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_PRINTABLE = re.compile(rb"[!-~]+")


class TokenBucket:
    """A token bucket that holds one minute's worth and refills steadily. A call reserves all that it may need before it
    starts, and returns the unused rest at its end, so concurrent calls never use more than the limit. Batch work may
    overdraw the bucket, and then waits until it is refilled."""

    __slots__ = ("_at", "_clock", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def wait(self, amount: float = 1.0) -> float:
        """Seconds until `amount` is available; 0 if it is available now."""
        self._refill()
        return max(0.0, (amount - self._level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def give_back(self, amount: float) -> None:
        self.take(-amount)

    @property
    def left(self) -> int:
        self._refill()
        return max(0, int(self._level))

    def _refill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    digest: str
    """SHA-256 of the key, in hexadecimal."""
    requests: int | None = None
    tokens: int | None = None
    """Limit per minute; None sets no limit."""
    pins: int | None = None
    """Tokens that the key may have pinned in the prefix cache; None sets no limit of its own."""
    admin: bool = False
    """Whether the key may change what all keys share, such as the prefix cache."""

    @property
    def salt(self) -> str:
        """Separates what is cached for this key from that of all others, also from that of a later key with this name.
        Neither the key nor its hash follows from it."""
        return hashlib.sha256(f"prefixes of the key {self.digest}".encode()).hexdigest()[:SALT_DIGITS]

    @property
    def line(self) -> str:
        """The line of this key in a key file."""
        given = (("requests", self.requests), ("tokens", self.tokens), ("pins", self.pins))
        limits = [f"{name}={value}" for name, value in given if value]
        return " ".join([self.name, f"sha256:{self.digest}", *limits, *(["admin"] if self.admin else [])])


@dataclass(slots=True)
class RateLimits:
    """What one key has used; None for a limit that is not set."""

    requests: TokenBucket | None
    tokens: TokenBucket | None
    pins: PinLedger | None


@dataclass(slots=True)
class Keyring:
    """All keys of a server. A changed file is reloaded; an invalid file changes nothing.

    A revoked key is refused at once. Its running work ends later, once the file has stayed unchanged until the next
    check, because a file that is being written may lack keys for a moment.
    """

    fixed: tuple[Key, ...] = ()
    file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    removed: list[Callable[[frozenset[Key]], None]] = field(default_factory=list)
    """Callbacks that receive the revoked keys."""
    required: bool = field(init=False)
    """Whether requests need a key. A key file without keys refuses everyone."""
    _keys: tuple[Key, ...] = ()
    _rate_limits: dict[str, RateLimits] = field(default_factory=dict)
    _stamp_seen: tuple[int, int] | None = None
    _checked_at: float = -math.inf
    _changed_at: float = -math.inf
    _pending_removal: frozenset[Key] = frozenset()

    def __post_init__(self) -> None:
        self._keys = self.fixed
        self.required = bool(self.fixed) or self.file is not None
        if self.file is not None:
            self._stamp_seen = _stamp(self.file)
            self._keys = _distinct((*self.fixed, *read_keys(self.file)))
            self._checked_at = self.clock()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, presented: bytes) -> Key | None:
        """The key that was presented, compared byte for byte without decoding or normalising."""
        self._read_file()
        if not _PRINTABLE.fullmatch(presented) or len(presented) > LONGEST_KEY:
            return None
        digest = hashlib.sha256(presented).hexdigest()
        found = None
        for key in self._keys:  # compare with all keys: constant time leaks nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        """The key with this name, for background work; None if it was revoked."""
        self._read_file()
        return next((key for key in self._keys if key.name == name), None)

    def batch_wait(self, name: str) -> float:
        """Seconds until batch lines of this key may start: half of its tokens per minute are kept for online calls. A
        batch whose key was revoked while no server ran waits for the key to return; the name "" needs no key."""
        key = self.named(name)
        if key is None and name and self.required:
            return RELOAD_SECONDS
        tokens = None if key is None else self.rate_limits(key).tokens
        return 0.0 if tokens is None else tokens.wait(tokens.per_minute / 2)

    def rate_limits(self, key: Key) -> RateLimits:
        limits = self._rate_limits.get(key.name)
        if limits is None:
            limits = self._rate_limits[key.name] = RateLimits(
                None if key.requests is None else TokenBucket(key.requests, self.clock),
                None if key.tokens is None else TokenBucket(key.tokens, self.clock),
                None if key.pins is None else PinLedger(key.pins, self.clock),
            )
        return limits

    def reload(self, *, force: bool = False) -> None:
        """Reload a changed file, and report revoked keys. `force` reloads in any case and reports at once: the caller
        asserts that the file is complete."""
        self._read_file(force=force)
        if self._pending_removal and (force or self.clock() - self._changed_at >= RELOAD_SECONDS):
            revoked, self._pending_removal = self._pending_removal, frozenset()
            log.info("revoked keys: %d", len(revoked))
            for callback in self.removed:
                callback(revoked)

    def _read_file(self, *, force: bool = False) -> None:
        now = self.clock()
        if self.file is None or (now - self._checked_at < RELOAD_SECONDS and not force):
            return
        self._checked_at = now
        stamp = _stamp(self.file)
        if stamp == self._stamp_seen and not force:
            return
        self._stamp_seen, self._changed_at = stamp, now
        try:
            keys = _distinct((*self.fixed, *read_keys(self.file)))
        except ConfigError as problem:
            log.error("keeping the previous keys: %s", problem)
            return
        known = {key.digest for key in keys}
        self._pending_removal = frozenset(
            key for key in (*self._pending_removal, *self._keys) if key.digest not in known
        )
        changed = {key.name for key in set(self._keys) ^ set(keys)}
        self._rate_limits = {name: left for name, left in self._rate_limits.items() if name not in changed}
        self._keys = keys
        log.info("reloaded the key file: %d keys", len(keys))


def new_key(
    name: str,
    *,
    requests: int | None = None,
    tokens: int | None = None,
    pins: int | None = None,
    admin: bool = False,
) -> tuple[str, Key]:
    """A new secret, to be shown once, and its key, to be stored."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    key = Key(name, hashlib.sha256(secret.encode()).hexdigest(), requests, tokens, pins, admin)
    return secret, parse_line(key.line, "the new key")


def read_keys(file: Path) -> tuple[Key, ...]:
    try:
        text = file.read_text(encoding="ascii")
    except FileNotFoundError:
        raise ConfigError(f"The key file {file} does not exist; create one with `bankfull key NAME >> FILE`.") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The key file {file} cannot be read ({problem}).") from None
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return _distinct(parse_line(line, f"{file}, line {number}") for number, line in lines if line)


def keys_of_environment(environment: Mapping[str, str]) -> tuple[Key, ...]:
    """The keys of the environment, given in clear text and separated by commas; only their hashes are kept. Each may do
    everything. Its name is derived from its hash, so that it owns its files at any position in the list."""
    secrets_given = [secret.strip() for secret in environment.get(ENVIRONMENT, "").split(",") if secret.strip()]
    keys = []
    for number, secret in enumerate(secrets_given, 1):
        if not SHORTEST_KEY <= len(secret) <= LONGEST_KEY or not _PRINTABLE.fullmatch(secret.encode()):
            raise ConfigError(
                f"Key {number} in {ENVIRONMENT} must have {SHORTEST_KEY} to {LONGEST_KEY} printable ASCII "
                "characters; `bankfull key NAME` generates one."
            )
        digest = hashlib.sha256(secret.encode()).hexdigest()
        keys.append(Key(ENVIRONMENT_PREFIX + digest[:DIGEST_DIGITS], digest, admin=True))
    return _distinct(keys)


def parse_line(line: str, where: str) -> Key:
    name, *words = line.split()
    if not KEY_NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name of a key must have 1 to 64 letters, digits, dots, dashes or underscores.")
    if name.startswith(ENVIRONMENT_PREFIX):
        raise ConfigError(
            f"{where}: names with {ENVIRONMENT_PREFIX} are reserved for the keys of {ENVIRONMENT}; choose another."
        )
    hashed = _HASH.fullmatch(words[0]) if words else None
    if hashed is None:
        raise ConfigError(
            f"{where}: the name must be followed by sha256: and 64 hexadecimal digits (`bankfull key` prints them)."
        )
    limits: dict[str, int] = {}
    admin = False
    for word in words[1:]:
        kind, _, number = word.partition("=")
        if word == "admin":
            admin = True
        elif (
            kind in ("requests", "tokens", "pins") and kind not in limits and re.fullmatch(r"[1-9][0-9]{0,12}", number)
        ):
            limits[kind] = min(int(number), MAX_PER_MINUTE)
        else:
            raise ConfigError(
                f"{where}: {word[:40]!r} is not one of requests=N, tokens=N (per minute), pins=N and admin."
            )
    return Key(name, hashed[1], limits.get("requests"), limits.get("tokens"), limits.get("pins"), admin)


def _distinct(keys: Iterable[Key]) -> tuple[Key, ...]:
    kept = tuple(keys)
    if len(kept) > MAX_KEYS:
        raise ConfigError(f"There are {len(kept)} keys, but at most {MAX_KEYS} are supported.")
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in kept]
        if len(set(values)) < len(values):
            twice = next(key.name for key in kept if values.count(getattr(key, what)) > 1)
            raise ConfigError(f"The key {twice} appears twice, by its name or by its hash; keep one of them.")
    return kept


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
