"""How many prompt tokens the pins of one API key cover, and whether a call may pin more.

The key's quota is checked before a call runs. A token that several pins cover counts once where one pinned prefix
begins with another, as the turns of a conversation do. What a call was allowed to pin counts until its time is over,
even if the engine had to give it up earlier.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bankfull.types import Keep


@dataclass(slots=True)
class CountedPin:
    length: int
    own: int
    """Tokens behind those of `parent`."""
    parent: bytes | None
    """The longest pinned prefix that this one begins with."""
    seconds: float
    ends: float
    children: int = 0


class PinsExceeded(Exception):
    """The call would pin `wanted` tokens more than the `held` ones, beyond the quota. `seconds`: until enough pins
    end, if nobody uses them; None if its own prefixes are larger than the quota."""

    def __init__(self, wanted: int, held: int, seconds: float | None) -> None:
        super().__init__(f"{wanted} tokens beyond {held}")
        self.wanted, self.held, self.seconds = wanted, held, seconds


class PinLedger:
    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.held = 0
        self._clock = clock
        self._pins: dict[bytes, CountedPin] = {}

    def charge(self, salt: str, prompt: Sequence[int], keeps: Sequence[Keep]) -> Callable[[], None]:
        """Count the prefixes that a call pins, and begin anew the time of those that it uses. Returns a function that
        takes the new ones back, for a call that never ran. Raises PinsExceeded, and then counts nothing."""
        now = self._clock()
        self._expire(now)
        wanted = {tokens: seconds for tokens, seconds in keeps if 0 < tokens <= len(prompt)}
        if not wanted and not self._pins:
            return _nothing
        lengths = sorted({pin.length for pin in self._pins.values() if pin.length <= len(prompt)} | wanted.keys())
        used: list[tuple[bytes, float]] = []
        added: dict[bytes, CountedPin] = {}
        parent, covered = None, 0
        for length, name in zip(lengths, _names(salt, prompt, lengths), strict=True):
            if name in self._pins:
                used.append((name, wanted.get(length, 0.0)))
            elif length in wanted:
                added[name] = CountedPin(length, length - covered, parent, wanted[length], now + wanted[length])
            else:
                continue
            parent, covered = name, length
        more = sum(pin.own for pin in added.values())
        if more and self.held + more > self.most:
            raise PinsExceeded(more, self.held, self._relief(self.held + more - self.most, {name for name, _ in used}))
        for name, seconds in used:
            pin = self._pins[name]
            pin.seconds = max(pin.seconds, seconds)
            pin.ends = now + pin.seconds
        for name, pin in added.items():
            self._pins[name] = pin
            self.held += pin.own
            if pin.parent is not None:
                self._pins[pin.parent].children += 1
        return lambda: self._take_back(list(added))

    def _relief(self, lack: int, used: set[bytes]) -> float | None:
        """Seconds until pins of `lack` tokens have ended, without those that the call itself uses."""
        now, freed = self._clock(), 0
        for pin in sorted((pin for name, pin in self._pins.items() if name not in used), key=lambda pin: pin.ends):
            freed += pin.own
            if freed >= lack:
                return max(0.0, pin.ends - now)
        return None

    def _expire(self, now: float) -> None:
        """A pin whose time is over counts on while a longer one begins with it."""
        ended = [name for name, pin in self._pins.items() if pin.ends <= now and not pin.children]
        while ended:
            parent = self._remove(ended.pop())
            if parent is not None and (pin := self._pins[parent]).ends <= now and not pin.children:
                ended.append(parent)

    def _remove(self, name: bytes) -> bytes | None:
        pin = self._pins.pop(name)
        self.held -= pin.own
        if pin.parent is not None:
            self._pins[pin.parent].children -= 1
        return pin.parent

    def _take_back(self, names: list[bytes]) -> None:
        for name in reversed(names):
            if name in self._pins and not self._pins[name].children:  # else another call uses it by now
                self._remove(name)


def _names(salt: str, prompt: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """A digest of each prefix of the prompt; the lengths are sorted."""
    digest, done, names = hashlib.sha256(f"{len(salt)}:{salt}".encode()), 0, []
    for length in lengths:
        digest.update(array("q", prompt[done:length]).tobytes())
        names.append(digest.digest())
        done = length
    return names


def _nothing() -> None:
    pass
