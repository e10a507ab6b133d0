"""Emit: a Program to files. One file per target; nothing here writes to disk but the ONNX export."""
