"""Operations: a body that is the meaning, a cost, and providers that compute the same thing faster.

A layer binds its operations once, when the model is built, through a `Kit`: which provider runs is decided then, from
the device and from what is known of the operands (`facts`: dtype, weight, ...), never per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from bankfull.errors import ConfigError
from bankfull.ops.cost import Cost

Function = Callable[..., Any]
BODY = "torch"
FLOAT, BF16, INT8, INT8_FEW = "float", "bf16", "int8", "int8-few"


@dataclass(frozen=True, slots=True)
class Provider:
    name: str
    on: str
    run: Function
    accepts: Callable[..., bool]
    """Called with the facts of the binding as keywords; must tolerate facts that it does not know."""
    prepare: Function | None = None
    """What its calls are given in the place of the weight: the same numbers in a layout of its own, made once."""


@dataclass(slots=True)
class Operation:
    name: str
    body: Function
    cost: Callable[..., Cost]
    shape: Function | None = None
    """What the body returns, as meta tensors; only needed when the body itself cannot run on meta tensors."""
    providers: dict[str, Provider] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def provider(
        self, name: str, *, on: str, accepts: Callable[..., bool] | None = None, prepare: Function | None = None
    ) -> Callable[[Function], Function]:
        def register(run: Function) -> Function:
            self.providers[name] = Provider(name, on, run, accepts or (lambda **facts: True), prepare)
            return run

        return register

    def on_meta(self, *args: Any, **kwargs: Any) -> Any:
        return (self.shape or self.body)(*args, **kwargs)


OPERATIONS: dict[str, Operation] = {}


def op(*, cost: Callable[..., Cost], shape: Function | None = None) -> Callable[[Function], Operation]:
    """Register the decorated torch function as an operation's body; `cost` and `shape` take the same arguments."""

    def register(body: Function) -> Operation:
        name = body.__name__
        assert name not in OPERATIONS, f"operation {name} is registered twice"
        OPERATIONS[name] = Operation(name, body, cost, shape)
        return OPERATIONS[name]

    return register


class Recorder(Protocol):
    def add(self, operation: Operation, provider: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call; what it returns has the shapes of the operation's results."""
        ...


class Kit:
    """The providers for one device, in order of preference; the torch body stands behind them all."""

    def __init__(
        self, device: str = "cpu", prefer: Sequence[str] = ("native", "triton", "triton-q"), activations: str = FLOAT
    ) -> None:
        self.device = device
        self.prefer = tuple(prefer)
        self.activations = activations
        """What weights are multiplied with. FLOAT: the computation's own numbers. BF16: those rounded to bfloat16, and
        dense weights are bfloat16, too. INT8: those rounded to 8 bits, where the weight itself is (lossy). INT8_FEW:
        the same in steps of few rows, where many may be kept finer, and no weight is laid out twice for them."""
        self.chosen: dict[str, Counter[str]] = {}
        """Operation -> provider -> how many places of the model were bound to it."""

        self.recorder: Recorder | None = None
        """While there is one, bound operations are noted instead of run."""

    def bind(self, operation: Operation, **facts: Any) -> Function:
        """The operation as a layer calls it."""
        provider = self._choose(operation, facts)
        name, run = (BODY, operation.body) if provider is None else (provider.name, provider.run)
        self.chosen.setdefault(operation.name, Counter())[name] += 1

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is None:
                return run(*args, **kwargs)
            return self.recorder.add(operation, name, args, kwargs)

        return call

    def prepare(self, operation: Operation, stored: Any, /, **facts: Any) -> Any:
        """The weight as the provider wants it that `bind` chooses for these facts."""
        provider = self._choose(operation, facts)
        return stored if provider is None or provider.prepare is None else provider.prepare(stored)

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None

    @property
    def stacks(self) -> bool:
        """Do layers with one input become one? Where launches and narrow products cost more than views of the result;
        a tape on a CPU fuses by itself."""
        return self.device == "cuda" and bool(self.prefer) and self.activations == FLOAT

    def offers(self, operation: Operation, **facts: Any) -> bool:
        """Is there more than the body? Layers ask it for operations that only pay as one kernel."""
        return self._choose(operation, facts) is not None

    def _choose(self, operation: Operation, facts: dict[str, Any]) -> Provider | None:
        for name in self.prefer:
            provider = operation.providers.get(name)
            if provider is not None and provider.on == self.device and provider.accepts(**facts):
                return provider
        return None


def kit_for(device: str, providers: str = "auto", activations: str = FLOAT) -> Kit:
    """`providers`: auto (the fastest that accept), or torch (bodies only: the reference)."""
    if providers not in ("auto", BODY):
        raise ConfigError(f"providers={providers!r} is unknown; use 'auto' or 'torch'.")
    if activations not in (FLOAT, BF16, INT8, INT8_FEW):
        raise ConfigError(f"activations={activations!r} is unknown; use 'float', 'bf16', 'int8' or 'int8-few'.")
    if device == "cuda" and providers != BODY:
        from bankfull.ops import triton  # noqa: F401  (registers its providers; nobody else pays for the import)
    return Kit(device, () if providers == BODY else ("native", "triton", "triton-q"), activations)
