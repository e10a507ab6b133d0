"""Collectives whose messages are quantized."""
