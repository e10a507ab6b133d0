"""Attention on a rank: over its own tokens and a cache, or exactly over the tokens of all ranks of a sequence axis."""

from rewriter.runtime.attention.cached import attention
from rewriter.runtime.attention.mesh_functions import attention2d, ring_attention, ulysses_attention

__all__ = ["attention", "attention2d", "ring_attention", "ulysses_attention"]
