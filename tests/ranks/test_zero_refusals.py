"""Wrong uses of ZeRO++ and of node-local weights: each is refused by name."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import refusal, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from zero_model import LOCAL, RANKS, batches, flat_mesh, model, node_local, sgd, sharded

from rewriter.training import node_local_optimizer, node_mesh, zero_plus_plus


def refusals(group):
    """What is said of each wrong use."""
    plain, done = model(), sharded(model())
    mixed = model()
    mixed.bend.bfloat16()
    sharded(mixed)
    pinned = sharded(model())
    pinned.set_allocate_memory_from_process_group_for_comm(True)
    aside = nn.Linear(4, 6, bias=False)
    fully_shard(aside, mesh=flat_mesh(), reshard_after_forward=True, shard_placement_fn=lambda _: Shard(1))
    unequal = model()
    with torch.no_grad():
        unequal.gain += group.rank() // LOCAL
    mesh = node_mesh("cpu", LOCAL)
    partly = model()
    fully_shard(partly.llama, mesh=mesh["local"])
    calls = {
        "nothing": lambda: zero_plus_plus(done),
        "not sharded": lambda: zero_plus_plus(plain, weights="int8"),
        "node": lambda: zero_plus_plus(done, weights="int8"),
        "node divides": lambda: zero_plus_plus(done, weights="int8", node=3),
        "secondary divides": lambda: zero_plus_plus(done, secondary=3),
        "format": lambda: zero_plus_plus(done, weights="int5", node=2),
        "hops": lambda: zero_plus_plus(done, gradients="int8/int5", node=2),
        "dithered": lambda: zero_plus_plus(done, gradients="int8/fp8", node=2),
        "weights of hops": lambda: zero_plus_plus(done, weights="int8/int4", node=2),
        "dtypes": lambda: zero_plus_plus(mixed, weights="int8", node=2),
        "other communication": lambda: zero_plus_plus(pinned, weights="int8", node=2),
        "along columns": lambda: zero_plus_plus(aside, secondary=2),
        "mesh": lambda: node_local_optimizer(sharded(model()), mesh, sgd),
        "one dimension": lambda: node_local_optimizer(plain, flat_mesh(), sgd),
        "unequal": lambda: node_local_optimizer(sharded(unequal, mesh["local"]), mesh, sgd),
        "part": lambda: node_local_optimizer(partly, mesh, sgd),
        "nothing trained": lambda: node_local_optimizer(
            sharded(model().requires_grad_(False), mesh["local"]), mesh, sgd
        ),
        "dithered between nodes": lambda: node_local_optimizer(partly, mesh, sgd, gradients="fp8@64"),
        "gradient format": lambda: node_local_optimizer(partly, mesh, sgd, gradients="int8/int4"),
    }
    found = {name: refusal(call) for name, call in calls.items()}
    made = model()
    optimizer = node_local(made)
    made.llama.requires_grad_(False)
    found["unused"] = refusal(lambda: made(batches(group)[0]).backward())
    found["place"] = refusal(lambda: optimizer.load_state_dict({**optimizer.state_dict(), "place": (2, 2, 9, 9)}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        found["unequal nodes"] = refusal(lambda: zero_plus_plus(sharded(model()), weights="int8"))
        patch.setenv("LOCAL_WORLD_SIZE", str(LOCAL))
        found["nodes"] = str(tuple(node_mesh("cpu").shape))
    return found


@functools.cache
def refused():
    return run_ranks(refusals, RANKS)[0]


REFUSED = {
    "nothing": "nothing to do",
    "not sharded": "Model is not sharded. Call torch.distributed.fsdp.fully_shard",
    "node": "LOCAL_WORLD_SIZE is not set",
    "node divides": "node=3 does not divide the 4 ranks",
    "secondary divides": "secondary=3 does not divide the 4 ranks",
    "format": "weights: format 'int5'",
    "hops": "gradients: format 'int5'",
    "dithered": "zero_plus_plus: gradients: format 'fp8': its levels are not uniform",
    "dithered between nodes": "node_local_optimizer: gradients: format 'fp8@64': its levels are not uniform",
    "weights of hops": "weights: format 'int8/int4'",
    "dtypes": "are gathered as ['torch.bfloat16', 'torch.float32']",
    "other communication": "communicates with ProcessGroupAllocAllGather already",
    "along columns": "sharded along dimension 1",
    "mesh": "is sharded over ranks [0, 1, 2, 3], expected those of this node",
    "one dimension": "a mesh of 1 dimensions",
    "unequal": "nodes hold different weights in Model",
    "part": "parameter gain is not one that FSDP2 has sharded",
    "nothing trained": "no parameter of Model requires a gradient",
    "gradient format": "gradients: format 'int8/int4'",
    "unused": "some parameters got no gradient",
    "place": "state of (2, 2, 9, 9), expected (2, 2, 0, 0)",
    "unequal nodes": "LOCAL_WORLD_SIZE=3 the shard group's ranks [0, 1, 2, 3] lie on nodes [0, 0, 0, 1]",
}


def test_torchrun_says_which_ranks_share_a_node():
    assert refused()["nodes"] == f"({RANKS // LOCAL}, {LOCAL})"


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_refused_by_name(case):
    assert REFUSED[case] in refused()[case]
