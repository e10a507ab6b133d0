"""Triton kernels, each beside the plain PyTorch function that is its specification. Imports nothing of ours.

Where there is no GPU, or no Triton (macOS, Windows), the specification runs.
"""

from rewriter.kernels.merge import accumulation_dtype, merge

__all__ = ["accumulation_dtype", "merge"]
