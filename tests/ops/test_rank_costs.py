"""Declared costs of operations whose operands are spread over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bankfull.ops import OPERATIONS
from bankfull.ops.cost import nbytes
from tests.ops import cases
from tests.parallel.threads import ThreadRank, on_ranks

EXCHANGED: dict[str, Any] = {
    "all_reduce": (),
    "reduce_scatter": (),
    "gather_rows": (30,),
    "gather_outputs": (30,),
    "exchange_parts": (),
}
"""Collectives, and their arguments besides a tensor and a group."""


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", EXCHANGED)
def test_declared_bytes_on_the_wire_are_those_that_a_rank_sends(name: str, ranks: int) -> None:
    shape = (ranks, 12, 7) if name == "exchange_parts" else (8, 12)

    def work(rank: ThreadRank) -> tuple[float, int]:
        args = (torch.randn(shape), rank, *EXCHANGED[name])
        declared = OPERATIONS[name].cost(*args)
        OPERATIONS[name].body(*args)
        return declared.wire, sum(rank.sent)

    for declared, sent in on_ranks(ranks, work):
        assert declared == sent
        assert (sent == 0) == (ranks == 1)


@pytest.mark.parametrize("name", EXCHANGED)
def test_a_collective_reads_what_it_gives_and_writes_what_it_gets(name: str) -> None:
    ranks = 4
    shape = (ranks, 12, 7) if name == "exchange_parts" else (8, 12)

    def work(rank: ThreadRank) -> None:
        args = (torch.randn(shape), rank, *{"gather_rows": (32,), "gather_outputs": (48,)}.get(name, ()))
        declared = OPERATIONS[name].cost(*args)
        assert declared.read == nbytes(args[0])
        assert declared.write == nbytes(OPERATIONS[name].body(*args))

    on_ranks(ranks, work)


def test_partial_attention_costs_its_share_of_the_keys() -> None:
    for seed in range(40):
        made = cases.case("partial_attention", seed)
        q, k, v, meta, _, *rest = made.args
        values = k[..., :v] if isinstance(v, int) else v
        whole = OPERATIONS["paged_attention"].cost(q, k, values, meta, *rest)
        written = nbytes(OPERATIONS["partial_attention"].body(*made.args))
        for ranks in (1, 2, 4):
            declared = OPERATIONS["partial_attention"].cost(q, k, v, meta, ranks, *rest)
            assert declared.flops == pytest.approx(whole.flops / ranks)
            assert declared.write == pytest.approx(written)
            keys = (whole.read - nbytes(q)) / ranks
            if isinstance(v, int):  # a value inside its key is read with it
                keys *= k.shape[-1] / (k.shape[-1] + v)
            assert declared.read == pytest.approx(nbytes(q) + keys)
