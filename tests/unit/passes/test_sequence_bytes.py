"""What distributed attention sends, receives and keeps is what the planner says, to the byte, on every rank."""

from __future__ import annotations

import pytest
from attention_cases import RANKS, chosen

from rewriter.passes.sequence.distributed_attention import AttentionShape, wire_bytes
from rewriter.passes.sequence.sequence_costs import memory


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_on_the_wire_are_the_planners(ranks):
    for outcome in chosen(ranks):
        case = outcome.case
        shape = AttentionShape(
            *case.heads, case.head_dim, case.value_dim, batch=case.batch, dtype_bytes=case.dtype.itemsize
        )
        planned = [wire_bytes(case.plan, shape, case.length, rank) for rank in range(ranks)]
        assert outcome.forward == [(p.forward, p.forward) for p in planned], case.name
        assert outcome.backward == [(p.backward, p.backward) for p in planned], case.name
        assert [sum(kept) for kept in outcome.saved] == [memory(case.plan, shape, case.length).saved] * ranks, case.name
