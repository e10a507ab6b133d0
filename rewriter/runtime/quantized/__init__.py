"""Collectives whose messages are quantized; see `rewriter.runtime.collectives` for the functions of tensors."""
