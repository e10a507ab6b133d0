"""Training on ranks: sharded parameters and optimizers, ZeRO, expert parallelism, quantized frozen weights.

The gradients that ranks of a sequence or replicas share are summed by hooks on a plain runtime module
(`rewriter.runtime.sum_gradients`, which its forward calls). `shard_parameters` has FSDP2 do it, and shard parameters,
gradients and optimizer state. `shard_optimizer` leaves parameters on every rank and shards the optimizer (ZeRO stages 1
and 2), as `zero_optimizer` does for any module. Where nodes have slow links between them, `zero_plus_plus` quantizes
what FSDP2 communicates, and `node_local_optimizer` keeps weights in the node. `shard_experts` distributes the experts
of a Hugging Face model. `quantize_frozen` stores weights that are not trained as bytes.
"""

from rewriter.training.expert_parallel import ExpertParallel, expert_mesh, shard_experts
from rewriter.training.sharding import shard_optimizer, shard_parameters
from rewriter.training.zero.frozen import FrozenWeights, quantize_frozen
from rewriter.training.zero.node_local import NodeLocalOptimizer, node_local_optimizer
from rewriter.training.zero.nodes import node_mesh
from rewriter.training.zero.plus_plus import zero_plus_plus
from rewriter.training.zero.stages import ZeroOptimizer, zero_optimizer

__all__ = [
    "ExpertParallel",
    "FrozenWeights",
    "NodeLocalOptimizer",
    "ZeroOptimizer",
    "expert_mesh",
    "node_local_optimizer",
    "node_mesh",
    "quantize_frozen",
    "shard_experts",
    "shard_optimizer",
    "shard_parameters",
    "zero_optimizer",
    "zero_plus_plus",
]
