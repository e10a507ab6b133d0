"""Attention on a rank: over its own tokens and a cache, or exactly over the tokens of all ranks of a sequence axis."""
