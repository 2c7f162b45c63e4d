"""An engine whose captured steps are launched one by one, kernels in the interpreter: drafts change no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bankfull.config import SchedConfig, StateConfig
from bankfull.decode.plain import Plain
from bankfull.decode.strategy import Draft, Strategy, View
from bankfull.layers.build import Build
from bankfull.models.registry import build_model
from bankfull.ops import attend, move_tokens, paged_attention, write_pages
from bankfull.ops.attention.triton import paged as attention
from bankfull.ops.registry import Kit, Operation, Provider
from bankfull.runtime.captured import GREEDY, Captured, RecordedStep
from bankfull.runtime.captured_verify import CapturedVerify
from bankfull.runtime.device import Cpu, MoveTokens
from bankfull.runtime.forward import ChoosingStep, Eager, Forward, VerifyingStep
from bankfull.runtime.rows import Rows, Ship
from bankfull.sample.table import Chooser
from bankfull.state.storage import Storage
from bankfull.weights.source import open_model
from tests.gpu.engines import Echo, EchoTree
from tests.kit import Bench
from tests.tiny import folder_of

CPU = torch.device("cpu")


class LaunchedOneByOne(Cpu):
    """A GPU whose kernels run in the interpreter: nothing is captured, and only the device knows its rows' lengths."""

    kind, depth = "interpreted", 1

    def __init__(self) -> None:
        super().__init__()
        self.verified: list[int] = []
        """Rows of each verification that was a captured kind."""

    def capture(self, forward: Eager, kit: Kit) -> Forward:
        return Uncaptured(forward)

    def choosing(self, forward: Forward, rows: Rows) -> ChoosingStep | None:
        return None

    def verifying(self, forward: Forward, rows: Rows, storage: Storage, move: MoveTokens) -> VerifyingStep | None:
        assert isinstance(forward, Captured)
        made = CapturedVerify(forward, rows, storage, move)
        made._recorded = {(kind, GREEDY): made._blank(kind) for kind in forward.steps if kind.width > 1}

        def counted(work: Any) -> Any:
            verdict = made(work)
            if verdict is not None:
                self.verified.append(len(work))
            return verdict

        return counted

    def chooser(self, kit: Kit) -> Chooser | None:
        return None

    @property
    def ship(self) -> Ship | None:
        return lambda array: torch.from_numpy(array.copy())


class Uncaptured(Captured):
    def capture(self, rows: Rows, widths: Any, chooser: Chooser | None, tokens: int = 0) -> None:
        self.enabled = False
        self._take(rows, chooser)
        self._widths, self._chunks = sorted(widths), None
        for kind in self._kinds(widths):
            batch = self._blank(kind.rows, kind.width)
            hidden = torch.zeros(kind.rows * kind.width, self.eager.model.hidden)  # type: ignore[attr-defined]
            self.steps[kind] = RecordedStep(None, batch, hidden, {})  # type: ignore[arg-type]


class Fewer(Echo):
    """Proposes as many drafts as it may, of which later steps verify fewer."""

    def __init__(self) -> None:
        super().__init__(6)

    def width(self, load: int) -> int:
        return 6 if load == 0 else 2 + load

    def propose(self, view: View) -> Draft | None:
        last = view.tokens[view.rows, view.known[view.rows] - 1]
        return Draft(last[:, None].expand(-1, 6).contiguous())


class AttentionKernels(Kit):
    """Kernels only where the bodies would read the lengths that the host knows: the interpreter is slow."""

    def _choose(self, operation: Operation, facts: dict[str, Any]) -> Provider | None:
        kernels = (attend.name, paged_attention.name, write_pages.name, move_tokens.name)
        return super()._choose(operation, facts) if operation.name in kernels else None


def answers(strategy: Strategy, device: LaunchedOneByOne) -> dict[Any, list[int]]:
    kit = AttentionKernels("cuda", ("triton",))
    files = open_model(folder_of("llama"))
    model = build_model(files.config, Build(files.source, kit, torch.float32, CPU))
    bench = Bench(
        model,
        device,
        1,
        SchedConfig(rows=2, step_tokens=16),
        StateConfig(page_tokens=4),
        strategy,
        frames=40,
        max_len=10,
        kit=kit,
    )
    for number, (prompt, count) in enumerate((([5, 6, 7], 6), ([9, 9], 7), ([11], 5))):
        bench.add(number, prompt, count)
    bench.run()
    return bench.tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(("strategy", "fused"), [(Fewer, True), (EchoTree, False)])
def test_captured_verification_changes_no_token(
    strategy: Callable[[], Strategy], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places without a token hold NaN. Attention that is not fused reads padding tokens from their pages."""
    expected = answers(Plain(), LaunchedOneByOne())
    if not fused:
        monkeypatch.setattr(attention, "MOST_TOKENS", 2)
    device = LaunchedOneByOne()
    assert answers(strategy(), device) == expected
    assert device.verified, "no step was verified as a captured one is"
