"""Keys and values that travel quantized.

The rank that computed them quantizes them once, each head's vector of a token by itself, and all that is sent, kept for
backward and gathered again are these bytes. So every rank computes with the same values, the owner too, and backward
with those of forward; what a vector becomes depends neither on the grid nor on the tokens beside it. Queries, outputs,
log-sum-exps and gradients travel as they are; the gradient of a dequantized value is taken for that of the value
(straight through).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewriter.kernels import Format, dequantize_vectors, quantize_vectors


@dataclass(frozen=True)
class QuantizedKV:
    """`format`: of keys of `head_dim` and values of `value_dim` elements of `dtype`."""

    format: Format
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def closed(self, k_BKSD: Tensor, v_BKSE: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, K, S, W] each: what travels."""
        return quantize_vectors(k_BKSD, self.format), quantize_vectors(v_BKSE, self.format)

    def opened(self, k_BKSW: Tensor, v_BKSW: Tensor) -> tuple[Tensor, Tensor]:
        """(k_BKSD, v_BKSE), of any of these heads and tokens in any order."""
        return (
            dequantize_vectors(k_BKSW, self.format, self.head_dim, self.dtype),
            dequantize_vectors(v_BKSW, self.format, self.value_dim, self.dtype),
        )
