"""Frozen configuration, one class per owner. No code reads another owner's class, and none reads a global."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from bankfull.choices import ACTIVATIONS, DTYPES, PAGE_TYPES, TIERS
from bankfull.declared import Trait, check_name
from bankfull.errors import ConfigError
from bankfull.ranks.mesh import ALONE, MeshSpec
from bankfull.scheduling import BATCHING, BY_OPTION, CONTINUOUS, FCFS
from bankfull.speculation import SPECULATIVE, SpeculativeChoice


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")


def cpu_step_tokens(threads: int) -> int:
    """Default tokens of a step on a CPU with this many threads. Each thread needs enough rows to be worth reading the
    weights; longer steps would delay sequences that decode beside a prompt."""
    return min(max(512, 128 * threads), 2048)


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Size of a step, and the order in which requests are served."""

    rows: int = 0
    """Maximum sequences in the batch; 0 = the device's default."""
    step_tokens: int = 0
    """Maximum tokens computed in one step, decodes first; 0 = the device's default."""
    step_ms: float = 0.0
    """Target milliseconds of a step while any sequence decodes: prompts are cut into chunks to meet it, predicted from
    the last steps on this machine (four times as long while none decodes); 0 = only step_tokens limits chunks."""
    policy: str = FCFS
    """Name in `scheduling.POLICIES`."""
    batching: str = CONTINUOUS
    """Admission gate: name in `scheduling.BATCHING`."""
    batch_size: int = 8
    """Sequences of a batch, for static and dynamic batching."""
    batch_timeout: float = 0.05
    """Dynamic batching: seconds after which an incomplete batch starts, counted from its first queued request."""
    max_waiting: int = 100_000
    """Maximum sequences in the queue; further requests are refused."""
    prefill_tokens: int = 0
    """Maximum prompt tokens in one step; 0 = as many as step_tokens leaves."""
    prefill_rows: int = 0
    """Maximum sequences whose prompts one step computes; 0 = all."""
    decode_rows: int = 0
    """Maximum sequences that decode in one step, in turns; 0 = all."""
    quantum_ms: float = 10.0
    """mlfq and skip-join-mlfq: milliseconds of the first queue's quantum; each next one is twice as long."""
    starvation: float = 3.0
    """mlfq, skip-join-mlfq and lpm: seconds of waiting after which a sequence comes first."""
    weights: tuple[tuple[str, float], ...] = ()
    """fair: names of tenants (API keys) and their weights; others have 1."""

    def __post_init__(self) -> None:
        for name in ("rows", "step_tokens", "prefill_tokens", "prefill_rows", "decode_rows"):
            if getattr(self, name) != 0:
                _positive(self, name)
        for name, unit in (("quantum_ms", "milliseconds"), ("starvation", "seconds")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value!r} must be a number of {unit} above 0.")
        for tenant, weight in self.weights:
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
                raise ConfigError(f"The weight {weight!r} of {tenant!r} must be a number above 0.")
        _positive(self, "batch_size", "max_waiting")
        if not 0 <= self.step_ms < float("inf"):
            raise ConfigError(f"step_ms={self.step_ms!r} must be a finite number of milliseconds, or 0 for no bound.")
        if not 0 <= self.batch_timeout < float("inf"):
            raise ConfigError(f"batch_timeout={self.batch_timeout!r} must be a finite number of seconds, 0 or more.")
        for name, table in BY_OPTION.items():
            check_name(name, getattr(self, name), table)
        BATCHING[self.batching].refuse(
            f"batching={self.batching!r}", {Trait.ARRIVAL_ORDER: self.policy == FCFS}, policy=self.policy
        )

    @property
    def prompt_limits(self) -> tuple[int, int]:
        """Prompt tokens, and sequences with prompts, of a step."""
        return self.prefill_tokens or self.step_tokens, self.prefill_rows or self.rows

    def suited(self, rows: int = 64, step_tokens: int = 512) -> SchedConfig:
        """A copy with these values where rows or step_tokens is 0."""
        return replace(self, rows=self.rows or rows, step_tokens=self.step_tokens or step_tokens)


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Memory for KV cache and recurrent state, and what sequences share of it."""

    page_tokens: int = 16
    """Tokens of a page."""
    memory: str | int | float | None = None
    """Size of the page pool: bytes ("2GiB", 2147483648), a fraction of the free memory (0.5), None = automatic."""
    prefix_cache: bool = True
    snapshot_every: int = 16
    """Recurrent models: pages between two snapshots for the prefix cache; the prompt's last page border has one,
    too."""
    snapshot_slots: int = 64
    """Recurrent models: slots for snapshots, beyond those that the rows need."""
    kv_host: str | int | None = None
    """Bytes of pinned host memory for state that leaves a GPU ("8GiB"); None = no host tier."""
    kv_disk: str | None = None
    """Bytes of the disk tier, and its directory after a colon ("100GiB", "100GiB:/var/cache/kv"); without a directory
    it is in the cache directory. All engines that use the directory share the bytes. None = no disk tier."""
    kv_host_rate: str | int | None = None
    """Bytes per second that write-behind to the host may take; None = no limit."""
    kv_disk_rate: str | int | None = None
    """Bytes per second that write-behind to the disk may take; None = no limit."""
    kv_disk_age: float | None = None
    """Hours after which content of the disk tier is not used any longer; None = no limit."""
    pin_share: float = 0.5
    """Fraction of the pools, with the tiers below them, that pinned prefixes may hold, those of all tenants together;
    0 = none."""

    def __post_init__(self) -> None:
        _positive(self, "page_tokens", "snapshot_every")
        if not (isinstance(self.pin_share, int | float) and 0 <= self.pin_share <= 1):
            raise ConfigError(f"pin_share={self.pin_share!r} must be a fraction from 0 to 1.")
        if self.snapshot_slots < 0:
            raise ConfigError(f"snapshot_slots={self.snapshot_slots!r} must not be negative.")
        parse_memory(self.memory, 0)
        for name in ("kv_host", "kv_host_rate", "kv_disk_rate"):
            parse_bytes(name, getattr(self, name))
        self.disk()
        age = self.kv_disk_age
        if age is not None and not (isinstance(age, int | float) and 0 < age < float("inf")):
            raise ConfigError(f"kv_disk_age={age!r} must be a number of hours above 0.")
        for name in self.tiers:
            TIERS[name].refuse(name, {Trait.PREFIX_CACHE: self.prefix_cache})

    @property
    def tiers(self) -> list[str]:
        """Names of the tiers that are asked for."""
        return [name for name in TIERS if getattr(self, name) is not None]

    def disk(self) -> tuple[int, str] | None:
        """Bytes and directory of the disk tier; an empty directory means the usual one."""
        if self.kv_disk is None:
            return None
        if not isinstance(self.kv_disk, str):
            raise ConfigError(f"kv_disk={self.kv_disk!r} must be a text such as '100GiB' or '100GiB:/var/cache/kv'.")
        size, _, directory = self.kv_disk.partition(":")
        return parse_bytes("kv_disk", size.strip()) or 0, directory.strip()


_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "tb": 10**12,
}


MOST_BYTES = 1 << 60


def parse_bytes(name: str, value: str | int | None) -> int | None:
    """Bytes from "8GiB" or a number; None stays None."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", "" if isinstance(value, bool) else str(value))
    size = 0.0 if match is None else float(match[1]) * _UNITS.get(match[2].lower(), 0)
    if not 1 <= size <= MOST_BYTES:
        raise ConfigError(f"{name}={value!r} is not a size; give bytes, such as '8GiB' or {8 << 30}.")
    return int(size)


