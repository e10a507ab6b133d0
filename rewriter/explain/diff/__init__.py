"""Differences of two models: passes, layers, generated code, tensors; on the terminal, as JSON, as one HTML page."""
