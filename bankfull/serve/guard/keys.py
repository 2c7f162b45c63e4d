"""API keys: who may ask, and how much.

A file holds one key per line, never the key itself: `NAME sha256:HEX [requests=N] [tokens=N] [admin]`, where N is what
the key may use in a minute. Our keys are 256 random bits, so that one round of SHA-256 is all that their hash needs:
there is nothing to guess, and a slow hash would let strangers make the server work.
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

log = logging.getLogger("bankfull.serve")

ENVIRONMENT = "BANKFULL_API_KEY"
OF_ENVIRONMENT = "environment-"
NAMED_DIGITS = 16
"""Of a key's hash in its name: enough that no two keys share them by chance."""
KEY_PREFIX = "bf-"
SHORTEST_KEY = 16
LONGEST_KEY = 512
MAX_KEYS = 1000
MAX_PER_MINUTE = 10**12
RELOAD_SECONDS = 2.0

NAME_OF_KEY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_PRINTABLE = re.compile(rb"[!-~]+")


class Bucket:
    """A minute's worth of something that refills steadily. Who wants some takes all that it may need before it begins,
    and gives back at its end what it did not use: so no number of calls at once can use more than there is. Batch work
    may overdraw it, and waits until the debt is paid."""

    __slots__ = ("_at", "_clock", "_level", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at = clock()

    def wait(self, amount: float = 1.0) -> float:
        """Seconds until there is `amount`; 0 when there is now."""
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
    """SHA-256 of the key, in hexadecimal digits."""
    requests: int | None = None
    tokens: int | None = None
    """Per minute; None: as many as the server can do."""
    admin: bool = False
    """May change what all keys share, such as the prefix cache."""

    @property
    def line(self) -> str:
        """As a file holds it."""
        limits = [f"{name}={value}" for name, value in (("requests", self.requests), ("tokens", self.tokens)) if value]
        return " ".join([self.name, f"sha256:{self.digest}", *limits, *(["admin"] if self.admin else [])])


@dataclass(slots=True)
class Allowance:
    """What is left to a key in this minute."""

    requests: Bucket | None
    tokens: Bucket | None


@dataclass(slots=True)
class Keyring:
    """All keys of a server. A file that changes is read again; a changed file that cannot be read changes nothing.

    A key that was taken out opens nothing from then on. What it has begun ends later, when the file has stayed as it is
    until the next look: a file that is just being written may lack keys for a moment."""

    fixed: tuple[Key, ...] = ()
    file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    removed: list[Callable[[frozenset[Key]], None]] = field(default_factory=list)
    """Told of keys that were taken out for good."""
    _keys: tuple[Key, ...] = ()
    _allowances: dict[str, Allowance] = field(default_factory=dict)
    _seen: tuple[int, int] | None = None
    _looked: float = -math.inf
    _changed: float = -math.inf
    _leaving: frozenset[Key] = frozenset()

    def __post_init__(self) -> None:
        self._keys = self.fixed
        if self.file is not None:
            self._seen = _stamp(self.file)
            self._keys = _distinct((*self.fixed, *read_keys(self.file)))
            self._looked = self.clock()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def required(self) -> bool:
        """A file that holds no key yet still keeps everybody out."""
        return bool(self._keys) or self.file is not None

    def find(self, presented: bytes) -> Key | None:
        """The key that was presented, compared byte by byte as it came: nothing is decoded or normalised."""
        self._reload()
        if not _PRINTABLE.fullmatch(presented) or len(presented) > LONGEST_KEY:
            return None
        digest = hashlib.sha256(presented).hexdigest()
        found = None
        for key in self._keys:  # all of them, whichever fits: the time tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def named(self, name: str) -> Key | None:
        """For work that goes on without whoever presented the key; None also where the key was taken out since."""
        self._reload()
        return next((key for key in self._keys if key.name == name), None)

    def batch_wait(self, name: str) -> float:
        """Seconds until a batch of this key may go on: half of its tokens of a minute are for its online calls. One
        whose key was taken out while no server ran waits for it; "" is nobody's."""
        key = self.named(name)
        if key is None and name and self.required:
            return RELOAD_SECONDS
        tokens = None if key is None else self.allowance(key).tokens
        return 0.0 if tokens is None else tokens.wait(tokens.per_minute / 2)

    def allowance(self, key: Key) -> Allowance:
        allowance = self._allowances.get(key.name)
        if allowance is None:
            allowance = self._allowances[key.name] = Allowance(
                None if key.requests is None else Bucket(key.requests, self.clock),
                None if key.tokens is None else Bucket(key.tokens, self.clock),
            )
        return allowance

    def look(self, *, final: bool = False) -> None:
        """Whether the file has changed, and what was taken out of it. `final`: it is not being written, says whoever
        asks, so that nobody has to wait for the next look."""
        self._reload(again=final)
        if self._leaving and (final or self.clock() - self._changed >= RELOAD_SECONDS):
            gone, self._leaving = self._leaving, frozenset()
            log.info("keys were taken out: %d", len(gone))
            for tell in self.removed:
                tell(gone)

    def _reload(self, *, again: bool = False) -> None:
        now = self.clock()
        if self.file is None or (now - self._looked < RELOAD_SECONDS and not again):
            return
        self._looked = now
        stamp = _stamp(self.file)
        if stamp == self._seen and not again:
            return
        self._seen, self._changed = stamp, now
        try:
            keys = _distinct((*self.fixed, *read_keys(self.file)))
        except ConfigError as problem:
            log.error("the keys stay as they were: %s", problem)
            return
        known = {key.digest for key in keys}
        self._leaving = frozenset(key for key in (*self._leaving, *self._keys) if key.digest not in known)
        changed = {key.name for key in set(self._keys) ^ set(keys)}
        self._allowances = {name: left for name, left in self._allowances.items() if name not in changed}
        self._keys = keys
        log.info("the keys were read again: %d", len(keys))


def new_key(
    name: str, *, requests: int | None = None, tokens: int | None = None, admin: bool = False
) -> tuple[str, Key]:
    """A fresh secret, to be shown once, and the key to be kept."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    key = Key(name, hashlib.sha256(secret.encode()).hexdigest(), requests, tokens, admin)
    return secret, parse_line(key.line, "the new key")


def read_keys(file: Path) -> tuple[Key, ...]:
    try:
        text = file.read_text(encoding="ascii")
    except FileNotFoundError:
        raise ConfigError(f"The key file {file} does not exist; make one with `bankfull key NAME >> FILE`.") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"The key file {file} cannot be read ({problem}).") from None
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    return _distinct(parse_line(line, f"{file}, line {number}") for number, line in lines if line)


def keys_of_environment(environment: Mapping[str, str]) -> tuple[Key, ...]:
    """Keys in the clear, separated by commas; only their hashes are kept. All of them may do everything. Each is named
    by its hash: what it owns is its own wherever it stands, and nobody else's."""
    secrets_given = [secret.strip() for secret in environment.get(ENVIRONMENT, "").split(",") if secret.strip()]
    keys = []
    for number, secret in enumerate(secrets_given, 1):
        if not SHORTEST_KEY <= len(secret) <= LONGEST_KEY or not _PRINTABLE.fullmatch(secret.encode()):
            raise ConfigError(
                f"Key {number} in {ENVIRONMENT} must have {SHORTEST_KEY} to {LONGEST_KEY} printable ASCII characters; "
                "`bankfull key NAME` makes a good one."
            )
        digest = hashlib.sha256(secret.encode()).hexdigest()
        keys.append(Key(OF_ENVIRONMENT + digest[:NAMED_DIGITS], digest, admin=True))
    return _distinct(keys)


def parse_line(line: str, where: str) -> Key:
    name, *words = line.split()
    if not NAME_OF_KEY.fullmatch(name):
        raise ConfigError(f"{where}: a key's name has 1 to 64 letters, digits, dots, dashes or underscores.")
    if name.startswith(OF_ENVIRONMENT):
        raise ConfigError(f"{where}: names with {OF_ENVIRONMENT} are for the keys of {ENVIRONMENT}; choose another.")
    hashed = _HASH.fullmatch(words[0]) if words else None
    if hashed is None:
        raise ConfigError(
            f"{where}: after the name comes sha256: and 64 hexadecimal digits (`bankfull key` prints it)."
        )
    limits: dict[str, int] = {}
    admin = False
    for word in words[1:]:
        kind, _, number = word.partition("=")
        if word == "admin":
            admin = True
        elif kind in ("requests", "tokens") and kind not in limits and re.fullmatch(r"[1-9][0-9]{0,12}", number):
            limits[kind] = min(int(number), MAX_PER_MINUTE)
        else:
            raise ConfigError(f"{where}: {word[:40]!r} is not one of requests=N, tokens=N (per minute) and admin.")
    return Key(name, hashed[1], limits.get("requests"), limits.get("tokens"), admin)


def _distinct(keys: Iterable[Key]) -> tuple[Key, ...]:
    kept = tuple(keys)
    if len(kept) > MAX_KEYS:
        raise ConfigError(f"There are {len(kept)} keys, more than the {MAX_KEYS} that are compared with each request.")
    for what in ("name", "digest"):
        values = [getattr(key, what) for key in kept]
        if len(set(values)) < len(values):
            twice = next(key.name for key in kept if values.count(getattr(key, what)) > 1)
            raise ConfigError(f"The key {twice} is given twice, by its name or by its hash: keep one of them.")
    return kept


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
