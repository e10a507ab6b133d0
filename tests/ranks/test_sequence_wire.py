"""Messages between ranks: what arrives, and that both directions of a link are used at once."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from ranks import run_ranks

from rewriter.runtime import record_events
from rewriter.runtime.collectives.exchange import all_to_all_start, exchange_start, gather_start


def messages(group):
    """What arrives at each function, the operations that it starts, and the bytes that it counts."""
    rank, ranks, found = group.rank(), group.size(), []
    started, start = [], dist.batch_isend_irecv

    def watched(operations):
        started.append([operation.op.__name__ for operation in operations])
        return start(operations)

    def numbers(to):
        """Of two dtypes, whose bytes do not align; from here to `to`."""
        return [torch.tensor([rank, to, 5], dtype=torch.uint8), torch.tensor([[rank + to / 8]], dtype=torch.float64)]

    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    with patch.object(dist, "batch_isend_irecv", watched):
        for begin in (
            lambda: gather_start(numbers(0), group, "gather"),
            lambda: all_to_all_start([numbers(r) for r in range(ranks)], group, "all to all"),
            lambda: exchange_start(numbers(after), after, before, "exchange", group),
        ):
            with record_events() as events:
                arrived = begin().wait()
            found.append((arrived, [(e.sent, e.received) for e in events]))
    return found, started


def test_messages_arrive_whole_and_receives_are_posted_before_sends():
    """A receive that is posted after a send on the same connection makes gloo use one direction at a time."""
    for rank, (found, started) in enumerate(run_ranks(messages, 3)):
        (gathered, g), (dealt, a), ((small, large), e) = found
        assert [(s.tolist(), x.item()) for s, x in gathered] == [([r, 0, 5], r) for r in range(3)]
        assert [(s.tolist(), x.item()) for s, x in dealt] == [([r, rank, 5], r + rank / 8) for r in range(3)]
        before = (rank - 1) % 3
        assert (small.tolist(), large.item()) == ([before, rank, 5], before + rank / 8)
        assert (g, a, e) == ([(22, 22)], [(22, 22)], [(11, 11)])
        assert started == [["irecv"] * 2 + ["isend"] * 2] * 2 + [["irecv", "isend"]]
