"""Collectives whose messages are quantized; see `rewriter.runtime.collectives` for the functions of tensors."""

from rewriter.runtime.quantized.launch import all_gather_start, all_reduce_start, all_to_all_start, reduce_scatter_start
from rewriter.runtime.quantized.topology import Topology, topology_of

__all__ = [
    "Topology",
    "all_gather_start",
    "all_reduce_start",
    "all_to_all_start",
    "reduce_scatter_start",
    "topology_of",
]
