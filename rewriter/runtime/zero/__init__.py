"""Training over nodes with slow links between them, on FSDP2: ZeRO++'s three parts, and weights that stay in the
node."""

from rewriter.runtime.zero.nodes import node_mesh
from rewriter.runtime.zero.plus_plus import ZeroPlusPlus, zero_plus_plus
from rewriter.runtime.zero.resident import NodeResident, node_resident

__all__ = ["NodeResident", "ZeroPlusPlus", "node_mesh", "node_resident", "zero_plus_plus"]
