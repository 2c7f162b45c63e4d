"""Copies pages and slots between the device, host memory, exchanges and the disk, beside the steps.

The engine's thread starts transfers and collects their ends; it never waits for them while there is work. Copies to and
from the host are enqueued on streams of their own (`Device.copier`). A store (the disk, an exchange) is read and
written by threads of its own, through a buffer of one place each, which may block for as long as the store does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from bankfull.errors import ConfigError
from bankfull.runtime.device import Copying, CopyNow, Device
from bankfull.runtime.host import usable_cores
from bankfull.runtime.joint_moves import JointMoves
from bankfull.state.disk import DamagedPlace, PlaceFile
from bankfull.state.spec import Layout
from bankfull.state.storage import Storage
from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Tier, TierAddress, Transfer

log = logging.getLogger("bankfull")

DISK_THREADS = max(2, min(4, usable_cores() // 4))
"""One thread reads at the disk's rate, but checks what it has read in between."""
CHUNK_BYTES = 1 << 30
"""Host memory is allocated in pieces of at most this size: pinned memory of other sizes is rounded up to a power of
two."""
TOGETHER = 16
"""Copies between device and host whose end is reported together."""
RUNG_TOGETHER = 8
"""Transfers of a store that end before a waiting engine is woken, unless no other one is queued: each time it runs a
whole step in Python, for which the store's threads wait."""
STORE_PATIENCE = 4
"""How many times as long `wait` waits for a store as for copies to and from the host, for the same reason."""
TRIAL_BYTES = 64 << 20
"""Copied once in each direction at the start, to measure the rate."""
COMPLAINTS_SECONDS = 60.0


class StoredPlaces(Protocol):
    """Places of one kind that threads read and write; both methods raise OSError or DamagedPlace."""

    def read(self, place: int, key: bytes, into: memoryview) -> None: ...

    def write(self, place: int, key: bytes, content: memoryview) -> None: ...


class PlaceStore(Protocol):
    """`state.disk.DiskStore`, or an end of an exchange."""

    @property
    def files(self) -> Mapping[str, StoredPlaces]:
        """The stored places, by "pages" and "slots"."""
        ...

    def close(self) -> None: ...


Told = Callable[[int, bool, bool], None]
"""Gets a transfer's id, whether it succeeded, and whether no other one waits."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The threads of a store: so many in each lane. Transfers of one lane never wait for those of another."""

    threads: int
    count: int = 1
    lane_of: Callable[[Transfer], int] = lambda transfer: 0


