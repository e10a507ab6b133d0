"""Models whose tokens are sharded over ranks, built and trained on each rank."""

from __future__ import annotations

import runtime_qwen
import runtime_reference as reference
import torch

from rewriter.ir.ops import SequencePlan

LENGTH, STEPS, RATE = 37, 10, 0.02
COLUMN, SQUARE, PAIR = (SequencePlan("attention2d", grid) for grid in ((1, 2, 1), (1, 2, 2), (1, 1, 2)))


def batch():
    """Tokens and labels [4, LENGTH]. Targets are few in the first replica's rows, and many in the second's."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(reference.VOCAB, (4, LENGTH), generator=random)
    labels = ids.clone()
    labels[0, 5:] = labels[1, 1:20] = -100
    return ids, labels


def build(plan, dp=1, tp=1):
    """The model of this rank, with its weights, and its rows of the batch."""
    from rewriter.runtime import sequence_mesh

    mesh = sequence_mesh("cpu", plan.grid, data_parallel=dp, tensor_parallel=tp)
    model = runtime_qwen.Model(mesh, plan=plan)
    rank, where = mesh.get_local_rank("tp"), mesh.get_local_rank("dp")
    model.load_state_dict({name: reference.shard(name, w, rank, tp) for name, w in reference.weights().items()})
    rows = slice(where * 4 // dp, (where + 1) * 4 // dp)
    return model, *(x[rows] for x in batch())


def pair_model(on_ranks):
    from rewriter.runtime import sequence_mesh

    model = runtime_qwen.Model(sequence_mesh("cpu", PAIR.grid) if on_ranks else None, plan=PAIR)
    model.load_state_dict(reference.weights())
    return model
