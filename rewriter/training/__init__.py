"""What a rank needs to train: sharded parameters and optimizers, ZeRO, frozen weights kept quantized.

The gradients that ranks of a sequence or replicas share are summed by hooks on a plain runtime module
(`rewriter.runtime.sum_gradients`, which its forward calls). `shard_parameters` has FSDP2 do it, and shard parameters,
gradients and optimizer state. `shard_optimizer` leaves parameters whole and shards the optimizer (ZeRO stages 1 and 2),
as `zero_optimizer` does for any module. Where nodes have slow links between them, `zero_plus_plus` quantizes what FSDP2
communicates, and `node_resident` keeps weights in the node. `quantize_frozen` keeps weights that are not trained as
bytes, and `export_quantized` writes those that were.
"""

from rewriter.training.sharding import shard_optimizer, shard_parameters
from rewriter.training.zero import (
    Exported,
    Frozen,
    NodeResident,
    StagedOptimizer,
    ZeroPlusPlus,
    export_quantized,
    load_quantized,
    node_mesh,
    node_resident,
    quantize_frozen,
    zero_optimizer,
    zero_plus_plus,
)

__all__ = [
    "Exported",
    "Frozen",
    "NodeResident",
    "StagedOptimizer",
    "ZeroPlusPlus",
    "export_quantized",
    "load_quantized",
    "node_mesh",
    "node_resident",
    "quantize_frozen",
    "shard_optimizer",
    "shard_parameters",
    "zero_optimizer",
    "zero_plus_plus",
]
