"""Operations: a torch body that defines the result, a cost, and providers that compute the same faster.

A layer binds its operations once, when the model is built, through a `Kit`. The kit then chooses the provider from the
device and from `facts` about the operands (dtype, weight, ...), never per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bankfull.errors import ConfigError
from bankfull.ops.cost import Cost
from bankfull.torch_parts import with_all

Function = Callable[..., Any]
BODY = "torch"
PROVIDERS = ("native", "triton", "triton-q", "triton-24")
"""Providers in order of preference."""
TRAIN = "train"
"""The provider of operations with state for a pass with gradients (`ops.train`)."""
ANYWHERE = "any"
"""`Provider.on` of a provider that runs on every device."""
FUSED = ("normed", "gated", "best")
"""Facts of a binding that say what a kernel is to compute in the same pass as an operation (`products.body`)."""


@dataclass(frozen=True, slots=True)
class Provider:
    name: str
    on: str
    run: Function
    accepts: Callable[..., bool]
    """Called with the facts of the binding as keywords; must accept unknown facts."""
    prepare: Function | None = None
    """Turns the weight, once, into the provider's own layout, which its calls get instead of the weight."""
    fuses: tuple[str, ...] = ()
    """What it computes in the same pass, as in `Operation.fused`; nothing else is asked of it."""


@dataclass(slots=True)
class Operation:
    name: str
    body: Function
    cost: Callable[..., Cost]
    shape: Function | None = None
    """Returns meta tensors of the result's shapes; only needed when the body cannot run on meta tensors."""
    providers: dict[str, Provider] = field(default_factory=dict)
    fused: str = ""
    """What a binding has fused with it: the names of FUSED that are among its facts, such as "normed_gated"."""

    @property
    def label(self) -> str:
        """Its name in ledgers and reports, which tells bindings with something fused apart."""
        return f"{self.fused}_{self.name}" if self.fused else self.name

    def bound_with(self, facts: Mapping[str, Any]) -> Operation:
        """The operation with what is fused in a binding with these facts."""
        fused = "_".join(name for name in FUSED if facts.get(name))
        return replace(self, fused=fused) if fused else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)

    def provider(
        self,
        name: str,
        *,
        on: str,
        accepts: Callable[..., bool] | None = None,
        prepare: Function | None = None,
        fuses: tuple[str, ...] = (),
    ) -> Callable[[Function], Function]:
        def register(run: Function) -> Function:
            self.providers[name] = Provider(name, on, run, accepts or (lambda **facts: True), prepare, fuses)
            return run

        return register

    def on_meta(self, *args: Any, **kwargs: Any) -> Any:
        return with_all(lambda: (self.shape or self.body)(*args, **kwargs))


OPERATIONS: dict[str, Operation] = {}


def op(*, cost: Callable[..., Cost], shape: Function | None = None) -> Callable[[Function], Operation]:
    """Register the decorated torch function as an operation's body; `cost` and `shape` take the same arguments."""

    def register(body: Function) -> Operation:
        name = body.__name__
        assert name not in OPERATIONS, f"operation {name} is registered twice"
        OPERATIONS[name] = Operation(name, body, cost, shape)
        return OPERATIONS[name]

    return register


class CallRecorder(Protocol):
    def add(self, operation: Operation, provider: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call. The return value has the shapes of the operation's results."""
        ...


class Kit:
    """The providers for one device, in order of preference; the torch body is the last resort."""

    def __init__(self, device: str = "cpu", prefer: Sequence[str] = PROVIDERS) -> None:
        self.device = device
        self.prefer = tuple(prefer)
        self.chosen: dict[str, Counter[str]] = {}
        """Label of an operation -> provider -> number of bindings in the model."""

        self.bodies: Counter[tuple[str, str]] = Counter()
        """(label of an operation, scheme of its weight) -> number of bindings for which this kit has only the torch
        body."""

        self.recorder: CallRecorder | None = None
        """While set, calls of bound operations go to it instead of their provider."""

    def bind(self, operation: Operation, **facts: Any) -> Function:
        """The operation as a layer calls it."""
        provider, operation = self._choose(operation, facts), operation.bound_with(facts)
        name, run = (BODY, operation.body) if provider is None else (provider.name, provider.run)
        self.chosen.setdefault(operation.label, Counter())[name] += 1
        if (
            provider is None
            and self.has_kernels
            and (scheme := getattr(facts.get("weight"), "scheme", None)) is not None
        ):
            self.bodies[operation.label, scheme.name] += 1

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.recorder is None:
                return run(*args, **kwargs)
            return self.recorder.add(operation, name, args, kwargs)

        return call

    def prepare(self, operation: Operation, stored: Any, /, **facts: Any) -> Any:
        """The weight in the layout of the provider that `bind` chooses for these facts."""
        provider = self._choose(operation, facts)
        return stored if provider is None or provider.prepare is None else provider.prepare(stored)

    @contextmanager
    def recording(self, recorder: CallRecorder) -> Iterator[None]:
        self.recorder = recorder
        try:
            yield
        finally:
            self.recorder = None

    @property
    def has_kernels(self) -> bool:
        """Whether it prefers anything that is faster than the torch bodies."""
        return any(name != TRAIN for name in self.prefer)

    @property
    def stacks(self) -> bool:
        """Whether layers with the same input are stacked into one. That pays where launches and narrow products cost
        more than views of the result; a tape on a CPU fuses them without it."""
        return self.device == "cuda" and self.has_kernels

    def offers(self, operation: Operation, **facts: Any) -> bool:
        """Whether a provider accepts these facts. Layers use fused operations only if one does."""
        return self._choose(operation, facts) is not None

    def _choose(self, operation: Operation, facts: dict[str, Any]) -> Provider | None:
        for name in self.prefer:
            provider = operation.providers.get(name)
            if provider is None or provider.on not in (self.device, ANYWHERE):
                continue
            fused = operation.bound_with(facts).fused
            if (not fused or fused in provider.fuses) and provider.accepts(**facts):
                return provider
        return None


def kit_for(device: str, providers: str = "auto") -> Kit:
    """`providers`: auto (the fastest that accept), or torch (bodies only: the reference)."""
    if providers not in ("auto", BODY):
        raise ConfigError(f"providers={providers!r} is unknown; use 'auto' or 'torch'.")
    if device == "cuda" and providers != BODY:
        import bankfull.ops.triton.providers  # noqa: F401  (registers them; only a GPU needs the import)
    return Kit(device, () if providers == BODY else PROVIDERS)


def training_kit(device: str) -> Kit:
    """The kit of a model whose passes are differentiated: torch bodies, and functions of whole sequences in place of
    the operations with state."""
    import bankfull.ops.train.providers  # noqa: F401  (registers them; only training needs the import)

    return Kit(device, (TRAIN,))
