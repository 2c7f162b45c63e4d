"""Operations: a body that is the meaning, a cost, and providers that compute the same thing faster.

A layer binds its operations once, when the model is built, through a `Kit`: which provider runs is decided then, from
the device and from what is known of the operands (`facts`: dtype, weight, ...), never per call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bankfull.errors import ConfigError
from bankfull.ops.cost import Cost

Function = Callable[..., Any]
BODY = "torch"
FLOAT, INT8 = "float", "int8"


@dataclass(frozen=True, slots=True)
class Provider:
    name: str
    on: str
    run: Function
    accepts: Callable[..., bool]
    """Called with the facts of the binding as keywords; must tolerate facts that it does not know."""


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
        self, name: str, *, on: str, accepts: Callable[..., bool] | None = None
    ) -> Callable[[Function], Function]:
        def register(run: Function) -> Function:
            self.providers[name] = Provider(name, on, run, accepts or (lambda **facts: True))
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


class Kit:
    """The providers for one device, in order of preference; the torch body stands behind them all."""

    def __init__(
        self, device: str = "cpu", prefer: Sequence[str] = ("native", "triton"), activations: str = FLOAT
    ) -> None:
        self.device = device
        self.prefer = tuple(prefer)
        self.activations = activations
        """FLOAT: weights alone are quantized. INT8: so is what they are multiplied with (lossy)."""
        self.chosen: dict[str, Counter[str]] = {}
        """Operation -> provider -> how many places of the model were bound to it."""

    def bind(self, operation: Operation, **facts: Any) -> Function:
        for name in self.prefer:
            provider = operation.providers.get(name)
            if provider is not None and provider.on == self.device and provider.accepts(**facts):
                return self._note(operation, name, provider.run)
        return self._note(operation, BODY, operation.body)

    def _note(self, operation: Operation, provider: str, run: Function) -> Function:
        self.chosen.setdefault(operation.name, Counter())[provider] += 1
        return run


def kit_for(device: str, providers: str = "auto", activations: str = FLOAT) -> Kit:
    """`providers`: auto (the fastest that accept), or torch (bodies only: the reference)."""
    if providers not in ("auto", BODY):
        raise ConfigError(f"providers={providers!r} is unknown; use 'auto' or 'torch'.")
    if activations not in (FLOAT, INT8):
        raise ConfigError(f"activations={activations!r} is unknown; use 'float' or 'int8'.")
    return Kit(device, () if providers == BODY else ("native", "triton"), activations)
