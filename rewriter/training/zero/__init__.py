"""ZeRO: stages 1 and 2 on plain modules; and over nodes with slow links between them, on FSDP2: ZeRO++'s three parts,
weights that stay in the node, frozen weights kept quantized, and weights written quantized."""

from rewriter.training.zero.frozen import Frozen, quantize_frozen
from rewriter.training.zero.node_local import NodeResident, node_resident
from rewriter.training.zero.nodes import node_mesh
from rewriter.training.zero.plus_plus import ZeroPlusPlus, zero_plus_plus
from rewriter.training.zero.quantized_export import Exported, export_quantized, load_quantized
from rewriter.training.zero.stages import StagedOptimizer, zero_optimizer

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
    "zero_optimizer",
    "zero_plus_plus",
]