def parse_memory(value: str | int | float | None, free: int) -> int | None:
    """Bytes from "2GiB", "50%", 0.5 (a fraction of `free`) or a number of bytes; None stays None."""
    if value is None:
        return None
    way_out = "give bytes ('2GiB', 2147483648) or a fraction of the free memory between 0 and 1 (0.5, '50%')"
    number: float = 0
    relative = False
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*|%)\s*", value)
        if match is None:
            raise ConfigError(f"memory={value!r} cannot be read; {way_out}.")
        unit = match[2].lower()
        if unit != "%" and unit not in _UNITS:
            raise ConfigError(f"memory={value!r} has an unknown unit; {way_out}.")
        number = float(match[1]) * _UNITS.get(unit, 0.01)
        relative = unit == "%" or (not unit and number <= 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number, relative = value, value <= 1
    if not (0 < number <= 1 if relative else 1 <= number < float("inf")):
        raise ConfigError(f"memory={value!r} is not a size; {way_out}.")
    return int(number * free) if relative else int(number)


CPU_SHARE = 0.4
"""Fraction of a CPU's free memory that the pools of one engine take by default."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Device and precision of the model."""

    device: str = "auto"
    dtype: str = "auto"
    depth: int | None = None
    """Steps that the host may run behind the device; None = the device's default."""
    providers: str = "auto"
    expand: bool = False
    """Dequantize weights at load; takes more memory."""
    quantize: str | None = None
    """Quantize the matrices of an unquantized checkpoint at load: "int8", "int4", "int4:64", "q4_k,keep", "fp8" (on a
    GPU with activations rounded per token, too), ... (lossy), or "llm.int8" (calibrated: `quantize.outliers`). "2:4"
    drops the zeros of matrices that were pruned so."""
    stored: str | None = None
    """The method that the checkpoint must be quantized with, or gguf; None: whatever it is."""
    kv_dtype: str = "auto"
    """Type of keys and values in the KV cache: name in `choices.PAGE_TYPES`."""
    kv_evict: str | None = None
    """Tokens that full attention still sees and keeps, the first and the last ones: "sinks:4,window:1024" (lossy). None
    = all."""
    activations: str = "auto"
    """Type of activations in matrix products: name in `choices.ACTIVATIONS`; auto: `precision.choose_activations`."""
    threads: int | None = None
    """CPU threads that compute, for all models of this process; None = BANKFULL_THREADS, else all that it may use."""
    seed: int | None = None
    """Makes requests without a seed of their own repeatable, in the order of their arrival."""
    speculative: str = field(default_factory=lambda: os.environ.get(SPECULATIVE_VARIABLE, "auto"))
    """Speculative decoding: `NAME[:MODEL][,key=value...]` (`speculation`). It changes the speed; the tokens are
    the same where a row's arithmetic does not depend on the number of rows, as in float32 on a CPU. The option `rule`
    may choose the same distribution instead (rejection), or a lossy rule (typical)."""
    diffusion: str = ""
    """Diffusion language models: `key=value[,key=value...]` (`DiffusionChoice`); empty = the defaults."""
    parallel: str = ""
    """The ranks that the model is split over, as in "tp=2" (`MeshSpec`); empty = one."""
    ray: str | None = None
    """HOST:PORT of the Ray cluster that runs the ranks after the first; None = they are processes of this machine."""

    @property
    def mesh(self) -> MeshSpec:
        return MeshSpec.parse(self.parallel) if self.parallel else ALONE

    def __post_init__(self) -> None:
        if not isinstance(self.parallel, str):
            raise ConfigError(f"parallel={self.parallel!r} is no layout; use a text such as 'tp=2'.")
        if self.ray is not None and (not isinstance(self.ray, str) or self.mesh.ranks == 1):
            raise ConfigError(
                f"ray={self.ray!r} is to be the address of a Ray cluster for the ranks of a layout: give both, as in "
                "parallel='tp=2' and ray='HOST:6379', or leave ray out."
            )
        _ = self.mesh
        if self.depth is not None and self.depth not in (0, 1):
            raise ConfigError(f"depth={self.depth!r} must be 0 (the host waits) or 1 (the host runs one step behind).")
        if self.threads is not None:
            _positive(self, "threads")
        for name, table in (("dtype", DTYPES), ("kv_dtype", PAGE_TYPES), ("activations", ACTIVATIONS)):
            check_name(name, getattr(self, name), table)
        self.evicts()
        if not isinstance(self.quantize, str | None):
            raise ConfigError(f"quantize={self.quantize!r} is not the name of a weight type; use 'int8' or 'int4'.")
        if not isinstance(self.speculative, str):
            raise ConfigError(f"speculative={self.speculative!r} is not a name; use one of {', '.join(SPECULATIVE)}.")
        if not isinstance(self.diffusion, str):
            raise ConfigError(f"diffusion={self.diffusion!r} is not a text of options; use 'threshold=0.9'.")
        SpeculativeChoice.parse(self.speculative)
        DiffusionChoice.parse(self.diffusion)

    def evicts(self) -> tuple[int, int] | None:
        """Tokens at the start and at the end of a sequence that stay; None: all."""
        if self.kv_evict is None:
            return None
        match = re.fullmatch(r"\s*sinks:([0-9]{1,9})\s*,\s*window:([1-9][0-9]{0,8})\s*", str(self.kv_evict))
        if match is None:
            raise ConfigError(
                f"kv_evict={self.kv_evict!r} cannot be read; give the first and the last tokens that stay, as in "
                "'sinks:4,window:1024'."
            )
        return int(match[1]), int(match[2])


@dataclass(frozen=True, slots=True)
class DiffusionChoice:
    """Options of denoising, for diffusion language models."""

    text: str = ""
    """The options as they were given."""
    order: str = "confidence"
    """Which masked positions of a block are fixed first: confidence or random."""
    tokens: int = 1
    """Positions that each step fixes, at least."""
    threshold: float | None = 0.9
    """Each step also fixes every position whose confidence is above it; 1: none. None where the order is random."""
    block: int = 0
    """Positions that are denoised together; 0 = the model's own block, or USUAL_BLOCK."""
    length: int = 128
    """Mask tokens that a sequence sees after its prompt, at most, where tokens see the whole sequence."""
    cache: str = "none"
    """What is cached where tokens see the whole sequence. none: each step computes all tokens (exact); block: the state
    of known tokens is kept (lossy)."""
    refresh: int = 8
    """Steps after which all tokens are computed again, with cache=block; 0 = never."""

    USUAL_BLOCK: ClassVar[int] = 32
    VALUES: ClassVar[dict[str, tuple[str, ...]]] = {"order": ("confidence", "random"), "cache": ("none", "block")}

    def given(self, name: str) -> bool:
        return any(part.partition("=")[0].strip() == name for part in self.text.split(","))

    @staticmethod
    def parse(text: str) -> DiffusionChoice:
        """The options from `key=value[,key=value...]`; empty = the defaults."""
        shown, options = f"diffusion={text[:80]!r}", {}
        known = ("order", "tokens", "threshold", "block", "length", "cache", "refresh")
        for part in (part.strip() for part in text.split(",") if part.strip()):
            key, _, value = (side.strip() for side in part.partition("="))
            if key not in known:
                raise ConfigError(f"{shown} has no option {key[:40]!r}; its options are {', '.join(known)}.")
            options[key] = DiffusionChoice._value(shown, key, value)
        if options.get("order") == "random":
            if "threshold" in options:
                raise ConfigError(f"{shown}: a random order takes no threshold; leave one of them out.")
            options["threshold"] = None
        return DiffusionChoice(text, **options)

    @staticmethod
    def _value(shown: str, key: str, value: str) -> Any:
        if key in DiffusionChoice.VALUES:
            if value not in DiffusionChoice.VALUES[key]:
                raise ConfigError(
                    f"{shown}: {key} must be {' or '.join(DiffusionChoice.VALUES[key])}, not {value[:40]!r}."
                )
            return value
        if key == "threshold":
            if not re.fullmatch(r"(0?\.[0-9]{1,9}|1(\.0{1,9})?|0)", value):
                raise ConfigError(f"{shown}: threshold must be a number from 0 to 1, not {value[:40]!r}.")
            return float(value)
        least = 0 if key == "refresh" else 1
        if not value.isascii() or not value.isdigit() or not least <= int(value[:9]) <= MOST_DENOISED:
            raise ConfigError(
                f"{shown}: {key} must be a whole number from {least} to {MOST_DENOISED}, not {value[:40]!r}."
            )
        return int(value)


MOST_DENOISED = 65536
"""Largest value of an option of denoising that counts positions or steps."""


SPECULATIVE_VARIABLE = "BANKFULL_SPECULATIVE"
"""The environment variable with the default of `speculative`, instead of auto."""
