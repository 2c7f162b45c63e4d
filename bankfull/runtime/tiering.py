"""The tiers of an engine, from its options: sizes, files, and who copies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bankfull.build_digest import build_digest
from bankfull.choices import TIERS
from bankfull.config import RunConfig, StateConfig, parse_bytes
from bankfull.declared import Trait
from bankfull.errors import ConfigError
from bankfull.layers.build import Build
from bankfull.paths import cache_dir
from bankfull.runtime.device_runner import DeviceRunner
from bankfull.runtime.host import available_memory, usable_cores
from bankfull.runtime.memory import shown
from bankfull.runtime.mover import HostPlaces, Lanes, Mover, PlaceStore, Told
from bankfull.runtime.tier_ranks import (
    Alone,
    PlaceSizes,
    TierRanks,
    agree,
    common_number,
    directories,
    held_by_all,
    slot_bytes,
)
from bankfull.state.disk import DiskStore, identity_of
from bankfull.state.disk_budget import DiskBudget, TierSizes, affordable
from bankfull.state.disk_files import ENTRY, FOLDER_BYTES, KINDS
from bankfull.state.disk_folders import DiskUnusable, counting, make_room, unusable
from bankfull.state.exchange import Carrier, ExchangeShape, ExchangeWriter, exchange_of
from bankfull.state.expected import ExpectedState
from bankfull.state.lower_tier import LowerTier, key_from_disk
from bankfull.state.manager import StateManager
from bankfull.state.shipping import Shipping
from bankfull.state.spec import Layout
from bankfull.state.state_facts import StateFacts
from bankfull.state.tiers import Tiers
from bankfull.state.transfer_rates import TransferRates
from bankfull.types import Tier
from bankfull.weights.fingerprint import fingerprint_beside, weights_fingerprint
from bankfull.weights.source import ModelFiles

log = logging.getLogger("bankfull")

HOST_SHARE = 0.9
"""Largest fraction of the free memory that the host tier may take."""
EXCHANGE_THREADS = max(1, min(4, usable_cores() // 8))
"""Threads that copy from or to an exchange; on a small machine they share the cores with the model."""
MANY_EXCHANGES = 4
"""An engine that sends state to more than so many others has one thread for each."""


def disk_root(directory: str) -> Path:
    """The directory of the disk tier; the usual one if none is named."""
    return Path(directory).expanduser() if directory else cache_dir() / "kv"


def begun_fingerprint(files: ModelFiles, config: StateConfig) -> Callable[[], str] | None:
    """The fingerprint of the weights, made by a thread while they are loaded, if an option needs it."""
    return None if config.kv_disk is None else fingerprint_beside(files.path)


def state_facts(
    files: ModelFiles, build: Build, run: RunConfig, fingerprint: Callable[[], str] | None = None
) -> dict[str, Any]:
    """What the numbers in the state depend on, beside the layout: it names the files of the disk tier. `fingerprint` of
    the weights, if it is being made; else it is made where it is needed."""
    if not files.path.exists():  # random weights have no files
        return {"model": files.path.name}
    return {
        "model": files.path.name,
        "weights": fingerprint or (lambda: weights_fingerprint(files.path)),
        "config": files.config,
        "dtype": str(build.dtype),
        "activations": build.activations.name,
        "quantize": run.quantize,
        "speculative": run.speculative,
        "device": build.kit.device,
    }


def add_tiers(
    manager: StateManager,
    runner: DeviceRunner,
    config: StateConfig,
    about: dict[str, Any],
    ranks: TierRanks | None = None,
) -> None:
    """Give the engine the tiers that `config` asks for. `about`: what the content of the state depends on. `ranks`:
    those that keep the state, if there are several. Every rank has the same places and moves its own part of them; only
    rank 0 knows what is in them."""
    ranks = ranks or Alone()
    manager.facts = StateFacts(
        {**about, **ranks.facts, "version": build_digest, "layout": lambda: layout_facts(manager.layout)}
    )
    if config.kv_host is None and config.kv_disk is None:
        return
    layout, device, sizes = manager.layout, runner.device, PlaceSizes.of(manager.layout, ranks)
    lower: list[LowerTier] = []
    host = None
    if (size := parse_bytes("kv_host", config.kv_host)) is not None:
        TIERS["kv_host"].refuse("kv_host", {Trait.HOST_MEMORY: device.ship is None})
        pages, slots = places_of(sizes.whole, manager, size, "kv_host")
        if sizes.bytes_here(pages, slots) > HOST_SHARE * sizes.free:
            free = shown(sizes.free)
            raise ConfigError(f"kv_host={config.kv_host!r} does not fit: {free} of memory are free; give less.")
        host = HostPlaces(layout, runner.storage, pages, slots, device)
        lower.append(LowerTier(Tier.HOST, pages, slots, rate=parse_bytes("kv_host_rate", config.kv_host_rate) or 0))
    store = None
    if (disk := config.disk()) is not None:
        try:
            store, tier = _disk(manager, config, *disk, ranks, sizes)
        except DiskUnusable as error:  # what it would hold are copies
            log.error("%s Until the next start there is no disk tier.", error)
            manager.without["kv_disk"] = error.brief
        else:
            lower.append(tier)
    if not lower:
        return
    rates = TransferRates()
    runner.mover = Mover(runner.storage, device, rates, host, store, sizes.whole)
    runner.mover.erase = None if store is None else _erasing(store)
    if ranks.rank == 0:
        manager.tiers = _tiers(manager, lower, rates, sizes.whole)
        manager.tiers.erase, manager.tiers.problems = runner.mover.erase, runner.mover.problems


def add_expected(
    manager: StateManager, runner: DeviceRunner, open_exchange: Callable[[ExchangeShape], PlaceStore], size: int
) -> ExpectedState:
    """Let other engines hand state to this one, through an exchange of `size` bytes."""
    layout = manager.layout
    if size > HOST_SHARE * (free := available_memory()):
        raise ConfigError(f"exchange={shown(size)} does not fit: {shown(free)} of memory are free; give less.")
    pages, slots = places_of(_place_bytes(layout), manager, size, "exchange")
    shape = ExchangeShape(identity_of(manager.facts.all()), pages, slots, *_place_bytes(layout))
    tier = LowerTier(Tier.EXCHANGE, pages, slots)
    _add_store(manager, runner, open_exchange(shape), [tier], Lanes(EXCHANGE_THREADS))
    return ExpectedState(manager, tier)


def add_shipping(
    manager: StateManager, runner: DeviceRunner, open_carrier: Callable[[bytes], Carrier], lanes: int = 1
) -> Shipping:
    """Let this engine hand state to others, through their exchanges. `open_carrier` gets the form of the state.
    `lanes`: their number, where one that takes nothing must not keep state from the others."""
    shipping = Shipping(manager.moves)
    writer = ExchangeWriter(open_carrier(identity_of(manager.facts.all())))
    threads = EXCHANGE_THREADS if lanes <= MANY_EXCHANGES else 1
    copying = Lanes(threads, lanes, lambda transfer: exchange_of(transfer.dst.place) % lanes)
    shipping.tiers = tiers = _add_store(manager, runner, writer, [], copying, shipping.stored)
    tiers.shipping = shipping
    return shipping


def _add_store(
    manager: StateManager,
    runner: DeviceRunner,
    store: PlaceStore,
    lower: list[LowerTier],
    lanes: Lanes,
    told: Told | None = None,
) -> Tiers:
    """An end of an exchange beside the tiers that there are."""
    before = manager.tiers
    rates = TransferRates() if before is None else before.rates
    if runner.mover is None:
        runner.mover = Mover(runner.storage, runner.device, rates)
    runner.mover.add_store(Tier.EXCHANGE, store, lanes, told)
    tiers = _tiers(manager, [*lower, *(() if before is None else before.lower)], rates, _place_bytes(manager.layout))
    tiers.erase, tiers.problems = None if before is None else before.erase, runner.mover.problems
    manager.tiers = tiers
    return tiers


def _tiers(manager: StateManager, lower: list[LowerTier], rates: TransferRates, nbytes: tuple[int, int]) -> Tiers:
    """`nbytes`: of a page and of a slot."""
    pools = manager.pages, manager.slots
    return Tiers(*pools, lower, manager.moves, page_bytes=nbytes[0], slot_bytes=nbytes[1], rates=rates)


def _place_bytes(layout: Layout) -> tuple[int, int]:
    return layout.frame_bytes, slot_bytes(layout)


def _disk(
    manager: StateManager,
    config: StateConfig,
    size: int,
    directory: str,
    ranks: TierRanks,
    sizes: PlaceSizes,
) -> tuple[DiskStore, LowerTier]:
    """All ranks, or none: raises DiskUnusable on each of them where one cannot use its folder."""
    root, whole, facts = disk_root(directory), sizes.whole, manager.facts.all()
    identity, about = identity_of(facts), {name: fact for name, fact in facts.items() if name != "layout"}
    each = [nbytes and nbytes + sizes.ranks * ENTRY.size for nbytes in whole]
    fitting = partial(places_of, (each[0], each[1]), manager, name="kv_disk", beside=sizes.ranks * FOLDER_BYTES)
    pages, slots = fitting(size=size)
    possible = common_number(ranks, affordable(root, size) if ranks.rank == 0 else None)
    if possible < size:
        size = possible
        try:
            pages, slots = fitting(size=size)
        except ConfigError:
            why = f"only {shown(size)} are free on its disk"
            raise DiskUnusable(
                f"The disk tier cannot use {root}: {why}; make room, or give another path.", why
            ) from None
    places, nbytes = (dict(zip(KINDS, both, strict=True)) for both in ((pages, slots), _place_bytes(manager.layout)))
    most = TierSizes(places, dict(zip(KINDS, whole, strict=True)), sizes.ranks)
    store, number, problem = None, None, None
    if ranks.rank == 0:
        store, problem = _opened(root, identity, about, places, nbytes)
        number = None if store is None else store.number
    number = common_number(ranks, number)
    if ranks.rank != 0 and number >= 0:
        store, problem = _opened(root, identity, about, places, nbytes, number)
    try:
        agree(ranks, problem)
        assert store is not None
        used, held = directories(ranks, root, identity, store)  # all are locked now
        if sizes.first and ranks.rank != 0:  # rank 0 counts on its own machine
            with suppress(OSError), counting(root):
                make_room(root, used, max(0, size - held))
        budget = None
        if ranks.rank == 0:
            budget, problem = _budget(root, size, most, used, store)
        agree(ranks, problem)
        step = common_number(ranks, None if budget is None else budget.step)
        agree(ranks, _cut(store, most.at(step)))
        rate = parse_bytes("kv_disk_rate", config.kv_disk_rate) or 0
        first = most.at(step)
        tier = LowerTier(
            Tier.DISK, first["pages"], first["slots"], rate=rate, room=budget, most=(places["pages"], places["slots"])
        )
        oldest = None if config.kv_disk_age is None else store.clock.now() - 3600 * config.kv_disk_age
        for kind, pool in (("pages", tier.pages), ("slots", tier.slots)):
            common = held_by_all(ranks, store.files[kind].entries(), pool.size)
            pool.adopt((one.place, key_from_disk(one.key)) for one in common if oldest is None or one.written >= oldest)
    except DiskUnusable:
        if store is not None:
            store.close()
        raise
    log.info("disk tier: %d pages from earlier in %s", tier.pages.cached, store.path)
    return store, tier


def _opened(
    root: Path,
    identity: bytes,
    about: dict[str, Any],
    places: dict[str, int],
    nbytes: dict[str, int],
    number: int = 0,
) -> tuple[DiskStore | None, DiskUnusable | None]:
    """The folder, or why it cannot be used."""
    try:
        with counting(root):
            return DiskStore(root, identity, about, places, nbytes, number), None
    except DiskUnusable as error:
        return None, error
    except OSError as error:
        return None, unusable(root, error)


def _budget(
    root: Path, size: int, most: TierSizes, used: Collection[Path], store: DiskStore
) -> tuple[DiskBudget | None, DiskUnusable | None]:
    budget = DiskBudget(root, size, most, used, store.reserve)
    store.on_close = budget.close
    try:
        budget.begin({kind: store.files[kind].last for kind in KINDS})
    except DiskUnusable as error:
        return None, error
    except OSError as error:
        return None, unusable(root, error)
    return budget, None


def _cut(store: DiskStore, places: dict[str, int]) -> DiskUnusable | None:
    """Give up what is above these places; why that failed."""
    try:
        for kind, count in places.items():
            store.files[kind].cut(count)
    except OSError as error:
        return unusable(store.path, error)
    return None


def _erasing(store: DiskStore) -> Callable[[], None]:
    """A disk that fails must not end the engine."""

    def erase() -> None:
        try:
            store.erase()
        except OSError as error:
            why = error.strerror or error
            log.error("%s could not be emptied: %s; run `bankfull cache clear` when it works again.", store.path, why)

    return erase


def places_of(nbytes: tuple[int, int], manager: StateManager, size: int, name: str, beside: int = 0) -> tuple[int, int]:
    """Pages and slots of a tier of `size` bytes, in the proportion that they have on the device. `nbytes`: of a page
    and of a slot. `beside`: what is taken by other things."""
    page, slot = nbytes
    size = max(0, size - beside)
    on_pages, on_slots = manager.pages.size * page, manager.slots.size * slot
    pages = size * on_pages // (on_pages + on_slots) // page if page else 0
    slots = (size - pages * page) // slot if slot else 0
    if (page and not pages) or (slot and not slots):
        least = (page * (on_pages + on_slots) // on_pages if on_pages else 0) + slot
        raise ConfigError(f"{name} is too small: a page takes {shown(page)}; give at least {shown(least + beside)}.")
    return pages, slots


def layout_facts(layout: Layout) -> list[Any]:
    """The layout as JSON, for the identity of files."""
    groups = [[group.members, repr(group.tensors), repr(group.window), group.page_tokens] for group in layout.paged]
    return [layout.frame_bytes, layout.block_tokens, groups, repr(layout.recurrent)]
