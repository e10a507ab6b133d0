"""What nodes send each other in a step of ZeRO++ and of node-local weights, in M: bytes of the 16-bit parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_ranks
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp
from transformers import LlamaConfig, LlamaForCausalLM
from zero_model import LOCAL, NODES, RANKS, batches, distributed, sgd

from rewriter.runtime import record_events


def large_model():
    """All sizes multiples of 4 ranks × blocks of 128, but for norms: as large models are."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).bfloat16()


class Counted:
    """FSDP2's own collectives, and those in their place: bytes of the full tensors that they gather and scatter, and of
    those whose ranks do not share a node."""

    def __init__(self, patch):
        self.full = {"gathered": 0, "reduced": 0, "across nodes": 0}
        gather, scatter = fsdp.DefaultAllGather.__call__, fsdp.DefaultReduceScatter.__call__

        def gathered(comm, output_tensor, input_tensor, group, *args, **named):
            self._count("gathered", output_tensor.nbytes, group)
            return gather(comm, output_tensor, input_tensor, group, *args, **named)

        def reduced(comm, output_tensor, input_tensor, group, *args, **named):
            self._count("reduced", input_tensor.nbytes, group)
            return scatter(comm, output_tensor, input_tensor, group, *args, **named)

        patch(fsdp.DefaultAllGather, "__call__", gathered)
        patch(fsdp.DefaultReduceScatter, "__call__", reduced)

    def _count(self, what, size, group):
        nodes = {rank // LOCAL for rank in torch.distributed.get_process_group_ranks(group)}
        self.full[what] += size
        self.full["across nodes"] += size * (len(nodes) > 1)


def byte_counts(group):
    """By system: bytes that this rank received from other nodes by our events, and what FSDP2's collectives held."""
    found = {}
    for name, hooks in BYTES.items():
        made, formats = large_model(), {"gradients": "int4-hadamard", "weights": "int4"}
        parameters = sum(p.numel() for p in made.parameters())
        optimizer = distributed(made, hooks, sgd, formats, reshard=True)
        with pytest.MonkeyPatch.context() as patch, record_events() as events:
            counted = Counted(patch.setattr)
            made(batches(group)[0] % 512).logits.float().square().mean().backward()
            optimizer.step()
        crossing = sum(e.received for e in events if e.kind == "wire" and e.axis == "node")
        found[name] = crossing, counted.full, parameters
    return found


BYTES = {  # None: node-local weights
    "plain": {},
    "hpz": {"secondary": LOCAL},
    "qwz": {"weights": "int8", "node": LOCAL},
    "qgz": {"gradients": "int8/int4", "node": LOCAL},
    "all": {"weights": "int8", "gradients": "int8/int4", "secondary": LOCAL},
    "node-local": None,
}


@functools.cache
def counted_bytes():
    """By system, in M: what each node receives from others ÷ (1 − 1/nodes) by our count, and what FSDP2's own
    collectives hold."""
    ranks = run_ranks(byte_counts, RANKS)
    result = {}
    for name in BYTES:
        per_node = [sum(rank[name][0] for rank in ranks[y * LOCAL : (y + 1) * LOCAL]) for y in range(NODES)]
        assert per_node[0] == per_node[1]
        m = 2 * ranks[0][name][2]
        full = {what: size / m for what, size in ranks[0][name][1].items()}
        result[name] = per_node[0] / (1 - 1 / NODES) / m, full
    return result


@pytest.mark.slow
def test_plain_full_sharding_moves_three_times_the_parameters():
    """Two gathers and a reduction of everything. Each of a rank's neighbours receives all of another node's shards for
    itself where a gather is direct, and a node receives them once where it is hierarchical."""
    crossing, full = counted_bytes()["plain"]
    assert crossing == 0  # none of our messages
    assert full == pytest.approx({"gathered": 2.0, "reduced": 1.0, "across nodes": 3.0})


def test_bytes_between_nodes_keep_what_the_paper_promises():
    counted = counted_bytes()
    assert counted["hpz"][1]["reduced"] == pytest.approx(1.0)
    assert counted["qwz"][0] == pytest.approx(2 * 0.5 * 130 / 128, rel=0.01)  # forward and backward
    assert counted["qgz"][0] == pytest.approx(0.25 * 66 / 64, rel=0.01)
    assert counted["all"][0] <= 0.77
    assert counted["all"][1]["reduced"] == 0  # nothing goes another way
    assert counted["node-local"][0] <= 0.55


def test_nothing_else_of_fsdp2_crosses_nodes():
    """What its own collectives still move stays among the ranks of a node: gathers and reductions of one."""
    for name in ("all", "node-local"):
        _, full = counted_bytes()[name]
        assert full["gathered"] == pytest.approx({"all": 1.0, "node-local": 2.0}[name]), name
        assert full["across nodes"] == 0, name
    # hpZ alone: one gather and the reduction
    assert counted_bytes()["hpz"][1]["across nodes"] == pytest.approx(2.0)