class HostPlaces:
    """The places of the host tier as tensors; place 0 does not exist."""

    def __init__(self, layout: Layout, storage: Storage, pages: int, slots: int, device: Device) -> None:
        per_chunk = max(1, CHUNK_BYTES // max(1, layout.frame_bytes))
        self._per_chunk = per_chunk
        try:
            self._pages = [
                device.host_memory((min(per_chunk, pages - first), layout.frame_bytes), torch.uint8)
                for first in range(0, pages, per_chunk)
            ]
            self._slots = [device.host_memory((slots, *tensor.shape[1:]), tensor.dtype) for tensor in storage.slots]
        except RuntimeError as error:
            size = pages * layout.frame_bytes
            raise ConfigError(f"The host tier's {size} bytes could not be allocated; lower kv_host.") from error

    def page(self, place: int) -> Tensor:
        chunk, within = divmod(place - 1, self._per_chunk)
        return self._pages[chunk][within]

    def slot(self, place: int) -> list[Tensor]:
        return [tensor[place - 1] for tensor in self._slots]


class Mover:
    def __init__(
        self,
        storage: Storage,
        device: Device,
        rates: TransferRates,
        host: HostPlaces | None = None,
        disk: PlaceStore | None = None,
        whole: tuple[int, int] | None = None,
    ) -> None:
        """`whole`: bytes of a page and of a slot over all ranks, to which rates refer; None: those of this rank."""
        self._storage, self._device, self.rates, self._host = storage, device, rates, host
        self._whole = whole or (storage.layout.frame_bytes, self._slot_bytes())
        self.others: JointMoves | None = None
        """The same transfers of other ranks, on rank 0."""
        self.erase: Callable[[], None] | None = None
        """Clears what outlives the process."""
        self.problems: dict[Tier, str] = {}
        """The last error of the system at each store, in a few words, without names of files."""
        self.stores: dict[Tier, PlaceStore] = {}
        self._copier = device.copier()
        self._copying: deque[tuple[list[Transfer], Copying]] = deque()
        self._tasks: dict[Tier, list[SimpleQueue[Transfer | None]]] = {}
        """The queues of each tier, by lane."""
        self._lanes: dict[Tier, Lanes] = {}
        self._queued: dict[Tier, int] = {}
        """Transfers that the threads have not ended."""
        self._ended: deque[tuple[Tier, int, bool]] = deque()
        self._ring = threading.Event()
        self._complained = -COMPLAINTS_SECONDS
        self._threads: list[tuple[SimpleQueue[Transfer | None], threading.Thread]] = []
        if disk is not None:
            self.add_store(Tier.DISK, disk, Lanes(DISK_THREADS))
        if host is not None:
            self._try_copies(host)

    def add_store(self, tier: Tier, store: PlaceStore, lanes: Lanes, told: Told | None = None) -> None:
        """Move transfers from and to this tier, too. `told` is called on the thread that has ended one."""
        self.stores[tier], self._lanes[tier], self._queued[tier] = store, lanes, 0
        self._tasks[tier] = [SimpleQueue() for _ in range(lanes.count)]
        name = f"kv-{tier.name.lower()}"
        for i in range(lanes.count * lanes.threads):
            tasks = self._tasks[tier][i % lanes.count]
            thread = threading.Thread(
                target=self._serve_store, args=(tier, tasks, told), name=f"{name}-{i}", daemon=True
            )
            self._threads.append((tasks, thread))
            thread.start()

    def start(self, transfers: Iterable[Transfer]) -> None:
        between: dict[bool, list[Transfer]] = {True: [], False: []}
        for transfer in transfers:
            if self.others is not None:
                self.others.begin(transfer.id)
            if (tier := max(transfer.src.tier, transfer.dst.tier)) in self._tasks:
                self._queued[tier] += 1
                if transfer.src.tier == Tier.DEVICE:
                    file = self.stores[tier].files["slots" if transfer.slot else "pages"]
                    if isinstance(file, PlaceFile):
                        file.announce(transfer.dst.place)
                self._tasks[tier][self._lanes[tier].lane_of(transfer)].put(transfer)
            else:
                between[transfer.src.tier == Tier.DEVICE].append(transfer)
        for down, line in between.items():
            for first in range(0, len(line), TOGETHER):
                group = line[first : first + TOGETHER]
                pairs = [pair for transfer in group for pair in zip(*self._tensors(transfer), strict=True)]
                self._copying.append((group, self._copier.copy(pairs, down)))

    def ended(self) -> tuple[list[int], list[int]]:
        """The transfers that have completed and those that have failed since the last call, on all ranks."""
        completed: list[int] = []
        failed: list[int] = []
        left: deque[tuple[list[Transfer], Copying]] = deque()
        for group, copying in self._copying:
            if copying.done():
                completed += [transfer.id for transfer in group]
                nbytes = sum(self._bytes_of(transfer) for transfer in group)
                self.rates.observe(group[0].src.tier, group[0].dst.tier, nbytes, copying.seconds())
            else:
                left.append((group, copying))
        self._copying = left
        while self._ended:
            tier, number, succeeded = self._ended.popleft()
            self._queued[tier] -= 1
            (completed if succeeded else failed).append(number)
        return (completed, failed) if self.others is None else self.others.ended(completed, failed)

    def wait(self, seconds: float) -> None:
        """Wait until a transfer has ended, at most this long; for a store a few times as long."""
        if self._ended:
            return
        if self._copying:
            self._copying[0][1].wait(seconds)
        elif any(self._queued.values()):
            self._ring.wait(STORE_PATIENCE * seconds)
            self._ring.clear()
        elif self.others is not None:
            self.others.wait(seconds)

    def close(self) -> None:
        """Wait for the transfers that are under way, and end the threads."""
        for _, copying in self._copying:
            copying.wait(None)
        for tasks, _ in self._threads:
            tasks.put(None)
        for _, thread in self._threads:
            thread.join()
        self._threads = []
        while self.stores:
            self.stores.popitem()[1].close()

    def _tensors(self, transfer: Transfer) -> tuple[list[Tensor], list[Tensor]]:
        """The targets and the sources."""
        return self._place(transfer.dst, transfer.slot), self._place(transfer.src, transfer.slot)

    def _place(self, address: TierAddress, slot: bool) -> list[Tensor]:
        tier, place = address
        if tier == Tier.DEVICE:
            return [tensor[place] for tensor in self._storage.slots] if slot else [self._storage.frames[place]]
        assert tier == Tier.HOST and self._host is not None
        return self._host.slot(place) if slot else [self._host.page(place)]

    def _bytes_of(self, transfer: Transfer) -> int:
        return self._whole[transfer.slot]

    def _try_copies(self, host: HostPlaces) -> None:
        """Measure the rates of both directions with content that nobody needs yet."""
        count = min(max(1, TRIAL_BYTES // max(1, self._storage.layout.frame_bytes)), self._storage.frames.shape[0] - 1)
        count = min(count, sum(len(chunk) for chunk in host._pages)) if self._storage.layout.frame_bytes else 0
        for down in (True, False, True, False) if count else ():
            pairs = [(host.page(place), self._storage.frames[place]) for place in range(1, count + 1)]
            copying = self._copier.copy([(a, b) if down else (b, a) for a, b in pairs], down)
            copying.wait(None)
            tiers = (Tier.DEVICE, Tier.HOST) if down else (Tier.HOST, Tier.DEVICE)
            self.rates.observe(*tiers, count * self._whole[False], copying.seconds())

    # -- on the threads of a store

    def _serve_store(self, tier: Tier, tasks: SimpleQueue[Transfer | None], told: Told | None) -> None:
        copy, store, lanes = self._device.blocking_copy(), self.stores[tier], self._lanes[tier]
        buffers = {
            slot: self._device.host_memory((size,), torch.uint8)
            for slot, size in ((False, self._storage.layout.frame_bytes), (True, self._slot_bytes()))
        }
        while (transfer := tasks.get()) is not None:
            begun, succeeded = time.monotonic(), True
            try:
                self._move(store, transfer, buffers[transfer.slot], copy)
            except (OSError, DamagedPlace) as error:
                succeeded = False
                if isinstance(error, OSError):
                    self.problems[tier] = error.strerror or "its files fail"
                self._complain(tier, error)
            except Exception:
                succeeded = False
                log.exception("a transfer to or from the %s failed", tier.name.lower())
            else:
                self.problems.pop(tier, None)
                together = min(lanes.threads * lanes.count, self._queued[tier]) or 1
                seconds = (time.monotonic() - begun) / together
                self.rates.observe(transfer.src.tier, transfer.dst.tier, self._bytes_of(transfer), seconds)
            self._ended.append((tier, transfer.id, succeeded))
            if len(self._ended) >= RUNG_TOGETHER or tasks.empty():
                self._ring.set()
            if told is not None:
                told(transfer.id, succeeded, tasks.empty())

    def _move(self, store: PlaceStore, transfer: Transfer, buffer: Tensor, copy: CopyNow) -> None:
        file = store.files["slots" if transfer.slot else "pages"]
        reads = transfer.dst.tier == Tier.DEVICE
        other = self._place(transfer.dst if reads else transfer.src, transfer.slot)
        # A page in host memory is one run of bytes, which needs no buffer.
        direct = not transfer.slot and other[0].device.type == "cpu"
        whole = other[0] if direct else buffer
        content = memoryview(whole.numpy())  # type: ignore[arg-type]  # numpy's stubs name no Buffer for Python 3.11
        if reads:
            file.read(transfer.src.place, transfer.key, content)
            if not direct:
                copy(list(zip(other, _parts(buffer, other), strict=True)))
        else:
            if not direct:
                copy(list(zip(_parts(buffer, other), other, strict=True)))
            file.write(transfer.dst.place, transfer.key, content)

    def _slot_bytes(self) -> int:
        recurrent = self._storage.layout.recurrent
        return 0 if recurrent is None else recurrent.slot_bytes

    def _complain(self, tier: Tier, error: Exception) -> None:
        """Log the error, at most once a minute: a full disk would fail thousands of times."""
        now = time.monotonic()
        if now - self._complained >= COMPLAINTS_SECONDS:
            self._complained = now
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            log.warning("the %s tier: %s; what is lost is computed again.", tier.name.lower(), why)


def _parts(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views of the buffer, one after the other, with the shapes and types of these tensors."""
    parts, at = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        parts.append(buffer[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += size
    return parts
