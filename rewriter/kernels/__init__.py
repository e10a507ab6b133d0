"""Triton kernels, each with the plain PyTorch function that is its specification. Imports nothing of ours.

Where there is no GPU, or no Triton (macOS, Windows), the specification runs.
"""

from rewriter.kernels.decode_attention import decode_attention
from rewriter.kernels.formats import SMALLEST_BLOCK, Format, parse_format, parse_formats, slice_length
from rewriter.kernels.merge import accumulation_dtype, merge, sum_into
from rewriter.kernels.quantize import (
    DTYPES,
    dequantize,
    dequantize_reduce,
    dequantize_reduce_quantize,
    dequantize_rows,
    dequantize_vectors,
    quantize,
    quantize_rows,
    quantize_vectors,
    vector_bytes,
)

__all__ = [
    "DTYPES",
    "SMALLEST_BLOCK",
    "Format",
    "accumulation_dtype",
    "decode_attention",
    "dequantize",
    "dequantize_reduce",
    "dequantize_reduce_quantize",
    "dequantize_rows",
    "dequantize_vectors",
    "merge",
    "parse_format",
    "parse_formats",
    "quantize",
    "quantize_rows",
    "quantize_vectors",
    "slice_length",
    "sum_into",
    "vector_bytes",
]
