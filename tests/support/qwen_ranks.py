"""The hand-written sharded model of runtime_qwen.py, built on a rank, and prompts for it."""

from __future__ import annotations

import ranks as _ranks  # noqa: F401  (its fork server starts before transformers is imported)
import runtime_qwen
import runtime_reference as reference

LAYERS, LADDER_FROM = runtime_qwen.LAYERS, runtime_qwen.LADDER_FROM


PROMPTS = [[5, 9, 33], [60, 2, 17, 40, 8, 21, 3, 3, 50], [7], [11, 12, 13, 14, 15, 16]]


def build(group, weights, ladder_from=LADDER_FROM):
    """This rank's module with its part of `weights`."""
    rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
    model = runtime_qwen.Model(group, ladder_from)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    for name, value in weights.items():
        own[name].data.copy_(reference.shard(name, value, rank, size))
    return model.eval()
